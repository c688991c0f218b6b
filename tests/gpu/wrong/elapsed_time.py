"""Patches the clock: Event.elapsed_time tells a tenth of the time."""

BASE = "rmsnorm_triton"
CAUGHT_BY, VERDICT = "timing", "TAMPER"
NEEDS_GPU = True

ELAPSED = torch.cuda.Event.elapsed_time
torch.cuda.Event.elapsed_time = lambda start, stop: ELAPSED(start, stop) / 10
