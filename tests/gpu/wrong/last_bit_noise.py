"""Not repeatable: the last bit of a result follows the device's clock."""

BASE = "rotary_cuda"
CAUGHT_BY, VERDICT = "determinism", "FAIL"
JUDGED_IN = ("fp32",)

SOURCE = edit(
    SOURCE,
    (
        "put(y, second, b * c + a * s, dtype);",
        "put(y, second, __uint_as_float(__float_as_uint(b * c + a * s) ^ (clock64() >> 4 & 1)), dtype);",
    ),
)
