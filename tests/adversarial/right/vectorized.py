"""Lets the compiler reorder the sums as it likes."""

BASE = "rmsnorm"

SOURCE = swapped(SOURCE, ("double sum = 0", "float sum = 0"))
FLAGS = ["-O3", "-ffast-math"]
