"""Which modules may import torch, asked of a fresh interpreter; the static side is import-linter's (pyproject.toml)."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
TORCH_FREE = next(
    c for c in CONTRACTS if "torch" in c["forbidden_modules"] and "autokernel.report" in c["source_modules"]
)
HEAVY = ("torch", "triton", "transformers", "git", "openai", "anthropic")


def loaded_by(modules):
    """Which of the heavy packages are loaded once `modules` are imported."""
    lines = [f"import {module}" for module in modules]
    code = "\n".join(
        ["import sys", f"sys.path.insert(0, {str(ROOT)!r})", *lines, f"print([m for m in {HEAVY} if m in sys.modules])"]
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_records_rules_logs_and_report_load_no_torch():
    modules = TORCH_FREE["source_modules"]
    assert {"autokernel.errors", "autokernel.rules", "autokernel.report", "autokernel.state"} <= set(modules)
    assert loaded_by(modules) == "[]"


def test_every_module_of_the_contract_exists():
    for module in TORCH_FREE["source_modules"]:
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module


AGENT_MODULES = [f"autokernel.agents.{path.stem}" for path in sorted((ROOT / "autokernel/agents").glob("[a-z]*.py"))]


@pytest.mark.parametrize(
    "module", ["autokernel", "autokernel.cli", "autokernel.agents", "autokernel.handout", *AGENT_MODULES]
)
def test_command_line_and_agents_load_nothing_heavy(module):
    assert loaded_by([module]) == "[]"


def test_the_judge_does_not_load_agents_or_commands():
    code = "\n".join(
        [
            "import sys",
            f"sys.path.insert(0, {str(ROOT)!r})",
            "for name in ('agents', 'cli', 'commands'): sys.modules[f'autokernel.{name}'] = None",
            "import autokernel.judge.wire, autokernel.judge.forkserver",
            "print('alone')",
        ]
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "alone", done.stderr
