"""A kernel's text in a record: held, or left in its file until somebody reads it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from autokernel.errors import IntegrityError

T = TypeVar("T")


def text_digest(text: str) -> str:
    """First 16 hex digits of the SHA-256 of `text`."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShelvedText:
    """A kernel's text that lies in a file of the run, and is read when it is asked for: a night has thousands.

    `revise` makes the text of what the file holds, where a search has found other numbers for it.
    """

    path: str  # a Path takes four times the memory
    digest: str  # of the file's text
    revise: Callable[[str], str] | None = None

    def read(self) -> str:
        """The text. Raises: IntegrityError when the file is gone, or not the one that was judged."""
        try:
            text = Path(self.path).read_bytes().decode("utf-8", "replace")  # every byte: the digest is of them
        except OSError as error:
            raise IntegrityError(f"the kernel of an experiment is gone: {error}", hint="restore the run directory")
        if text_digest(text) != self.digest:
            raise IntegrityError(
                f"{self.path} is not the text that the journal names", hint="restore the run directory"
            )
        return text if self.revise is None else self.revise(text)


class KernelText:
    """The field of a record that is given a text, or where it lies, and is a text to all who read it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, record: object | None, owner: type) -> str:
        if record is None:
            raise AttributeError("a kernel's text has no default")
        held: str | ShelvedText = record.__dict__[self._name]
        return held if isinstance(held, str) else held.read()

    def __set__(self, record: object, text: str | ShelvedText) -> None:
        record.__dict__[self._name] = text

    @staticmethod
    def digest(record: object, name: str) -> str:
        """`text_digest` of the text in a record's field, without reading its file where it is known."""
        held: str | ShelvedText = record.__dict__[f"_{name}"]
        if isinstance(held, ShelvedText) and held.revise is None:
            return held.digest
        return text_digest(held if isinstance(held, str) else held.read())


class ByDigest(Generic[T]):
    """What a function says of texts, kept by their digests: functools.lru_cache would keep thousands of texts."""

    def __init__(self, function: Callable[[str], T], maxsize: int) -> None:
        self._function, self._maxsize = function, maxsize
        self._known: dict[str, T] = {}
        functools.update_wrapper(self, function)

    def __call__(self, text: str) -> T:
        return self.of(text_digest(text), lambda: text)

    def of(self, digest: str, read: Callable[[], str]) -> T:
        """The same for the text with a digest, which is only read when it is new."""
        if digest in self._known:
            return self._known[digest]
        found = self._function(read())
        if len(self._known) >= self._maxsize:
            del self._known[next(iter(self._known))]
        self._known[digest] = found
        return found


def by_digest(maxsize: int) -> Callable[[Callable[[str], T]], ByDigest[T]]:
    """Decorate a function of a text: the newest `maxsize` results are kept."""
    return lambda function: ByDigest(function, maxsize)
