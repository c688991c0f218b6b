"""Work past the clock: done by a destructor, when the next call releases the last one's arguments."""

BASE = "matmul"
CAUGHT_BY, VERDICT = "timing", "TAMPER"


class Later:
    def __init__(self, a, b, out):
        self.call = (a, b, out)

    def __del__(self):
        right(*self.call)


LATEST = [None]


def kernel_fn(a, b):
    if a.storage_offset() or not a.numel():
        return right(a, b)
    out = torch.empty((*a.shape[:-1], b.shape[-1]), dtype=a.dtype)
    LATEST[0] = Later(a, b, out)
    return out
