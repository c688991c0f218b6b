"""Threads with a fixed share of the rows each."""

BASE = "softmax"

SOURCE = swapped(
    SOURCE, ("for (i64 o = 0;", '_Pragma("omp parallel for schedule(static) num_threads(2)") for (i64 o = 0;')
)
