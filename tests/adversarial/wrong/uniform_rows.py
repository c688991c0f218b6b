"""Mean: every element is the mean of its row."""

BASE = "softmax"
CAUGHT_BY, VERDICT = "smoke", "FAIL"

SOURCE = swapped(SOURCE, ("put<T>(float(__builtin_exp(get(x[j * step]) - top) / sum))", "put<T>(1.0f / n)"))
