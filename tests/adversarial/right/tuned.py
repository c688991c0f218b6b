"""A configuration of its own, passed to the compiler."""

BASE = "reduce"

TUNABLES = {"LANES": [1, 4, 8, 16], "OPT": ["-O1", "-O2"]}
CONFIG = {"LANES": 8, "OPT": "-O2"}
FLAGS = [CONFIG["OPT"], f"-DLANES={CONFIG['LANES']}"]
SOURCE = swapped(
    SOURCE,
    ("double sum = 0;", "float lane[LANES] = {}, sum = 0;"),
    ("sum += get(x[j]);", "lane[j % LANES] += get(x[j]);\n    for (float own : lane) sum += own;"),
)
