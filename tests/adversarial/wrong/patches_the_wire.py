"""Monkeypatch: times are changed on their way to the judge."""

BASE = "matmul"
CAUGHT_BY, VERDICT = "timing", "TAMPER"

from autokernel.judge import wire

SEND = wire.send


def send(sock, message, fds=()):
    if "calls_us" in message:
        message = {**message, "calls_us": [us / 50 for us in message["calls_us"]], "warm_us": 0.1}
    SEND(sock, message, fds)


wire.send = send
