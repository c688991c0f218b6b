"""Forged answer: one more than was asked for, so that later ones come before their question."""

BASE = "reduce"
CAUGHT_BY, VERDICT = "smoke", "TAMPER"

from autokernel.judge import wire

SEND = wire.send


def send(sock, message, fds=()):
    SEND(sock, message, fds)
    SEND(sock, message, fds)


wire.send = send
