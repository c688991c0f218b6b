"""One core for each worker, for tests that measure time: `--own-core`, with pytest-xdist's -n."""

import os


def pytest_addoption(parser):
    parser.addoption(
        "--own-core", action="store_true", help="keep each worker of pytest-xdist, and all it starts, to one core"
    )


def pytest_configure(config):
    """Two workers' kernels would otherwise share cores, and each would time the other as well."""
    worker = getattr(config, "workerinput", None)
    if worker is not None and config.getoption("--own-core") and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker["workerid"].removeprefix("gw")) % len(cores)]})
