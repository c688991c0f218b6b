"""Compensated sums: each thread carries along what rounding took from its sum."""

BASE = "reduce_cuda"

SOURCE = edit(
    SOURCE,
    (
        "for (int64_t i = threadIdx.x; i < cols; i += THREADS) v = join(v, get(x, base + i, dtype), kind);",
        """float lost = 0;
  for (int64_t i = threadIdx.x; i < cols; i += THREADS) {
    const float term = get(x, base + i, dtype), before = v;
    v = join(v, term, kind);
    if (kind == 2 || isinf(v)) continue;
    lost += fabsf(before) > fabsf(term) ? (before - v) + term : (term - v) + before;
  }
  if (kind != 2 && !isinf(v)) v += lost;""",
    ),
)
