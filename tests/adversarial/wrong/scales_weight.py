"""Mutation of inputs: divides the bias by two, once for each call."""

BASE = "layernorm"
CAUGHT_BY, VERDICT = "smoke", "FAIL"

SOURCE = swapped(
    SOURCE, ("int run(PARAMETERS(T)) {", "int run(PARAMETERS(T)) {\n    ((T*)b)[0] = put<T>(get(b[0]) / 2);")
)
