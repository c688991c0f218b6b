"""Models as functional ATen graphs, by torch.compile's front end (Dynamo, then AOT Autograd) without decompositions.

`capture` records a model's graphs with the inputs of one forward; `inference_backend` is the torch.compile backend
behind it, and behind `apply`; `trace` takes a plain function down the same path, so that what it writes looks as it
does in a model. What the graphs compute is not known here.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from autokernel.attention import whole_attention
from autokernel.biases import split_biases
from autokernel.errors import ConfigError
from autokernel.masks import drop_plain_masks
from autokernel.model import LoadedModel, forward

MAX_REASON = 300  # characters of Dynamo's explanation that are shown

GraphCompiler = Callable[[GraphModule], Callable[..., Any]]
"""An ATen graph of one static set of shapes -> what to run in its place, with the graph's inputs as arguments."""

Backend = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]
"""What torch.compile calls with each graph that Dynamo captured."""


@dataclass(frozen=True, kw_only=True)
class CapturedGraph:
    """One functional ATen graph of a model, its first inputs (parameters among them), and how often it ran."""

    gm: GraphModule
    inputs: tuple[Any, ...]
    calls: int = 1


@dataclass(kw_only=True)
class Tally:
    """How often the graphs of a model ran, and how often the model ran without any of them."""

    runs: int = 0
    uncaptured: int = 0


def capture(loaded: LoadedModel) -> list[CapturedGraph]:
    """The graphs that one forward of the model runs, in order of their first run; several when Dynamo breaks the graph.

    Raises: ConfigError when the forward itself fails, or with Dynamo's own reason when nothing can be captured.
    """
    forward(loaded)  # a fault of the model is shown as its own, not as the front end's
    found: dict[GraphModule, CapturedGraph] = {}

    def record(gm: GraphModule) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            known = found.get(gm)
            found[gm] = replace(known, calls=known.calls + 1) if known else CapturedGraph(gm=gm, inputs=inputs)
            return gm(*inputs)

        return run if any(node.op == "call_function" for node in gm.graph.nodes) else gm.forward

    breaks = _break_reasons()
    try:
        with torch.no_grad(), _fresh_limits():
            compiled = compile_call(loaded.model, inference_backend(record))
            compiled(*loaded.args, **loaded.kwargs)
    except Exception as error:
        raise ConfigError(f"{loaded.name} cannot be captured: {_short(error)}", hint=_HINT) from None
    if not found:
        reasons = [text for text in _break_reasons() if text not in breaks] or ["the forward runs no tensor operation"]
        raise ConfigError(f"{loaded.name} cannot be captured: {reasons[0][:MAX_REASON]}", hint=_HINT)
    return list(found.values())


_HINT = "torch.compile(model) must work on it; TORCH_LOGS=graph_breaks shows where it does not"


def as_captured(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """The backend that changes nothing."""
    checkpoint = torch.ops.higher_order.tag_activation_checkpoint
    if not any(node.target is checkpoint for node in gm.graph.nodes):
        return gm.forward
    # Run as it is, a checkpoint draws other random numbers when it is computed again: wrong gradients (torch 2.13).
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import default_partition

    lower = aot_autograd(fw_compiler=lambda part, _inputs: boxed(part.forward), partition_fn=default_partition)
    compiled: Callable[..., Any] = lower(gm, inputs)
    return compiled


def inference_backend(compile_graph: GraphCompiler, *, train: Backend = as_captured) -> Backend:
    """A torch.compile backend that hands each inference graph, as functional ATen, to `compile_graph`.

    Products with a bias are split into product and sum (`biases`). A graph that needs gradients goes to `train`, as
    Dynamo captured it.
    """
    from torch._dynamo.backends.common import aot_autograd

    whole = contextlib.ExitStack()

    def compile_aten(gm: GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        whole.close()  # the graph is traced; whoever compiles it on may take attention apart
        drop_aliases(gm)
        split_biases(gm)
        with real_tensors():
            drop_plain_masks(gm)
            return boxed(compile_graph(gm))

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if torch.is_grad_enabled() and _needs_grad(gm, inputs):
            return train(gm, inputs)
        lower = aot_autograd(fw_compiler=compile_aten, inference_compiler=compile_aten)
        with whole:
            whole.enter_context(whole_attention())
            compiled: Callable[..., Any] = lower(gm, inputs)
        return compiled

    return backend


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """AOT Autograd has every tensor faked, but a proof by numbers needs real ones, and no gradients."""
    from torch._guards import tracing
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), tracing(None), torch.inference_mode(False), torch.no_grad():
        yield


def compile_call(model: nn.Module, backend: Backend, tally: Tally | None = None) -> Callable[..., Any]:
    """`model`'s call (hooks and all) through torch.compile with `backend`, one graph for each set of shapes.

    Dynamo keeps compiled code, counts recompilations and gives up by code object. This one has a code object of its
    own, so that other instances of the class, and other uses of torch.compile, neither see it nor use it up.

    Args:
        tally: its `runs` are counted by what `backend` returns, `uncaptured` here.
    """
    counted = tally or Tally()

    def eager(*args: Any, **kwargs: Any) -> Any:
        before = counted.runs
        result = model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        counted.uncaptured += counted.runs == before
        return result

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        return uncaptured(*args, **kwargs)

    off: Callable[..., Any] = torch.compiler.disable
    uncaptured = off(eager, recursive=False)  # what the model consists of may still be captured

    code = call.__code__.replace(co_name=f"autokernel_call_{next(_serial)}")
    own = types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
    compiled: Callable[..., Any] = torch.compile(own, backend=backend, dynamic=False)
    return compiled


_serial = itertools.count()


def trace(fn: Callable[..., Tensor], inputs: Mapping[str, Tensor]) -> GraphModule:
    """`fn(**inputs)` as a functional ATen graph whose placeholders come in the order of `inputs`; nothing is computed.

    Raises: whatever `fn` raises on such inputs.
    """
    from functorch.compile import aot_function  # type: ignore[import-untyped]
    from torch._subclasses.fake_tensor import FakeTensorMode

    names = list(inputs)
    graphs: list[GraphModule] = []

    def keep(gm: GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return boxed(gm.forward)

    def positional(*values: Tensor) -> Tensor:
        return fn(**dict(zip(names, values, strict=True)))

    with torch.no_grad(), FakeTensorMode(), _quiet(), whole_attention():
        fakes = [_empty_like(value) for value in inputs.values()]
        aot_function(positional, fw_compiler=keep, inference_compiler=keep)(*fakes)
    return graphs[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Sizes that a function refuses are an answer here, not an error worth a traceback in the log."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _empty_like(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def drop_aliases(gm: GraphModule) -> None:
    """Erase `alias`, `detach` and needless copies between operations: without gradients they mean nothing.

    A dropout that is switched off is a copy in a graph, and nothing in the model as it runs.
    """
    for node in list(gm.graph.nodes):
        same = node.target in (torch.ops.aten.alias.default, torch.ops.aten.detach.default) or _is_needless_copy(node)
        if same and not any(user.op == "output" for user in node.users):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    gm.recompile()


def _is_needless_copy(node: Node) -> bool:
    """Whether nobody else reads what is copied, an operation's own result, and the copy is laid out like it."""
    if node.target is not torch.ops.aten.clone.default:
        return False
    source = node.args[0]
    assert isinstance(source, Node)
    if source.meta["val"].stride() != node.meta["val"].stride():
        return False
    while source.op == "call_function" and _shares_memory(source) and len(source.users) == 1:
        source = source.all_input_nodes[0]
    return source.op == "call_function" and not _shares_memory(source) and len(source.users) == 1


def _shares_memory(node: Node) -> bool:
    """Whether the node's result may lie in the memory of what it is computed from."""
    if node.target is operator.getitem:
        return _shares_memory(node.all_input_nodes[0])
    return not isinstance(node.target, OpOverload) or any(result.alias_info for result in node.target._schema.returns)


def boxed(run: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """AOT Autograd's calling convention: one list, which the callee empties, so that inputs can be freed early."""

    def call(arguments: list[Any]) -> Any:
        values = tuple(arguments)
        arguments.clear()
        return run(*values)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _needs_grad(gm: GraphModule, inputs: Sequence[Any]) -> bool:
    tensors = [*inputs, *gm.parameters()]
    return any(isinstance(value, Tensor) and value.requires_grad for value in tensors)


@contextlib.contextmanager
def _fresh_limits() -> Iterator[None]:
    """Room for many small graphs of one model; the user's own Dynamo settings come back afterwards."""
    import torch._dynamo

    with torch._dynamo.config.patch(recompile_limit=64):
        yield


def _break_reasons() -> list[str]:
    from torch._dynamo.utils import counters

    return [str(reason).strip().splitlines()[0] for reason in counters["graph_break"]]


def _short(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:MAX_REASON]
