"""Right for small sizes only: rows beyond the thousandth are left out."""

BASE = "matmul_cuda"
CAUGHT_BY, VERDICT = "edges", "FAIL"

SOURCE = edit(
    SOURCE, ("const dim3 grid(unsigned(M + TILE - 1)", "const dim3 grid(unsigned((M < 1000 ? M : 1000) + TILE - 1)")
)
