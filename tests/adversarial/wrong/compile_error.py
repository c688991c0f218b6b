"""Does not compile."""

CAUGHT_BY, VERDICT = "smoke", "CRASH"


LIBRARY = build("int broken(", flags=["-O2"])


def kernel_fn(x, weight, eps=1e-6):
    return right(x, weight, eps)
