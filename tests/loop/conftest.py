"""A user's repository, a model in it, a slow starter, and candidates to replay."""

import os
import subprocess
from pathlib import Path

import pytest

from autokernel.loading import starter_path

HERE = Path(__file__).parent
HONEST = (HERE / "honest.py").read_text()
SLOW = HONEST.replace("double scale = 1 /", "for (volatile int i = 0; i < 3000; ++i) {}\n        double scale = 1 /")
"""Right, and slow by the same amount on any machine: it waits in every row."""


def git(folder, *arguments):
    """Output of a git command in `folder`, with an identity of its own."""
    environ = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    identity = ["-c", "user.name=User", "-c", "user.email=user@localhost"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def pytest_collection_modifyitems(items):
    """A run measures time from its first step to its last."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.alone)


@pytest.fixture
def workdir(tmp_path):
    """A dirty repository with norms.py, a folder `starters` with a slow rmsnorm, and a folder `candidates`."""
    folder = tmp_path / "project"
    (folder / "starters").mkdir(parents=True)
    (folder / "candidates" / "rmsnorm").mkdir(parents=True)
    (folder / "norms.py").write_text((HERE / "models" / "norms.py").read_text())
    (folder / "starters" / "rmsnorm.py").write_text(SLOW)
    fast = starter_path("rmsnorm", "cpp").read_text()
    candidates = {
        "1_zeros.py": HONEST + "\n\ndef kernel_fn(x, weight, eps=1e-6):\n    return torch.zeros_like(x)\n",
        "2_broken.py": "def kernel_fn(",
        "3_slower.py": SLOW.replace("i < 3000", "i < 24000"),
        "4_fast.py": fast,
    }
    for name, text in candidates.items():
        (folder / "candidates" / "rmsnorm" / name).write_text(text)
    (folder / "notes.txt").write_text("committed\n")
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "mine")
    (folder / "notes.txt").write_text("not committed\n")
    return folder
