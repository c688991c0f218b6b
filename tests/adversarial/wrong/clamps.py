"""Clamps its input to what ordinary values never reach."""

CAUGHT_BY, VERDICT = "stability", "FAIL"

LIBRARY = build(
    SOURCE.replace(
        "return v; }\ntemplate <> float get(uint16_t",
        "return v > 1e3f ? 1e3f : v < -1e3f ? -1e3f : v; }\ntemplate <> float get(uint16_t",
    ),
    flags=["-O2"],
)
