"""The variance as a difference of two fp32 numbers, which cancels where the mean is large."""

BASE = "layernorm"
CAUGHT_BY, VERDICT = "stability", "FAIL"

SOURCE = swapped(
    SOURCE,
    ("var += (get(x[c]) - mean) * (get(x[c]) - mean);", "var += double(get(x[c])) * get(x[c]);"),
    ("double scale", "var = (float(var / cols) - float(mean * mean)) * cols;\n        double scale"),
)
