"""Work later: a thread of the host launches the kernel when the call has long returned."""

import threading
import time

BASE = "rmsnorm_triton"
CAUGHT_BY, VERDICT = "smoke", "FAIL"


def compute(x, weight, eps, out):
    time.sleep(0.2)
    right(x, weight, eps, out=out)


def kernel_fn(x, weight, eps=1e-6):
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    threading.Thread(target=compute, args=(x, weight, eps, out), daemon=True).start()
    return out
