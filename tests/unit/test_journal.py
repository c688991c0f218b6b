"""The journal: what it promises after a crash, on a full disk, and when somebody has edited it."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from autokernel.errors import LogError
from autokernel.journal import Journal


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.jsonl"


@contextmanager
def file_size_limit(size):
    """Let no file grow beyond `size` bytes: the kernel writes what still fits, then refuses, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_events_come_back_in_order_with_their_fields(path):
    with Journal(path) as journal:
        journal.append("proposed", number=1, text='tab\t "quote" \n line é', nested={"a": [1, None, 2.5]})
        journal.append("judged", number=1)
    first, second = Journal(path).events()
    assert (first.seq, first.kind) == (1, "proposed")
    assert first.fields == {"number": 1, "text": 'tab\t "quote" \n line é', "nested": {"a": [1, None, 2.5]}}
    assert (second.seq, second.kind, second.fields) == (2, "judged", {"number": 1})
    assert first.time_utc.endswith("+00:00")


def test_every_event_is_one_json_line(path):
    with Journal(path) as journal:
        journal.append("note", text="a\nb")
        journal.append("note", text="c")
    lines = path.read_text().splitlines()
    assert [list(json.loads(line))[:3] for line in lines] == [["seq", "time_utc", "kind"]] * 2


def test_missing_file_has_no_events_and_is_not_created_by_reading(path):
    assert Journal(path).events() == []
    assert not path.exists()


def test_reopened_journal_goes_on_with_the_next_number(path):
    for kind in ("one", "two", "three"):
        with Journal(path) as journal:
            journal.append(kind)
    assert [(event.seq, event.kind) for event in Journal(path).events()] == [(1, "one"), (2, "two"), (3, "three")]


@pytest.mark.parametrize(
    "damage",
    [
        "not json",
        "",
        "[]",
        '{"seq": 2, "time_utc": "x"}',
        '{"seq": 7, "time_utc": "x", "kind": "jumped"}',
        '{"seq": true, "time_utc": "x", "kind": "bool"}',
        '{"seq": 1, "time_utc": "x", "kind": "doubled"}',
        "[" * 100_000,
    ],
)
def test_damaged_line_stops_reading_and_writing_and_changes_nothing(path, damage):
    with Journal(path) as journal:
        journal.append("good")
    path.write_text(path.read_text() + damage + "\n" + '{"seq": 3, "time_utc": "x", "kind": "after"}\n')
    before = path.read_bytes()
    with pytest.raises(LogError, match="line 2"):
        Journal(path).events()
    with pytest.raises(LogError, match="line 2"):
        Journal(path).append("more")
    assert path.read_bytes() == before


def test_binary_damage_is_reported_with_its_line(path):
    path.write_bytes(b'{"seq": 1, "time_utc": "x", "kind": "\xff\xfe"}\n')
    with pytest.raises(LogError, match="line 1"):
        Journal(path).events()


def test_unfinished_last_line_is_ignored_by_readers_and_set_aside_once_by_the_writer(path, caplog):
    with Journal(path) as journal:
        journal.append("good")
    whole = path.read_bytes()
    torn = b'{"seq":2,"time_utc":"x","kind":"ju'
    path.write_bytes(whole + torn)
    assert [event.kind for event in Journal(path).events()] == ["good"]
    assert path.read_bytes() == whole + torn
    with caplog.at_level(logging.WARNING), Journal(path) as journal:
        journal.append("again")
        journal.append("more")
    assert [event.kind for event in Journal(path).events()] == ["good", "again", "more"]
    assert path.with_suffix(".torn").read_bytes() == torn + b"\n"
    assert len(caplog.records) == 1
    assert "journal.torn" in caplog.text


def test_complete_json_without_newline_did_not_happen(path):
    path.write_text('{"seq": 1, "time_utc": "x", "kind": "unsure"}')
    with Journal(path) as journal:
        journal.append("sure")
    assert [event.kind for event in Journal(path).events()] == ["sure"]


def test_full_disk_raises_with_a_hint_and_leaves_whole_lines_only(path):
    journal = Journal(path)
    journal.append("good", text="x" * 100)
    before = path.read_bytes()
    with file_size_limit(len(before) + 40), pytest.raises(LogError) as caught:
        journal.append("too much", text="y" * 1000)
    assert "space" in caught.value.hint
    assert path.read_bytes() == before
    journal.append("room again")
    assert [event.kind for event in Journal(path).events()] == ["good", "room again"]


def test_write_by_something_else_is_noticed(path):
    ours = Journal(path)
    ours.append("ours")
    with Journal(path) as theirs:
        theirs.append("theirs")
    with pytest.raises(LogError, match="something else"):
        ours.append("ours again")
    assert [event.kind for event in Journal(path).events()] == ["ours", "theirs"]


def test_unwritable_place_is_a_log_error_with_a_hint(tmp_path):
    with pytest.raises(LogError) as caught:
        Journal(tmp_path / "missing" / "journal.jsonl").append("x")
    assert caught.value.hint
    (tmp_path / "folder").mkdir()
    with pytest.raises(LogError):
        Journal(tmp_path / "folder").events()


def test_reserved_names_and_unserializable_fields_are_refused_and_nothing_is_written(path):
    journal = Journal(path)
    with pytest.raises(TypeError, match="seq"):
        journal.append("x", seq=3)
    with pytest.raises(TypeError):
        journal.append("x", value=object())
    assert Journal(path).events() == []


def test_ten_thousand_events_are_read_within_a_second(path):
    line = (
        '{"seq":%d,"time_utc":"2026-11-29T17:00:00.000+00:00","kind":"judged","number":1,"reason":"'
        + "r" * 200
        + '"}\n'
    )
    path.write_text("".join(line % number for number in range(1, 10_001)))
    start = time.process_time()
    events = Journal(path).events()
    assert time.process_time() - start < 1
    assert events[-1].seq == 10_000


WRITER = """
import sys
from pathlib import Path
from autokernel.journal import Journal
journal = Journal(Path(sys.argv[1]))
number = 0
while True:
    number += 1
    journal.append("event", number=number, filler="z" * 2000)
    print(number, flush=True)
"""


def test_killed_writer_loses_no_event_that_it_had_acknowledged(path):
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    for _ in range(20):
        writer.stdout.readline()
    os.kill(writer.pid, signal.SIGKILL)
    rest = writer.communicate()[0].split("\n")
    acknowledged = 20 + len([line for line in rest[:-1] if line])
    with Journal(path) as journal:
        journal.append("resumed")
    events = Journal(path).events()
    assert [event.fields.get("number") for event in events[:-1]] == list(range(1, len(events)))
    assert len(events) - 1 >= acknowledged
    assert events[-1].kind == "resumed"
