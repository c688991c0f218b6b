"""A child that times a kernel's configurations: the judge's, without what only a record of its operators needs."""

from __future__ import annotations

from autokernel.judge.child import main
from autokernel.judge.child import preload_to_call as preload

__all__ = ["main", "preload"]
