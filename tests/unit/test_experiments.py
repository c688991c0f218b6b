"""The experiments of an op take little memory, and are a sequence like any other."""

import gc
import json
import tracemalloc
from dataclasses import replace

import pytest
from sample_run import SETTINGS, experiment, started

from autokernel.experiments import BLOCK, Experiments
from autokernel.journal import Event, write_whole
from autokernel.kerneltext import ShelvedText, text_digest
from autokernel.numbers import Numbers
from autokernel.records import Decision, Proposal
from autokernel.rundir import RunDir
from autokernel.state import Pending, judged_json, proposed_json, replay, started_json

LENGTHS = (0, 1, 2 * BLOCK - 1, 2 * BLOCK, 3 * BLOCK + 7)
NUMBERS = (0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 1, 9 * BLOCK)
BYTES_EACH = 300
"""What an old experiment may take: a run may grow by 1,000 bytes with each, and keeps more than its record."""

FOUND = Numbers(config={"UNROLL": 8}, own_us=2.0, best_us=1.0, evaluations=9, seconds=1.0, words="")


def grown(count):
    """So many experiments, and the same as a tuple."""
    plain = tuple(experiment(number) for number in range(1, count + 1))
    experiments = Experiments()
    for each in plain:
        experiments = experiments.with_one(each)
    return experiments, plain


@pytest.mark.parametrize("count", LENGTHS)
def test_experiments_are_a_sequence(count):
    experiments, plain = grown(count)
    assert len(experiments) == count
    assert bool(experiments) is bool(plain)
    assert tuple(experiments) == plain
    assert tuple(reversed(experiments)) == plain[::-1]
    assert experiments == plain
    assert experiments == grown(count)[0]
    assert experiments != (*plain, experiment(count + 1))
    for index in (n for n in NUMBERS if n < count):
        assert experiments[index] == plain[index]
        assert experiments[-1 - index] == plain[-1 - index]
    for outside in (count, -1 - count):
        with pytest.raises(IndexError):
            experiments[outside]


@pytest.mark.parametrize("count", LENGTHS)
def test_slices_are_those_of_a_tuple(count):
    experiments, plain = grown(count)
    ends = (None, *NUMBERS, *(-n for n in NUMBERS))
    slices = [slice(start, stop) for start in ends for stop in ends]
    slices += [slice(None, None, -1), slice(None, 3, -7), slice(1, None, BLOCK)]
    assert [experiments[each] for each in slices] == [plain[each] for each in slices]


def test_adding_leaves_the_earlier_sequence_as_it_was():
    full, plain = grown(2 * BLOCK - 1)
    assert len(full.with_one(experiment(2 * BLOCK))) == 2 * BLOCK
    assert full == plain


def test_history_counts_what_was_kept_and_what_was_reverted_since():
    history = started()
    for number in range(1, 3 * BLOCK):
        decision = Decision.KEEP if number in (3, 2 * BLOCK) else Decision.REVERT
        history = history.add(experiment(number, decision=decision))
    assert (history.kept, history.reverts_in_a_row) == (2, BLOCK - 1)


def test_text_with_numbers_from_a_search_is_there_in_an_old_experiment(tmp_path):
    text = "CONFIG = {'UNROLL': 2}\n"
    path = tmp_path / "kernel.py"
    path.write_text(text)
    file = ShelvedText(path=str(path), digest=text_digest(text))
    proposal = Proposal(hypothesis="", kernel_py=file)
    pending = Pending(number=1, op="rmsnorm", proposal=proposal, file=file, agent_s=0.1)
    tuned = pending.tuned(FOUND)
    experiments = Experiments().with_one(replace(experiment(1), proposal=tuned.proposal))
    for number in range(2, 3 * BLOCK):
        experiments = experiments.with_one(experiment(number))
    assert experiments.packed
    assert experiments[0].proposal.kernel_py == text.replace("2", "8")


def events(run, count):
    """The events of a run with so many experiments, each as it is read from its own line."""
    history = started()
    begun = {"op": "rmsnorm", "digest": text_digest(history.incumbent), "history": started_json(history)}
    yield "run-started", {"settings": SETTINGS.to_json(), "version": "0"}
    yield "op-started", begun
    for number in range(1, count + 1):
        reason = f"not valid Python: '(' was never closed (<unknown>, line {number})"
        sample = experiment(number, reason=reason, idea=f"idea {number}")
        file = ShelvedText(path=str(run.kernel_path("rmsnorm", number)), digest=text_digest(str(number)))
        proposal = Proposal(hypothesis=sample.proposal.hypothesis, kernel_py=str(number))
        pending = Pending(number=number, op="rmsnorm", proposal=proposal, file=file, agent_s=number / 7)
        yield "proposed", proposed_json(pending)
        yield "judged", judged_json(pending.decided(sample.outcome, sample.decision, sample.reason, number / 3))
        yield "recorded", {"number": number, "op": "rmsnorm", "commit": f"{number:040x}", "tip": "0" * 40}


def kept_bytes(run, count):
    """Bytes that the state of a run with so many experiments takes."""
    read = (json.loads(json.dumps(each)) for each in events(run, count))
    lines = (Event(kind=kind, fields=fields, seq=seq) for seq, (kind, fields) in enumerate(read, start=1))
    tracemalloc.start()
    try:
        state = replay(lines, run)
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(state.histories["rmsnorm"].experiments) == count
    return kept


def test_an_old_experiment_takes_few_bytes(tmp_path):
    run = RunDir(path=tmp_path, name="run")
    write_whole(run.kernel_path("rmsnorm", 0), started().incumbent)
    few, many = 2 * BLOCK, 7 * BLOCK
    kept_bytes(run, few)  # what is made once, on the first use
    # Other tests' threads may allocate in one of them, and not in all.
    each = min((kept_bytes(run, many) - kept_bytes(run, few)) / (many - few) for _ in range(3))
    assert 0 < each < BYTES_EACH


def test_the_starter_is_what_the_first_kept_kernel_was_measured_against():
    history = started(starter_us=1000.0).add(experiment(1, us=1300.0, incumbent_us=2000.0))  # a disturbed measurement
    assert history.starter_us == 2000.0
    history = replace(history, incumbent_us=1010.0)  # measured again, and nothing kept
    assert history.starter_us == 1010.0
    history = history.add(experiment(2, decision=Decision.KEEP, us=800.0, incumbent_us=1005.0))
    assert (history.starter_us, history.incumbent_us) == (1005.0, 800.0)
    assert history.add(experiment(3, us=900.0, incumbent_us=790.0)).starter_us == 1005.0
