"""Knobs read from launches with literal numbers, and the text with them declared."""

import ast

import pytest

from autokernel.errors import ConfigError
from autokernel.kernelfile import parse_kernel
from autokernel.tuner.declaring import declare
from autokernel.tuner.space import Space

HEAD = '''"""Rows, in "ä" and \u2028 all."""
import triton
import triton.language as tl

KERNEL_TYPE = "softmax"
BACKEND = "triton"


@triton.jit
def rows(x, n, BLOCK: tl.constexpr, WHOLE: tl.constexpr, EXACT: tl.constexpr):
    pass


def kernel_fn(x, dim=-1):
'''


def declared(body):
    text = declare(HEAD + "".join(f"    {line}\n" for line in body))
    return text, parse_kernel(text)


def test_numbers_of_a_launch_become_knobs_and_nothing_else_changes():
    text, kernel = declared(
        ['print("é"); rows[(8,)](x, 3, BLOCK=1024, WHOLE=1, EXACT=True, num_warps=4, num_stages=3)']
    )
    assert kernel.config == {"BLOCK": 1024, "num_warps": 4, "num_stages": 3}
    assert kernel.tunables["BLOCK"] == [256, 512, 1024, 2048, 4096]
    assert kernel.tunables["num_warps"] == [1, 2, 4, 8, 16]
    assert kernel.tunables["num_stages"] == [1, 2, 3, 4, 5, 6]
    launch = (
        'BLOCK=CONFIG["BLOCK"], WHOLE=1, EXACT=True, num_warps=CONFIG["num_warps"], num_stages=CONFIG["num_stages"])'
    )
    assert f'print("é"); rows[(8,)](x, 3, {launch}\n' in text
    assert [line for line in text.splitlines() if not line.startswith(("TUNABLES", "CONFIG"))][:9] == HEAD.splitlines()[
        :9
    ]
    assert Space.read(text).size == 5 * 5 * 6


def test_a_name_that_is_set_once_reads_config_where_it_is_set():
    text, kernel = declared(
        ["block = 512", "grid = (triton.cdiv(9, block),)", "rows[grid](x, 3, BLOCK=block, WHOLE=0)"]
    )
    assert kernel.config == {"BLOCK": 512}
    assert '    block = CONFIG["BLOCK"]\n' in text
    assert "BLOCK=block" in text


def test_a_number_that_the_grid_repeats_is_left_alone():
    _, kernel = declared(["rows[(triton.cdiv(9, 512),)](x, 3, BLOCK=512, num_warps=8)"])
    assert kernel.config == {"num_warps": 8}


def test_launches_share_a_knob_only_when_they_agree():
    text, kernel = declared([f"rows[(8,)](x, 3, BLOCK={number}, num_warps=2)" for number in (64, 64, 32)])
    assert kernel.config == {"BLOCK": 64, "num_warps": 2}
    assert text.count('BLOCK=CONFIG["BLOCK"]') == 2
    assert "BLOCK=32" in text


def test_a_name_that_is_set_twice_is_no_knob():
    with pytest.raises(ConfigError):
        declared(["block = 512", "block = 256", "rows[(8,)](x, 3, BLOCK=block)"])


def test_what_is_declared_already_stays_as_it_is():
    text, _ = declared(["rows[(8,)](x, 3, BLOCK=1024)"])
    assert declare(text) == text


@pytest.mark.parametrize(
    "body", [["return x"], ["rows[(8,)](x, 3, BLOCK=n)"], ["rows(x, 3, BLOCK=64)"], ["other[(8,)](x, BLOCK=64)"]]
)
def test_without_a_number_to_change_it_says_what_to_write(body):
    with pytest.raises(ConfigError) as caught:
        declared(body)
    assert "TUNABLES = " in caught.value.hint


def test_the_declared_text_is_python_and_sets_the_same_numbers():
    text, kernel = declared(["block = 128", "rows[(8,)](x, 3, BLOCK=block, WHOLE=32, num_stages=2)"])
    assert ast.parse(text)
    assert kernel.config == {"BLOCK": 128, "WHOLE": 32, "num_stages": 2}
    assert kernel.tunables["WHOLE"] == [16, 32, 64, 128]
