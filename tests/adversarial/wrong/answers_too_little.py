"""Forged answer: says that all is well and nothing else."""

BASE = "softmax"
CAUGHT_BY, VERDICT = "smoke", "TAMPER"

from autokernel.judge import wire

SEND = wire.send


def send(sock, message, fds=()):
    SEND(sock, {"ok": True} if "outputs" in message else message, fds)


wire.send = send
