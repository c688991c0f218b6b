"""The GPU's clock during a measurement and what slowed it, as NVML tells; nothing where NVML is not there.

NVML is asked through `pynvml` (the nvidia-ml-py package), which is optional.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from autokernel.records import Clocks

SLOWED_BY = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "temperature", 0x40: "temperature", 0x80: "power brake"}
"""Bits of NVML's clock event reasons that mean a clock below what was asked for."""


class ClockLog:
    """Samples the current GPU's clock; `summary` is None where there is nothing to ask."""

    def __init__(self) -> None:
        self._mhz: list[int] = []
        self._reasons: set[str] = set()

    def sample(self) -> None:
        """Note the clock now; some 50 us, with nothing running on our side."""
        handle = _handle()
        if handle is None:
            return
        import pynvml

        try:
            self._mhz.append(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
            bits = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        except pynvml.NVMLError:  # not every part answers every question
            return
        self._reasons.update(name for bit, name in SLOWED_BY.items() if bits & bit)

    def summary(self) -> Clocks | None:
        """Lowest and highest clock so far, and what slowed it."""
        if not self._mhz:
            return None
        return Clocks(low_mhz=min(self._mhz), high_mhz=max(self._mhz), slowed_by=tuple(sorted(self._reasons)))


@functools.cache
def _handle() -> Any:
    """NVML's handle of PyTorch's current GPU, or None."""
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except Exception:  # not installed, no NVIDIA driver, a part of a GPU: then there is no clock to log
        return None
