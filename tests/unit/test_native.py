"""Native libraries: processes that want the same one at once share a build, and a build can be all that is wanted."""

import shutil
import subprocess
import sys
import textwrap

import pytest

from autokernel.native import build, built_only

SOURCE = 'extern "C" int answer() { return 0; }'
BUILDS = """
    from autokernel.native import build
    build({source!r}).answer()
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A compiler that takes its time, and writes down that it was called."""
    real = shutil.which("g++") or shutil.which("clang++")
    script = tmp_path / "compiler"
    script.write_text(
        f'#!/bin/sh\ncase "$1" in --version) ;; *) echo >> {tmp_path}/calls; sleep 0.5 ;; esac\nexec {real} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("AUTOKERNEL_BUILD_DIR", str(tmp_path / "built"))
    return tmp_path / "calls"


def test_processes_that_want_one_library_build_it_once(compiler):
    program = textwrap.dedent(BUILDS).format(source=SOURCE)
    running = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(3)]
    assert [process.wait(timeout=60) for process in running] == [0, 0, 0]
    assert compiler.read_text().count("\n") == 1


def test_what_is_only_built_is_there_for_the_next_process_and_does_nothing(compiler):
    source = 'extern "C" int answer() { return 7; }'
    with built_only():
        library = build(source)
        library.answer()
    assert library.path.exists()
    with pytest.raises(RuntimeError, match="answer returned 7"):
        build(source).answer()
    assert compiler.read_text().count("\n") == 1
