"""A kernel's text in a record: held, or left in its file until somebody reads it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autokernel.errors import IntegrityError


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
