"""Work dropped: only the 64 latest keys are seen."""

BASE = "flash_attention"
CAUGHT_BY, VERDICT = "sweep", "FAIL"

SOURCE = swapped(
    SOURCE,
    (
        "query(q + at, k + kv, v + kv, y + at, keys,",
        "const i64 old = keys > 64 ? keys - 64 : 0; query(q + at, k + kv + old * dim, v + kv + old * dim, y + at, keys - old,",
    ),
)
