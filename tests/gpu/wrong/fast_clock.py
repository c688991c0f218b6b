"""Patches the clock: the host's runs 20 times too fast, and the events tell a tenth."""

import time

BASE = "rmsnorm_triton"
CAUGHT_BY, VERDICT = "timing", "TAMPER"
NEEDS_GPU = True

REAL, START = time.perf_counter_ns, time.perf_counter_ns()
time.perf_counter_ns = lambda: START + (REAL() - START) * 20
ELAPSED = torch.cuda.Event.elapsed_time
torch.cuda.Event.elapsed_time = lambda start, stop: ELAPSED(start, stop) / 10
