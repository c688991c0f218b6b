"""What a user can get wrong at `autokernel run`: a message, the next step, an exit code, and nothing changed."""

import os
import shutil
import subprocess
import sys

import pytest

from autokernel import results


def run(workdir, *arguments, **environ):
    return subprocess.run(
        [sys.executable, "-m", "autokernel", "run", *arguments, "--plain"],
        cwd=workdir,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )


def assert_refused(done, code, *words):
    """A clean refusal: exit code, the words in the message, a hint, no traceback."""
    assert done.returncode == code, done.stderr
    assert "error:" in done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "plain.py").write_text("x = 1\n")
    (tmp_path / "broken.py").write_text("def (\n")
    (tmp_path / "raises.py").write_text(
        "import torch\n\n\nclass Model(torch.nn.Module):\n    def forward(self, x):\n"
        "        raise ValueError('heads must divide hidden')\n\n\ndef get_inputs():\n    return [torch.ones(2)]\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("missing.py", ["missing.py"]),
        ("plain.py", ["Model"]),
        ("broken.py", ["broken.py"]),
        ("raises.py", ["ValueError", "heads must divide hidden"]),
    ],
)
def test_model_that_does_not_run_leaves_no_run_behind(folder, model, words):
    assert_refused(run(folder, model), 2, *words)
    assert not list(folder.glob(".autokernel/*/journal.jsonl"))


def test_foreign_results_file_is_never_touched(folder):
    (folder / "results.tsv").write_text("name\tvalue\nmine\t1\n")
    assert_refused(run(folder, "raises.py"), 8, "results.tsv")
    assert (folder / "results.tsv").read_text() == "name\tvalue\nmine\t1\n"


def test_no_compiler(folder, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "git").symlink_to(shutil.which("git"))
    assert_refused(run(folder, "raises.py", PATH=str(tools), CXX=""), 3, "compiler")


def test_no_git(folder, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    assert_refused(run(folder, "raises.py", PATH=str(tools)), 4, "git")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_directory_as_user(folder):
    folder.chmod(0o500)
    assert_refused(run(folder, "raises.py"), 2, str(folder))


def test_directory_that_cannot_hold_runs(folder):
    (folder / ".autokernel").write_text("a file where the runs should go\n")
    assert_refused(run(folder, "raises.py"), 2, ".autokernel")


@pytest.mark.parametrize(
    "arguments",
    [
        ["plain.py", "--minutes", "-1"],
        ["plain.py", "--ops", "convolution"],
        ["plain.py", "--agent", "oracle"],
        ["plain.py", "--backend", "fortran"],
        ["--resume"],
        ["plain.py", "--agent", "replay:nowhere"],
    ],
)
def test_unusable_arguments(folder, arguments):
    assert_refused(run(folder, *arguments), 2)


def test_results_of_another_run_are_kept(folder):
    path = folder / "results.tsv"
    path.write_text("\t".join(results.COLUMNS) + "\n")
    before = path.read_text()
    assert_refused(run(folder, "raises.py"), 2, "heads must divide hidden")
    assert path.read_text() == before
