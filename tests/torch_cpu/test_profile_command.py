import json

import pytest
import typer
from typer.testing import CliRunner

from autokernel.commands.profile import profile
from autokernel.errors import ConfigError
from autokernel.profiler import ModelProfile
from autokernel.roofline import Ceilings

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return torch.sin(x) + torch.tanh(x).cos()

def get_inputs():
    return torch.ones(64, 64)
"""


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    return str(tmp_path / "model.py")


def invoke(*arguments):
    app = typer.Typer()
    app.command()(profile)
    return CliRunner().invoke(app, arguments)


def test_a_profile_needs_no_compiler(model, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert invoke(model, "--json").exit_code == 0


def test_json_is_one_document_and_nothing_else(model):
    result = invoke(model, "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    profiled = ModelProfile.from_json(document["profile"])
    assert {op.op for op in profiled.ops} >= {"aten::sin", "aten::cos", "aten::tanh", "aten::add"}
    assert Ceilings.from_json(document["ceilings"]).copy_gbps > 0
    assert (document["plan"] is None) == bool(document["obstacle"])
    assert "one tensor" in " ".join(document["notes"])


def test_the_table_sums_to_the_wall_time_and_shows_what_was_guessed(model):
    result = invoke(model, "--rows", "1")
    assert result.exit_code == 0
    assert "note: get_inputs() returned one tensor" in result.stdout
    assert "64x64" in result.stdout
    assert "more ops)" in result.stdout
    (last,) = [line for line in result.stdout.splitlines() if line.startswith("(unattributed")]
    assert last.rstrip().endswith("100.0%")


def test_no_rows_and_a_missing_file_are_refused(model, tmp_path):
    assert isinstance(invoke(model, "--rows", "0").exception, ConfigError)
    assert isinstance(invoke(str(tmp_path / "absent.py")).exception, ConfigError)
