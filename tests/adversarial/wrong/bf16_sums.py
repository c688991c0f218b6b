"""Precision downgrade: sums are kept in bf16, in fp32 kernels too."""

BASE = "matmul"
CAUGHT_BY, VERDICT = "smoke", "FAIL"

SOURCE = swapped(
    SOURCE,
    ("double sum = 0;", "float sum = 0;"),
    (
        "sum += double(get(a[i * k + l])) * get(b[l * n + j]);",
        "sum = get(put<u16>(sum + get(a[i * k + l]) * get(b[l * n + j])));",
    ),
)
