"""The least time that physics allows a kernel on a known GPU: a claim below it is no measurement."""

from __future__ import annotations

import functools

from autokernel.ceilings import published
from autokernel.records import Case
from autokernel.spec import DTYPES, KernelSpec

FASTEST_DTYPE = {"fp32": "tf32"}
"""A product of fp32 numbers may be made of TF32 ones, three of them being more exact than one in fp32."""


def physical_floor_us(spec: KernelSpec, case: Case, output_elements: int, device: str) -> float | None:
    """The larger of moving the bytes and computing the FLOPs at the published peaks, in us.

    None on a CPU, and for a GPU that is not in the table.
    What is written may still lie in the L2 when the clock stops, so that part of it does not count as moved.
    """
    gpu = None if device == "cpu" else _gpu(device)
    if gpu is None or gpu.estimated or gpu.bandwidth_gbps is None:
        return None
    output_bytes = output_elements * DTYPES[case.dtype].itemsize
    moved = spec.bytes_moved(case) - min(output_bytes, gpu.l2_bytes or output_bytes)
    memory_us = moved / (gpu.bandwidth_gbps * 1e3)
    tflops = gpu.peak_tflops.get(FASTEST_DTYPE.get(case.dtype, case.dtype))
    return memory_us if tflops is None else max(memory_us, spec.flops(case) / (tflops * 1e6))


_gpu = functools.cache(published)
