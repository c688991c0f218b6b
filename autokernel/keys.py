"""API keys: from the environment, or from a file that only its owner can read. Values are never printed or recorded.

While a run is open its keys are taken out of the environment, so that no child process inherits them.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from pathlib import Path

from autokernel.agentchoice import API_KEYS
from autokernel.errors import ConfigError

SECRET_VARIABLES = (*API_KEYS.values(), "ANTHROPIC_AUTH_TOKEN", "OPENAI_ADMIN_KEY")
"""Environment variables that no child process gets."""

OTHERS_MAY = stat.S_IRWXG | stat.S_IRWXO
LEAST_SECRET = 6
"""Shorter values are placeholders such as `none`: replacing them would garble messages."""


def keys_path(environ: Mapping[str, str]) -> Path:
    """Where keys are stored: below XDG_CONFIG_HOME, or ~/.config."""
    base = environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base else Path.home() / ".config") / "autokernel" / "keys.json"


def stored_keys(path: Path) -> dict[str, str]:
    """Agent -> key, from the file at `path`; none when there is no such file.

    Raises: ConfigError when others may read it, or it is no file of keys.
    """
    try:
        with path.open() as file:
            status = os.fstat(file.fileno())
            if status.st_mode & OTHERS_MAY or status.st_uid not in (os.getuid(), 0):
                mode = stat.S_IMODE(status.st_mode)
                raise ConfigError(f"{path} can be read by others (mode {mode:04o})", hint=f"chmod 600 {path}")
            raw = json.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        why = type(error).__name__  # its text could quote the file
        raise ConfigError(f"{path} cannot be read ({why})", hint="remove it, then `autokernel keys set NAME`") from None
    if not isinstance(raw, dict) or not all(isinstance(value, str) for value in raw.values()):
        raise ConfigError(f"{path} is no file of keys", hint="remove it, then `autokernel keys set NAME`")
    return raw


def store_keys(path: Path, keys: Mapping[str, str]) -> None:
    """Write the file anew, readable by its owner only from the first byte on."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            json.dump(dict(keys), file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def available_keys(environ: Mapping[str, str]) -> dict[str, str]:
    """Variable -> key, from the environment, else from the file."""
    stored = stored_keys(keys_path(environ))
    found = {API_KEYS[agent]: key for agent, key in stored.items() if agent in API_KEYS}
    return found | {name: environ[name].strip() for name in SECRET_VARIABLES if environ.get(name, "").strip()}


@contextlib.contextmanager
def withheld(environ: MutableMapping[str, str]) -> Iterator[dict[str, str]]:
    """Takes the secrets out of `environ` for as long as the context is open; yields `available_keys`."""
    keys = available_keys(environ)
    taken = {name: environ.pop(name) for name in SECRET_VARIABLES if name in environ}
    try:
        yield keys
    finally:
        environ.update(taken)


def redact(text: str, secrets: Collection[str]) -> str:
    """`text` with every secret replaced."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= LEAST_SECRET:
            text = text.replace(secret, "[key]")
    return text
