"""One candidate on trial: makes secret inputs, computes the truth here, asks the child, and compares."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from autokernel.errors import OracleError
from autokernel.judge.compare import Truth, mismatch, native_error
from autokernel.judge.devicememory import release_unused
from autokernel.judge.rejected import Rejected
from autokernel.judge.worker import Worker
from autokernel.records import Case, TensorMeta, Verdict
from autokernel.spec import Adversary, Inputs, KernelSpec, describe, upcast

FP64_LIMIT_ELEMENTS = 1 << 28
"""CPU inputs with more elements than this (2 GiB in fp64) get an fp32 truth; on a GPU, those that do not fit."""

PLANLESS_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""cuDNN's, the first choice on newer GPUs, makes a plan for each new shape: a tenth of a second, for the same error."""

ALLOCATION_AND_VIEWS = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "zeros",
        "zeros_like",
        "new_zeros",
        "zero_",
        "fill_",
        "full",
        "full_like",
        "new_full",
        "ones",
        "ones_like",
        "new_ones",
        "clone",
        "copy_",
        "contiguous",
        "view",
        "_unsafe_view",
        "reshape",
        "_reshape_alias",
        "as_strided",
        "expand",
        "permute",
        "transpose",
        "t",
        "squeeze",
        "unsqueeze",
        "select",
        "slice",
        "narrow",
        "split",
        "split_with_sizes",
        "chunk",
        "unbind",
        "unflatten",
        "flatten",
        "alias",
        "detach",
        "view_as",
        "is_contiguous",
    }
)
"""ATen operators that any kernel may call: they allocate, copy or view, and compute nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a stage needs: the op's spec, the child, the dtypes of the backend and the calls of the user's model."""

    spec: KernelSpec
    worker: Worker
    dtypes: tuple[str, ...]
    user_cases: tuple[Case, ...] = ()
    await_case: Callable[[Case], None] | None = None
    """Returns when the kernel is compiled for a case, or will not be before its call."""

    def in_dtypes(self, cases: Sequence[Case]) -> list[Case]:
        """Every case in every dtype of the trial."""
        return [case.with_dtype(dtype) for case in cases for dtype in self.dtypes]

    def check(self, case: Case, adversary: Adversary | None = None, label: str = "") -> None:
        """One call on fresh inputs. Raises: Rejected with the case in the reason."""
        inputs = self.inputs(case, adversary)
        self.check_outputs(case, [inputs], label)

    def inputs(self, case: Case, adversary: Adversary | None = None) -> Inputs:
        """Arguments for `case` from a seed that exists only here."""
        seed = secrets.randbits(62)
        inputs = self.spec.make_inputs(case, seed, self.worker.device)
        return adversary(inputs, torch.Generator().manual_seed(seed + 1)) if adversary else inputs

    def check_outputs(
        self, case: Case, calls: Sequence[Inputs], label: str = "", *, guarded: bool = True
    ) -> list[Tensor]:
        """Call the kernel on each of `calls` with all outputs alive; every one must be right. Raises: Rejected."""
        known = {id(inputs): truth_of(self.spec, inputs) for inputs in {id(call): call for call in calls}.values()}
        truths = [known[id(inputs)] for inputs in calls]
        where = f"{label or case.name} ({case.label})"
        if self.await_case:
            self.await_case(case)
        try:
            outputs, operators = self.worker.run(calls, [meta for _, meta in truths], guarded=guarded)
        except Rejected as rejected:
            raise Rejected(rejected.verdict, f"{where}: {rejected.reason}") from None
        if delegated := operators - ALLOCATION_AND_VIEWS - self.spec.allowed_aten:
            raise Rejected(Verdict.DELEGATES, f"{where}: the work is done by {', '.join(sorted(delegated))}")
        right: dict[int, Tensor] = {}
        for inputs, output, (truth, _) in zip(calls, outputs, truths, strict=True):
            if id(inputs) in right and same_bits(output, right[id(inputs)]):
                continue  # large outputs take longer to compare than to compute
            if reason := mismatch(output, truth, case.dtype, self.spec.tolerances[case.dtype]):
                raise Rejected(Verdict.FAIL, f"{where}: {reason}")
            right[id(inputs)] = output
        return outputs


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two contiguous tensors hold the same bytes; equal NaNs are equal here, and -0 is not 0."""
    return torch.equal(first.view(-1).view(torch.uint8), second.view(-1).view(torch.uint8))


def output_elements(spec: KernelSpec, case: Case, inputs: Inputs) -> int:
    """How many numbers the op returns for `case`; found out once, by the oracle on `inputs`."""
    if case.key not in _output_elements:
        with torch.no_grad():
            _output_elements[case.key] = spec.oracle(**inputs).numel()
    return _output_elements[case.key]


_output_elements: dict[str, int] = {}


def _wide_oracle(spec: KernelSpec, inputs: Inputs) -> Tensor:
    """The oracle's output in fp64, or in fp32 where memory does not allow that."""
    tensors = [value for value in inputs.values() if isinstance(value, Tensor)]
    if sum(value.numel() for value in tensors) <= FP64_LIMIT_ELEMENTS or any(value.is_cuda for value in tensors):
        with contextlib.suppress(torch.OutOfMemoryError):
            return spec.oracle(**upcast(inputs, torch.float64))
    return spec.oracle(**upcast(inputs, torch.float32))


def _own_result(spec: KernelSpec, inputs: Inputs) -> Tensor:
    """The op's yardstick, or PyTorch's own op on these inputs; its decomposed form where that one cannot do them."""
    if spec.yardstick is not None:
        return spec.yardstick(**inputs)
    native = spec.baselines.get("native")
    if native is not None:
        # Attention on a GPU refuses some sizes, or returns None for empty ones.
        with contextlib.suppress(Exception), sdpa_kernel(PLANLESS_ATTENTION):
            result = native(**inputs)
            if isinstance(result, Tensor):
                return result
    return spec.baselines["eager"](**inputs)


def truth_of(spec: KernelSpec, inputs: Inputs) -> tuple[Truth, TensorMeta]:
    """The oracle's fp64 output with PyTorch's own error, and what a right output looks like in the tested dtype.

    Raises: OracleError when the reference fails on its own inputs.
    """
    try:
        with torch.no_grad():
            value = _wide_oracle(spec, inputs).to(torch.float64)
            own = _own_result(spec, inputs)
    except Exception as error:
        raise OracleError(
            f"the reference of {spec.op} failed on its own inputs: {type(error).__name__}: {error}",
            hint="report this with the op and the model: no candidate can be judged",
        ) from error
    finally:
        release_unused()
    meta = describe(own)
    if own.shape != value.shape:
        raise OracleError(f"{spec.op}: oracle and PyTorch disagree on the shape: {value.shape} and {own.shape}")
    return Truth(value=value, native_error=native_error(own, value)), meta
