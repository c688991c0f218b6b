"""results.tsv: columns, escapes, foreign and torn files, writers at the same time."""

from __future__ import annotations

import csv
import logging
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autokernel.errors import LogError
from autokernel.results import COLUMNS, ResultRow, append_row, experiments_of, read_rows

THE_ORIGINAL_TEN = (
    "experiment tag kernel_type throughput_tflops latency_us pct_peak speedup_vs_pytorch correctness peak_vram_mb "
    "description"
)

FULL = ResultRow(
    experiment=3,
    tag="rmsnorm-0003",
    kernel_type="rmsnorm",
    throughput_tflops=0.0123,
    latency_us=63.25,
    pct_peak=71.5,
    speedup_vs_pytorch=2.5,
    correctness="PASS",
    peak_vram_mb=12.5,
    description="vectorized loads",
    run="20261129-1726-llama",
    op="rmsnorm",
    case="1x512x512 fp32",
    dtype="fp32",
    backend="cpp",
    agent="search",
    device="cpu",
    decision="KEEP",
    speedup_vs_incumbent=1.13,
    speedup_low=1.11,
    speedup_high=1.15,
    baseline="compile",
    baseline_us=158.0,
    commit="a" * 40,
    tokens=1200,
    cost_usd=0.0125,
    seconds=4.5,
    seed=123456789012345,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.tsv"


def test_columns_begin_with_the_original_ten_and_stay_in_order():
    assert " ".join(COLUMNS[:10]) == THE_ORIGINAL_TEN
    assert COLUMNS[10:14] == ("run", "op", "case", "dtype")
    assert COLUMNS[-1] == "seed"
    assert len(COLUMNS) == 28


def test_rows_come_back_and_unknown_values_are_empty_cells(path):
    append_row(path, FULL)
    append_row(path, ResultRow(experiment=4, run="r"))
    assert read_rows(path) == [FULL, ResultRow(experiment=4, run="r")]
    header, _, sparse = path.read_text().splitlines()
    assert header == "\t".join(COLUMNS)
    assert [cell for cell in sparse.split("\t") if cell] == ["4", "r"]


def test_floats_have_six_significant_digits_and_impossible_ones_are_unknown(path):
    append_row(path, ResultRow(experiment=1, latency_us=63.123456789, pct_peak=float("nan"), seconds=float("inf")))
    (row,) = read_rows(path)
    assert (row.latency_us, row.pct_peak, row.seconds) == (63.1235, None, None)


AWKWARD = [
    "tab\there",
    "line\nbreak\r",
    "back\\slash \\t",
    '"quoted" start',
    'mid "quote"',
    "nul\0",
    "é 漢 \u2028",
    "\\",
]


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_text_stays_on_its_line_for_us_and_for_csv_readers(path, text):
    append_row(path, ResultRow(experiment=1, description=text, run="r"))
    append_row(path, ResultRow(experiment=2, run="r"))
    assert [row.description for row in read_rows(path)] == [text, ""]
    with path.open(newline="", encoding="utf-8") as file:
        table = list(csv.reader(file, delimiter="\t"))
    assert [len(line) for line in table] == [len(COLUMNS)] * 3
    assert [line[0] for line in table] == ["experiment", "1", "2"]


@settings(max_examples=25, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_round_trips(text):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.tsv"
        append_row(path, ResultRow(experiment=1, description=text, agent=text))
        (row,) = read_rows(path)
    assert (row.description, row.agent) == (text, text)


def test_pandas_reads_it_without_options_and_with_the_right_types(path):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed (pip install pandas)")
    failed = ResultRow(experiment=4, op="rmsnorm", correctness="CRASH", decision="REVERT", description='"a"\t#\n\\')
    for row in (FULL, failed):
        append_row(path, row)
    rows = pandas.read_csv(path, sep="\t")
    assert list(rows.columns) == list(COLUMNS)
    assert rows.shape == (2, len(COLUMNS))
    kinds = {name: rows[name].dtype.kind for name in COLUMNS}
    assert {name for name, kind in kinds.items() if kind == "i"} == {"experiment"}
    assert {name for name, kind in kinds.items() if kind == "f"} == {
        *("throughput_tflops", "latency_us", "pct_peak", "speedup_vs_pytorch", "peak_vram_mb", "speedup_vs_incumbent"),
        *("speedup_low", "speedup_high", "baseline_us", "tokens", "cost_usd", "seconds", "seed"),
    }
    assert rows[rows.decision == "KEEP"].groupby("op").speedup_vs_pytorch.max().to_dict() == {"rmsnorm": 2.5}
    assert rows.latency_us.isna().tolist() == [False, True]


def test_lone_surrogate_from_a_model_reply_does_not_stop_the_run(path):
    append_row(path, ResultRow(experiment=1, description="bad \ud800 end"))
    assert read_rows(path)[0].description.startswith("bad ")


def test_experiments_of_a_run_are_told_from_others(path):
    assert experiments_of(path, "r") == set()
    append_row(path, ResultRow(experiment=1, run="r"))
    assert experiments_of(path, "r") == {1}
    assert experiments_of(path, "other") == set()


@pytest.mark.parametrize(
    ("header", "named"),
    [
        ("experiment\ttag\tspeed", "column 3 of its header is 'speed', expected 'kernel_type'"),
        ("experiment\ttag", "column 3 of its header is missing"),
        ("\t".join([*COLUMNS, "mine"]), "column 29 of its header is 'mine', expected nothing more"),
        ("\t".join(COLUMNS) + "\r", "seed"),
        ("my notes", "column 1"),
    ],
)
def test_foreign_header_is_named_and_the_file_left_alone(path, header, named):
    path.write_bytes(f"{header}\n1\tx\n".encode())
    before = path.read_bytes()
    for action in (lambda: append_row(path, FULL), lambda: read_rows(path), lambda: experiments_of(path, "r")):
        with pytest.raises(LogError) as caught:
            action()
        assert named in str(caught.value)
        assert str(path) in str(caught.value)
        assert caught.value.hint
    assert path.read_bytes() == before


def test_foreign_file_without_newline_is_left_alone(path):
    path.write_text("expenses of November")
    with pytest.raises(LogError, match="column 1"):
        append_row(path, FULL)
    assert path.read_text() == "expenses of November"


def test_empty_file_gets_its_header(path):
    path.touch()
    assert read_rows(path) == []
    append_row(path, FULL)
    assert read_rows(path) == [FULL]


def test_newline_that_an_editor_left_off_is_added(path):
    append_row(path, FULL)
    path.write_text(path.read_text().rstrip("\n"))
    assert 3 in experiments_of(path, FULL.run)
    append_row(path, ResultRow(experiment=4))
    assert [row.experiment for row in read_rows(path)] == [3, 4]
    path.write_text("\t".join(COLUMNS))
    append_row(path, ResultRow(experiment=5))
    assert [row.experiment for row in read_rows(path)] == [5]


def test_torn_last_row_is_no_row_and_is_set_aside(path, caplog):
    append_row(path, FULL)
    torn = "4\trmsnorm-0004\trms"
    path.write_text(path.read_text() + torn)
    assert [row.experiment for row in read_rows(path)] == [3]
    with caplog.at_level(logging.WARNING):
        append_row(path, ResultRow(experiment=4))
    assert [row.experiment for row in read_rows(path)] == [3, 4]
    assert path.with_name("results.tsv.torn").read_text() == torn + "\n"
    assert "results.tsv.torn" in caplog.text


def test_torn_first_write_is_begun_again(path):
    path.write_text("experiment\ttag\tker")
    assert read_rows(path) == []
    append_row(path, FULL)
    assert read_rows(path) == [FULL]


@pytest.mark.parametrize("line", ["1\t2\t3", "x" + "\t" * 27, "1\t\t\tfast" + "\t" * 24])
def test_damaged_row_is_reported_with_its_line(path, line):
    append_row(path, FULL)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(LogError, match="line 3"):
        read_rows(path)


def test_full_disk_leaves_the_file_as_it_was(path):
    append_row(path, FULL)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
    try:
        with pytest.raises(LogError, match=r"results\.tsv"):
            append_row(path, FULL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before


READ_ONLY = """
import os, sys
from pathlib import Path
from autokernel.errors import LogError
from autokernel.results import ResultRow, append_row
if os.geteuid() == 0:
    os.setuid(65534)  # permissions do not bind root
try:
    append_row(Path(sys.argv[1]), ResultRow(experiment=1))
except LogError as error:
    print(error, "|", error.hint)
"""


@pytest.mark.parametrize("existing", [True, False])
def test_read_only_file_or_directory_is_a_clear_error(existing):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.tsv"
        if existing:
            append_row(path, FULL)
            path.chmod(0o444)
        Path(folder).chmod(0o555)
        program = [sys.executable, "-c", READ_ONLY, str(path)]
        said = subprocess.run(program, capture_output=True, text=True, check=True).stdout
        Path(folder).chmod(0o755)
    assert "results.tsv cannot be written" in said
    assert "permissions" in said


APPENDER = """
import sys
from pathlib import Path
from autokernel.results import ResultRow, append_row
for number in range(25):
    append_row(Path(sys.argv[1]), ResultRow(experiment=number, run=sys.argv[2], description="d" * 500))
"""


def test_rows_of_processes_that_write_at_once_are_all_there_and_whole(path):
    names = ["a", "b", "c"]
    writers = [subprocess.Popen([sys.executable, "-c", APPENDER, str(path), name]) for name in names]
    assert [writer.wait(30) for writer in writers] == [0, 0, 0]
    rows = read_rows(path)
    for name in names:
        assert [row.experiment for row in rows if row.run == name] == list(range(25))
    assert len(rows) == 75


def test_row_is_not_lost_in_a_file_that_an_editor_replaced(path):
    append_row(path, FULL)
    copy = path.with_name("saved")
    copy.write_bytes(path.read_bytes())
    os.replace(copy, path)  # noqa: PTH105 - the very call that editors make
    append_row(path, ResultRow(experiment=4))
    assert [row.experiment for row in read_rows(path)] == [3, 4]
