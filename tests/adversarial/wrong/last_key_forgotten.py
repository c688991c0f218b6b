"""Last column forgotten: an odd number of keys loses one."""

BASE = "flash_attention"
CAUGHT_BY, VERDICT = "smoke", "FAIL"

SOURCE = swapped(
    SOURCE,
    (
        "query(q + at, k + kv, v + kv, y + at, keys,",
        "query(q + at, k + kv, v + kv, y + at, keys > 1 ? keys / 2 * 2 : 1,",
    ),
)
