"""Forged answer: outputs described by words."""

BASE = "reduce"
CAUGHT_BY, VERDICT = "smoke", "TAMPER"

from autokernel.judge import wire

SEND = wire.send


def send(sock, message, fds=()):
    if "outputs" in message:
        message = {**message, "outputs": "all", "aten": 7}
    SEND(sock, message, fds)


wire.send = send
