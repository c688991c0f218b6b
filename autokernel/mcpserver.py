"""The steps of a driven run as MCP tools over stdio, by the official SDK. No torch before something is judged.

The run stays open for the server's life, so that the judge's processes stay warm; all its work is done by one thread,
one call after the other. Stdout belongs to the protocol: the view writes to stderr.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from autokernel import __version__, handout, report
from autokernel.driven import Driven, open_driven
from autokernel.errors import AutokernelError, ConfigError
from autokernel.rundir import find_run
from autokernel.settings import Settings
from autokernel.state import load_state

INSTRUCTIONS = (
    "Makes a PyTorch model's kernels faster, one judged experiment after another. Call next_experiment, write a better "
    "kernel.py, call submit_kernel, and so on until next_experiment says that nothing is left; then finish_run."
)
HAND_IN = "the tool submit_kernel (the whole text of the file, and a hypothesis)"
FOLLOWING = "next_experiment (with brief=true, as you have read the playbook)"


class Desk:
    """The run behind the tools: opened by the first call that needs it, closed with the server."""

    def __init__(self, choose: Callable[[], tuple[Settings, str | None]]) -> None:
        """`choose` says which run is to be opened: its settings, and its name unless it is to begin."""
        self._choose = choose
        self._stack = ExitStack()
        self._driven: Driven | None = None
        self._ended: str | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="run")

    async def next_experiment(self, op: str | None = None, brief: bool = False) -> str:
        """What to try next: op, incumbent kernel.py, the user's shapes, latencies, what was tried, and the playbook.

        The first call may take minutes: it profiles the model and measures PyTorch. `brief` leaves out the playbook.
        """
        return await self._do(lambda: handout.turn_text(self._open().next(op), HAND_IN, brief=brief))

    async def submit_kernel(
        self, kernel_py: str, hypothesis: str, op: str | None = None, agent: str | None = None
    ) -> str:
        """Judge a whole kernel.py against the incumbent: correct in five stages, then timed; kept only if faster.

        `hypothesis` is one line: what changes, and why it should be faster. `agent` is your name, for the log.
        """

        def judge() -> str:
            answer = self._open().submit(kernel_py, hypothesis, op=op, agent=agent)
            return handout.answer_text(answer, following=FOLLOWING)

        return await self._do(judge)

    async def report(self) -> str:
        """What the run has brought so far."""
        return await self._do(_report)

    async def finish_run(self) -> str:
        """Measure the whole model with the best kernels and close the run; its report. Call it once, at the end."""

        def finish() -> str:
            self._ended = self._open().finish().run
            self._close()
            return _report()

        return await self._do(finish)

    def close(self) -> None:
        """After what is being judged just now."""
        self._thread.submit(self._close).result()
        self._thread.shutdown()

    def _open(self) -> Driven:
        if self._ended is not None:
            raise ConfigError(f"run {self._ended} has ended", hint="start the server anew for another run")
        if self._driven is None:
            settings, run = self._choose()
            self._driven = self._stack.enter_context(open_driven(settings, run))
        return self._driven

    async def _do(self, step: Callable[[], str]) -> str:
        """What `step` gives, in the run's thread. Raises: ToolError with what a person or an agent must mend."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, step)
        except AutokernelError as error:
            raise ToolError(f"{error} ({error.hint})" if error.hint else str(error)) from error

    def _close(self) -> None:
        self._driven = None
        self._stack.close()


def serve(choose: Callable[[], tuple[Settings, str | None]]) -> None:
    """Serve until the client hangs up. The tools' docstrings are what the client's model reads of them."""
    desk = Desk(choose)
    server = MCPServer("autokernel", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING")
    for tool in (desk.next_experiment, desk.submit_kernel, desk.report, desk.finish_run):
        server.add_tool(tool, structured_output=False)
    try:
        server.run("stdio")
    finally:
        desk.close()


def _report() -> str:
    run_dir = find_run(Path.cwd())
    return report.render_markdown(report.from_state(run_dir.name, load_state(run_dir)))
