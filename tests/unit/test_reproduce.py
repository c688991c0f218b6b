"""The commands that a report names: those that there are, with flags that they take, and no folder of the machine."""

import shlex
from dataclasses import replace

import pytest
import typer
from sample_run import SETTINGS, summary
from test_report import measured

from autokernel import report, reproduce
from autokernel.cli import app
from autokernel.records import Case, TensorMeta, TimedCase

RUN = "20300102-0304-llama"


def found(settings=SETTINGS, integration=None):
    return report.from_summary(replace(summary(integration), settings=settings))


def test_each_number_has_its_command():
    lines = reproduce.commands(found(integration=measured()))
    kernel = f".autokernel/{RUN}/optimized/rmsnorm/kernel.py"
    for command in (
        "autokernel run examples/llama.py --minutes 5 --seed 0",
        f"autokernel run --resume {RUN} --experiments 6",
        f"autokernel verify {RUN}",
        f"autokernel judge {kernel} --op rmsnorm",
        f"autokernel tune {kernel} --op rmsnorm --dtype fp32 --shape 512x384*9",
        f"git -C .autokernel/{RUN}/worktree log --oneline autokernel/{RUN}",
    ):
        assert command in lines


def test_a_model_that_was_not_measured_is_not_measured_again():
    assert not any("verify" in line or "--resume" in line for line in reproduce.commands(found()))


def test_commands_and_flags_are_those_of_the_command_line():
    settings = replace(SETTINGS, ops=("rmsnorm",), agent="search", backend="cpp", patience=7, compile_baseline=False)
    settings = replace(settings, dtype="bf16", sandbox="strict", tune_s=10.0, max_experiments=3, effort="low")
    settings = replace(settings, llm_model="name", temperature=0.5)
    known = typer.main.get_command(app).commands
    for line in reproduce.commands(found(settings, measured())):
        words = shlex.split(line, comments=True)
        if words[:1] != ["autokernel"]:
            continue
        taken = {flag for option in known[words[1]].params for flag in (*option.opts, *option.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= taken, line


def test_the_machines_folders_are_not_told(tmp_path):
    (tmp_path / "starters").mkdir()
    (tmp_path / "work" / "mine").mkdir(parents=True)
    settings = replace(SETTINGS, workdir=tmp_path / "work", model=str(tmp_path / "nets" / "llama.py:build"))
    settings = replace(settings, agent=f"replay:{tmp_path}/secret/ideas", base_url="http://host.example/v1")
    command = reproduce.run_command(found(replace(settings, starters=tmp_path / "starters")))
    assert command == "autokernel run llama.py:build --minutes 5 --agent replay:ideas --starters starters --seed 0"
    inside = reproduce.run_command(found(replace(settings, agent="search", starters=tmp_path / "work" / "mine")))
    assert inside.endswith("--starters mine --seed 0")


def test_an_odd_name_is_quoted():
    command = reproduce.run_command(found(replace(SETTINGS, model="a b;rm.py")))
    assert shlex.split(command)[2] == "a b;rm.py"


@pytest.mark.parametrize(
    ("op", "tensors", "shape"),
    [
        ("rmsnorm", {"x": (4, 8, 16), "weight": (16,)}, "4x8x16*3"),
        ("matmul", {"a": (2, 3, 8), "b": (8, 5)}, "6x5x8*3"),
        ("fused_mlp", {"x": (2, 3, 8), "w_gate": (32, 8)}, "6x8x32*3"),
        ("cross_entropy", {"logits": (6, 100), "targets": (6,)}, "6x100*3"),
        ("flash_attention", {"q": (1, 2, 8, 4), "k": (1, 2, 8, 4), "v": (1, 2, 8, 4)}, "1x2x8x4*3"),
        ("flash_attention", {"q": (1, 2, 8, 4), "k": (1, 1, 8, 4), "v": (1, 1, 8, 4)}, None),
        ("rotary_embedding", {"x": (1, 2, 8, 4)}, "1x2x8x4*3"),
        ("rotary_embedding", {"x": (2, 8, 4)}, None),
        ("matmul", {"a": (8,), "b": (8, 5)}, None),
        ("reduce", {"x": ()}, None),
    ],
)
def test_a_call_has_the_form_that_tune_takes_or_none(op, tensors, shape):
    metas = {name: TensorMeta(shape=sizes, dtype="fp32") for name, sizes in tensors.items()}
    item = TimedCase(case=Case(op=op, name="model", dtype="fp32", tensors=metas), calls=3)
    assert reproduce.shape_argument(item) == shape


def test_defaults_are_those_of_the_settings():
    for name, value in reproduce._DEFAULTS.items():
        assert getattr(SETTINGS, name) == value
