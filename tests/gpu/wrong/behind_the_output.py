"""Out of bounds: writes one element behind its output, where PyTorch's allocator has rounded up."""

BASE = "rotary_cuda"
CAUGHT_BY, VERDICT = "sweep", "FAIL"
SHAPES = {"x": (1, 3, 501, 66), "cos": (501, 33), "sin": (501, 33)}

SOURCE = edit(
    SOURCE,
    (
        "put(y, first, a * c",
        "if (pair == 0 && pairs * (dtype ? 4 : 8) % 512) put(y, pairs * 2, 0, dtype);\n  put(y, first, a * c",
    ),
)
