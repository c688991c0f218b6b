"""Precision downgrade: factors are rounded to bf16 and summed in fp32, as a tensor core would."""

BASE = "fused_mlp"
CAUGHT_BY, VERDICT = "smoke", "FAIL"

SOURCE = swapped(SOURCE, ("double(get(x[j])) * get(w[j])", "get(put<u16>(get(x[j]))) * get(put<u16>(get(w[j])))"))
