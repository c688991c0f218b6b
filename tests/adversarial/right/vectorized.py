"""Lets the compiler reorder the sums as it likes."""

LIBRARY = build(SOURCE.replace("double sum = 0", "float sum = 0"), flags=["-O3", "-ffast-math"])
