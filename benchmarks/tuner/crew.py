"""Child processes that answer messages, one at a time each; one that takes too long or dies is replaced.

What a child does is a function that makes an answering function: made in the child, so that it can hold modules, GPU
contexts and tensors there.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

Message = dict[str, Any]
Answering = Callable[[Message], Message]

START_DEADLINE_S = 120
"""To import PyTorch and Triton and to make a GPU context, with every core doing the same."""


class ChildLost(Exception):
    """The child died, or did not answer in time and was killed; `late` tells which."""

    def __init__(self, *, late: bool) -> None:
        super().__init__("no answer in time" if late else "the process died")
        self.late = late


class Child:
    """One child process. It leads a process group, so that a compiler it started ends with it."""

    def __init__(self, make: Callable[[], Answering]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make), daemon=True)
        self._process.start()
        theirs.close()
        self.deadline = time.monotonic() + START_DEADLINE_S

    def send(self, message: Message, deadline_s: float) -> None:
        """Begin with a message; `receive` has the answer."""
        self.connection.send(message)
        self.deadline = time.monotonic() + deadline_s

    def receive(self) -> Message:
        """The answer to the last message (a first one says that the child is ready). Raises: ChildLost."""
        if not self.connection.poll(max(0.0, self.deadline - time.monotonic())):
            self.kill()
            raise ChildLost(late=True)
        try:
            answer: Message = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.kill()
            raise ChildLost(late=False) from None
        return answer

    def kill(self) -> None:
        """End it and what it started."""
        pid = self._process.pid
        if pid is not None and self._process.is_alive():
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:  # it has not come to lead its group yet
                self._process.kill()
        self._process.join()
        self.connection.close()


def _serve(connection: Connection, make: Callable[[], Answering]) -> None:
    os.setsid()
    answer = make()
    connection.send({"ready": True})
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        connection.send(answer(message))


LOOK_S = 1.0
"""How often a crew looks whether it should stop."""


class Stopped(Exception):
    """The crew was told to stop before it had all answers."""


def answer_all(
    make: Callable[[], Answering],
    messages: Sequence[Message],
    *,
    children: int,
    deadline_s: float,
    stop: threading.Event,
) -> list[Message | ChildLost]:
    """The answer to each message, or how its child was lost, by `children` processes at once.

    Raises: Stopped soon after `stop` is set; RuntimeError when a child cannot even start.
    """
    answers: list[Message | ChildLost | None] = [None] * len(messages)
    waiting = list(reversed(range(len(messages))))
    busy: dict[Child, int | None] = {Child(make): None for _ in range(min(children, len(messages)))}
    try:
        while busy:
            if stop.is_set():
                raise Stopped
            for child in _answered(list(busy)):
                number, answer = busy.pop(child), _received(child)
                if number is not None:
                    answers[number] = answer
                elif isinstance(answer, ChildLost):
                    raise RuntimeError("a child process could not start") from answer
                if not waiting:
                    child.kill()
                elif isinstance(answer, ChildLost):
                    busy[Child(make)] = None
                else:
                    busy[child] = waiting.pop()
                    child.send(messages[busy[child]], deadline_s)
    finally:
        for child in busy:
            child.kill()
    return [answer for answer in answers if answer is not None]


def _received(child: Child) -> Message | ChildLost:
    try:
        return child.receive()
    except ChildLost as lost:
        return lost


def _answered(children: Sequence[Child]) -> list[Child]:
    """Those that have answered, died or run out of time; waits a moment for one."""
    left = max(0.0, min(child.deadline for child in children) - time.monotonic())
    ready = set(wait([child.connection for child in children], timeout=min(left, LOOK_S)))
    now = time.monotonic()
    return [child for child in children if child.connection in ready or child.deadline <= now]
