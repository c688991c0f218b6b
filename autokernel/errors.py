"""Every error that autokernel raises on purpose.

A bad *candidate* never raises: it gets a verdict. These are our own faults or the world's, and each message
says what happened, with which value, and what to do next (the `hint`).

    AutokernelError
    ├─ ConfigError        2   a flag, a path or a model file is not usable as given
    ├─ DeviceError        3   a compiler or an accelerator is missing or broken
    ├─ RepositoryError    4   git refused, or the run's branch is not what the journal says
    ├─ IntegrityError     5   a protected file changed during the run
    ├─ OracleError        6   the reference itself failed on its own inputs
    ├─ MeasurementError   7   an impossible number, or a clock too unstable to decide anything
    ├─ LogError           8   results.tsv or the journal is damaged or foreign
    ├─ WorkerError        9   a child process could not start, or its answer could not be read
    └─ AgentError        10   the agent cannot go on (its folder is missing, say)
"""

from __future__ import annotations


class AutokernelError(Exception):
    """Base of the tree; `exit_code` is what the CLI exits with."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(AutokernelError):
    """A flag, a path or a model file cannot be used as given."""

    exit_code = 2


class DeviceError(AutokernelError):
    """A compiler or an accelerator is missing or does not work."""

    exit_code = 3


class RepositoryError(AutokernelError):
    """git refused an operation, or the run's branch moved behind our back."""

    exit_code = 4


class IntegrityError(AutokernelError):
    """A file that the judge depends on changed while the run was on."""

    exit_code = 5


class OracleError(AutokernelError):
    """The reference failed on inputs of its own spec: nothing can be judged with it."""

    exit_code = 6


class MeasurementError(AutokernelError):
    """A number that cannot be, or a clock too unstable to decide with."""

    exit_code = 7


class LogError(AutokernelError):
    """A log is damaged or was written by something else; it is never overwritten."""

    exit_code = 8


class WorkerError(AutokernelError):
    """A child process of ours could not start, or died before it could answer."""

    exit_code = 9


class AgentError(AutokernelError):
    """The agent cannot propose anything more for a reason outside the kernel."""

    exit_code = 10
