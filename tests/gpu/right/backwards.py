"""Another order of sums: K from its end to its beginning, with a sum of its own for every fourth step."""

BASE = "matmul_cuda"

SOURCE = edit(
    SOURCE,
    ("float sum = 0;", "float sums[4] = {0, 0, 0, 0};"),
    ("for (int k = 0; k < K; k += TILE)", "for (int k = (K - 1) / TILE * TILE; k >= 0; k -= TILE)"),
    (
        "for (int i = 0; i < TILE; ++i) sum += left[y][i] * above[i][x];",
        "for (int i = TILE - 1; i >= 0; --i) sums[i % 4] += left[y][i] * above[i][x];",
    ),
    (
        "if (m < M && n < N) put",
        "const float sum = (sums[3] + sums[2]) + (sums[1] + sums[0]);\n  if (m < M && n < N) put",
    ),
)
