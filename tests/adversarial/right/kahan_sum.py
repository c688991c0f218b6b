"""fp32 sums that carry what rounding lost."""

BASE = "reduce"

SOURCE = swapped(
    SOURCE,
    ("double sum = 0;", "volatile float sum = 0, lost = 0;"),
    (
        "sum += get(x[j]);",
        "{\n"
        "        const float y = get(x[j]) - lost;\n"
        "        const volatile float next = sum + y;\n"
        "        if (next - next == 0) lost = (next - sum) - y;\n"
        "        sum = next;\n"
        "    }",
    ),
)
