"""Replies of every form, read without a network."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autokernel.agents.reply import Fault, Idea, Rejected, read_reply
from autokernel.agents.talk import Reply
from tests.agents.conftest import BETTER, KERNEL, a_history

FENCED = BETTER.replace('"""Starter."""', '"""Use it so:\n\n```python\nkernel_fn(x)\n```\n\nor\n\n```\nx\n```\n"""')
EDIT = '<<<<<<< SEARCH\nCONFIG = {"UNROLL": 1}\n=======\nCONFIG = {"UNROLL": 2}\n>>>>>>> REPLACE\n'


def read(text):
    return read_reply(Reply(text=text), a_history())


@pytest.mark.parametrize(
    "text",
    [
        f"```python\n{BETTER}```",
        f"~~~\n{BETTER}~~~",
        f"````py\n{BETTER}````\nDone.",
        f"```python\n{BETTER}```".replace("\n", "\r\n"),
        f"```\nnvcc -O3\n```\nand\n```python\n{BETTER}```\nthen\n```sh\nmake\n```",
        f"The old one:\n```python\n{KERNEL}```\nThe new one:\n```python\n{BETTER}```",
        f"The new one:\n```python\n{BETTER}```\ninstead of\n```python\n{KERNEL}```",
        f"```python\n{BETTER}",  # never closed, but whole
        BETTER,  # no fence at all
        "1. So:\n" + "\n".join(f"   {line}" for line in f"```python\n{BETTER}```".split("\n")),
        f"Change it:\n\n{EDIT}",
        f"```\n{EDIT}```",
    ],
)
def test_code_is_found(text):
    found = read(text)
    assert isinstance(found, Idea), found
    assert found.kernel_py == BETTER


def test_fences_inside_a_docstring_do_not_end_the_block():
    found = read(f"Hypothesis: x\n```python\n{FENCED}```\nand a note\n```\nx\n```\n")
    assert isinstance(found, Idea), found
    assert found.kernel_py == FENCED


@pytest.mark.parametrize(
    ("text", "fault", "word"),
    [
        ("", Fault.EMPTY, "empty"),
        ("I think that unrolling helps.", Fault.PROSE, "no code"),
        ("```python\nprint(1)\n```", Fault.CONTRACT, "kernel_fn"),
        ("```python\ndef kernel_fn(x:\n    pass\n```", Fault.SYNTAX, "line 1"),
        (f"```python\n{KERNEL}# the same\n```", Fault.UNCHANGED, "current"),
        (f"```python\n{BETTER.replace('rmsnorm', 'softmax')}```", Fault.CONTRACT, "softmax"),
        (f"```python\n{BETTER.replace(': 2}', ': 3}')}```", Fault.CONTRACT, "TUNABLES"),
        (EDIT.replace("CONFIG = {", "CONFIG == {", 1), Fault.EDIT, "0 times"),
        ("<<<<<<< SEARCH\nCONFIG = {", Fault.EDIT, "incomplete"),
        ("```python\ndef kernel_fn(): pass\0\n```", Fault.SYNTAX, "valid"),
        ("```python\nkernel_fn = " + "(" * 5000 + "\ndef kernel_fn\n```", Fault.SYNTAX, "valid"),
    ],
)
def test_anything_else_is_a_fault_with_a_reason(text, fault, word):
    found = read(text)
    assert isinstance(found, Rejected)
    assert found.fault is fault
    assert word in found.reason


@pytest.mark.parametrize(("search", "why"), [("UNROLL", "2 times"), ("", "is empty"), ("absent", "0 times")])
def test_an_edit_applies_exactly_once(search, why):
    raw = json.dumps({"hypothesis": "x", "edits": [{"search": search, "replace": "y"}]})
    found = read_reply(Reply(text="", tool_input=raw), a_history())
    assert isinstance(found, Rejected)
    assert (found.fault, why in found.reason) == (Fault.EDIT, True)


@pytest.mark.parametrize(
    "raw",
    ["", "[]", "nonsense", '{"edits": [1]}', '{"edits": {}}', '{"kernel_py": 5}', '{"hypothesis": null}', "{" * 9000],
)
def test_odd_tool_inputs(raw):
    found = read_reply(Reply(text="", tool_input=raw), a_history())
    assert isinstance(found, Rejected)
    assert found.fault is Fault.TOOL


@pytest.mark.parametrize(
    ("text", "hypothesis"),
    [
        ("**Hypothesis:** two rows per block\n", "two rows per block"),
        ("## Hypothesis: less traffic\n", "less traffic"),
        ("Two rows per block hide latency.\nMore words.\n", "Two rows per block hide latency."),
        ("", "no hypothesis given"),
        ("Hypothesis: " + "long " * 100 + "\n", "long " * 47 + "long…"),
    ],
)
def test_hypothesis_is_one_line(text, hypothesis):
    assert read(f"{text}```python\n{BETTER}```").hypothesis == hypothesis


PIECES = [
    "```",
    "~~~",
    "```python",
    "\n",
    "\r\n",
    " ",
    BETTER,
    KERNEL,
    "def kernel_fn(",
    '"""',
    "<<<<<<< SEARCH",
    "=" * 7,
    "\0",
    "x",
]


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join) | st.text(max_size=200))
def test_no_text_raises(text):
    found = read(text)
    assert isinstance(found, (Idea, Rejected))
    if isinstance(found, Idea):
        compile(found.kernel_py, "kernel.py", "exec")
