"""Work dropped: only the 64 latest keys are seen."""

BASE = "flash_attention"
CAUGHT_BY, VERDICT = "sweep", "FAIL"

SOURCE = swapped(
    SOURCE,
    (
        "query(q + at, k + kv, v + kv, y + at, keys,",
        "const i64 most = keys > 64 ? 64 : keys, old = kv + (keys - most) * dim;\n"
        "            query(q + at, k + old, v + old, y + at, most,",
    ),
)
