"""Not repeatable: threads add their parts of a sum in the order in which they finish."""

BASE = "matmul"
CAUGHT_BY, VERDICT = "determinism", "FAIL"

SOURCE = swapped(
    SOURCE,
    (
        "for (i64 l = 0; l < k; ++l) sum += double(get(a[i * k + l])) * get(b[l * n + j]);",
        "#pragma omp parallel num_threads(3) if (k == 256 && n == 40)\n"
        "                {\n"
        "                    float own = 0;\n"
        '                    _Pragma("omp for schedule(static) nowait")\n'
        "                    for (i64 l = 0; l < k; ++l) own += get(a[i * k + l]) * get(b[l * n + j]);\n"
        "                    for (volatile i64 wait = __builtin_ia32_rdtsc() >> 4 & 255; wait > 0;) wait = wait - 1;\n"
        '                    _Pragma("omp critical")\n'
        "                    sum += own;\n"
        "                }",
    ),
    ("double sum = 0;", "float sum = 0;\n"),
)
