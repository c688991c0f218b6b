"""Forged answer: times that are no numbers."""

BASE = "softmax"
CAUGHT_BY, VERDICT = "timing", "TAMPER"

from autokernel.judge import wire

SEND = wire.send


def send(sock, message, fds=()):
    if "calls_us" in message:
        message = {**message, "calls_us": [float("nan")] * len(message["calls_us"]), "warm_us": float("inf")}
    SEND(sock, message, fds)


wire.send = send
