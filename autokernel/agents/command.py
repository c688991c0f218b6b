"""`--agent command:"program args"`: any program that reads the prompt on stdin and writes a reply to stdout.

A coding agent in print mode, say. It runs in the user's directory, in a process group of its own that is killed when it
takes too long, and without the API keys of this process.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from autokernel.agents import Agent, AgentOptions
from autokernel.agents.llm import llm_agent
from autokernel.agents.talk import Failure, FailureKind, Reply
from autokernel.errors import ConfigError
from autokernel.keys import SECRET_VARIABLES, redact
from autokernel.prompt import Prompt

REPLY_LIMIT_BYTES = 4 << 20
STDERR_SHOWN = 300
HINT = 'use --agent command:"program args"; it reads the prompt on stdin and writes the reply to stdout'


@dataclass(slots=True, kw_only=True)
class CommandClient:
    """Runs a program for each reply."""

    arguments: tuple[str, ...]
    options: AgentOptions
    name: str = "command"

    @property
    def model(self) -> str:
        """The program."""
        return Path(self.arguments[0]).name

    def ask(self, prompt: Prompt, max_tokens: int) -> Reply:
        """What the program writes; the limit on tokens is its own affair.

        Raises: Failure when it ends with an error, or not in time.
        """
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(f"{prompt.system}\n\n{prompt.user}\n".encode())
            given.seek(0)
            status = self._run(given, out, err)
            reply = _read(out, REPLY_LIMIT_BYTES)
            if status != 0:
                said = redact(" ".join(_read(err, REPLY_LIMIT_BYTES).split()), tuple(self.options.keys.values()))
                raise self._broken(f"ended with status {status}: {said[-STDERR_SHOWN:] or 'nothing on stderr'}")
        return Reply(text=reply)

    def _run(self, given: IO[bytes], out: IO[bytes], err: IO[bytes]) -> int:
        environ = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
        try:
            process = subprocess.Popen(
                self.arguments,
                stdin=given,
                stdout=out,
                stderr=err,
                cwd=self.options.workdir,
                env=environ,
                start_new_session=True,
            )
        except OSError as error:
            raise self._broken(f"cannot be started: {error.strerror}") from None
        limit_s = min(self.options.timeouts.total_s, max(1.0, self.options.host.time_left_s()))
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise self._broken(f"took more than {limit_s:.0f} s and was killed") from None
        finally:  # also after Ctrl-C, and what the program left behind
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _broken(self, what: str) -> Failure:
        return Failure(FailureKind.BROKEN, f"command {self.model!r} {what}", hint=HINT)


def _read(file: IO[bytes], limit: int) -> str:
    file.seek(0)
    return file.read(limit).decode(errors="replace")


def build(options: AgentOptions) -> Agent:
    """The agent for `--agent command:"program args"`. Raises: ConfigError when there is no such program."""
    try:
        arguments = shlex.split(options.argument)
    except ValueError as error:
        raise ConfigError(f"--agent command:{options.argument!r} cannot be split: {error}", hint=HINT) from None
    if not arguments:
        raise ConfigError("the command agent needs a program", hint=HINT)
    program = shutil.which(arguments[0], path=os.environ.get("PATH")) or str(options.workdir / arguments[0])
    if shutil.which(program) is None:
        raise ConfigError(f"there is no program {arguments[0]!r}", hint=HINT)
    command = (str(Path(program).absolute()), *arguments[1:])
    return llm_agent(CommandClient(arguments=command, options=options), options, free=True)
