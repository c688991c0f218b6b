"""progress.png, drawn by matplotlib, which is optional."""

import struct
from dataclasses import replace

import pytest
from sample_run import experiment, rmsnorm, softmax, started
from test_report import write_run

from autokernel.picture import draw_progress
from autokernel.records import Verdict
from autokernel.state import load_state

pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install 'autokernel[plot]')")


def drawn(tmp_path, histories):
    """Width and height of the picture."""
    path = tmp_path / "progress.png"
    assert draw_progress(load_state(write_run(tmp_path, histories=histories)), path) is None
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", head[16:24])


def test_every_op_has_a_plot_of_its_own(tmp_path):
    assert drawn(tmp_path, [rmsnorm(), softmax()]) == (960, 720)


def test_what_cannot_be_timed_or_has_no_roofline_is_drawn_as_well(tmp_path):
    crashed = experiment(1, verdict=Verdict.CRASH, us=None)
    tampered = experiment(2, verdict=Verdict.TAMPER, us=None)
    history = replace(started(), floor_us=None).add(crashed).add(tampered)
    assert drawn(tmp_path, [history]) == (960, 360)


def test_a_run_without_experiments_has_no_picture(tmp_path):
    path = tmp_path / "progress.png"
    assert draw_progress(load_state(write_run(tmp_path, histories=[])), path) == "there is no experiment yet"
    assert not path.exists()
