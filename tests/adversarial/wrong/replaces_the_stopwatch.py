"""Scan for judge objects: finds the session among all objects and gives it a clock of its own."""

BASE = "rotary_embedding"
CAUGHT_BY, VERDICT = "timing", "TAMPER"

import gc

from autokernel.judge.stopwatch import Block


class Stopwatch:
    def block(self, kernel, schedule, *, warm, keep, before):
        outputs = []
        for number, arguments in enumerate(schedule):
            before(number)
            outputs.append(kernel(*arguments))
        outputs = outputs[warm:]
        return Block(calls_us=[1.0] * len(outputs), warm_us=1.0, host_us=[], idle_us=0.0, kept=outputs[keep])


@functools.cache
def take_over():
    for thing in gc.get_objects():
        if type(thing).__name__ == "_Session":
            thing._stopwatch = Stopwatch()


def kernel_fn(x, cos, sin, interleaved=False):
    take_over()
    return right(x, cos, sin, interleaved)
