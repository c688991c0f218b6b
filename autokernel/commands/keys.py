"""`autokernel keys`: store, list and remove API keys; a key is never printed, and never an argument."""

from __future__ import annotations

import getpass
import os
import sys
from typing import Annotated

import typer

from autokernel.agentchoice import API_KEYS
from autokernel.errors import ConfigError

app = typer.Typer(help="Stores API keys where only you can read them.", no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(metavar="NAME", help=f"{' or '.join(API_KEYS)}")]


@app.command("set")
def set_key(name: Name) -> None:
    """Ask for a key, without showing it, and store it; or take it from stdin: `autokernel keys set NAME < FILE`."""
    from autokernel.keys import keys_path, store_keys, stored_keys

    _check(name)
    path = keys_path(os.environ)
    stored = stored_keys(path)  # a file that others can read is refused before a key is typed
    key = getpass.getpass(f"{name} key: ") if sys.stdin.isatty() else sys.stdin.read()
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError("this is no key: it is empty, or has spaces in it", hint="paste the key alone, on one line")
    store_keys(path, {**stored, name: key})
    print(f"{name}: stored in {path}")


@app.command("list")
def list_keys() -> None:
    """Names of the keys that are there, and where each is; never the keys."""
    from autokernel.keys import keys_path, stored_keys

    path = keys_path(os.environ)
    stored = stored_keys(path)
    for name, variable in API_KEYS.items():
        if os.environ.get(variable, "").strip():
            print(f"{name}: {variable}")
        elif name in stored:
            print(f"{name}: {path}")


@app.command("remove")
def remove_key(name: Name) -> None:
    """Forget a stored key."""
    from autokernel.keys import keys_path, store_keys, stored_keys

    _check(name)
    path = keys_path(os.environ)
    stored = stored_keys(path)
    if name not in stored:
        raise ConfigError(f"no key is stored for {name}", hint="`autokernel keys list` shows the names")
    store_keys(path, {known: key for known, key in stored.items() if known != name})
    print(f"{name}: removed")


def _check(name: str) -> None:
    if name not in API_KEYS:
        raise ConfigError(f"no agent {name!r} takes a key", hint=f"known: {', '.join(API_KEYS)}")
