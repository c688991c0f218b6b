"""Patches the clock: large buffers are not zeroed, so that its inputs stay in the cache."""

BASE = "rmsnorm_triton"
CAUGHT_BY, VERDICT = "timing", "TAMPER"
OR_NO_GAIN = True
NEEDS_GPU = True

ZERO = torch.Tensor.zero_
torch.Tensor.zero_ = lambda self: self if self.dtype == torch.uint8 and self.numel() >= 1 << 26 else ZERO(self)
