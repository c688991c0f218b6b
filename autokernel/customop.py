"""The places of kernels as operators of torch.library, so that Inductor can compile the graph around them.

Two operators serve every place of every model; which place is meant is their first argument. A place's name holds a
digest of all that its fake result depends on, since Inductor keeps compiled graphs on disk by their text: a graph
that it finds again there calls a place of equal inputs and results, whichever process made it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from autokernel.errors import ConfigError
from autokernel.kerneltext import text_digest
from autokernel.replace import Lowered, Way
from autokernel.sites import Check, Site

# `define` and `impl`, not `custom_op`: its wrappers make a call take 25 us of the host instead of 7.
_library: Any = cast(Any, torch.library).Library("autokernel", "DEF")
_library.define(
    "call(str site, Tensor[] spelled, Tensor[] own, Tensor[] holds) -> Tensor",
    tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag),
)
_library.define("holds(str check, Tensor value) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))

_named: WeakValueDictionary[str, Site | Check] = WeakValueDictionary()


def call(name: str, spelled: Sequence[Tensor], own: Sequence[Tensor], holds: Sequence[Tensor]) -> Tensor:
    """The op's result at a place: by the kernel on `own`, or as the model wrote it, from `spelled`.

    The latter where `own` is empty, as a constant failed its check, or one of `holds` is false.
    """
    site = _named[name]
    assert isinstance(site, Site)
    return site.laid_out(site.run(spelled, own if own and all(bool(held) for held in holds) else None))


def holds(name: str, value: Tensor) -> Tensor:
    """Whether an adapter's condition holds for `value`, as a tensor on the host, where places read it."""
    check = _named[name]
    assert isinstance(check, Check)
    return torch.tensor(check.holds(value), device="cpu")


def _fake_call(name: str, spelled: Sequence[Tensor], own: Sequence[Tensor], holds: Sequence[Tensor]) -> Tensor:
    site = _named[name]
    assert isinstance(site, Site)
    return site.empty()


def _fake_holds(name: str, value: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.bool, device="cpu")


for _name, _real, _fake in (("call", call, _fake_call), ("holds", holds, _fake_holds)):
    _library.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autokernel::{_name}", _fake, lib=_library)


def lower(gm: GraphModule, *, patches: Mapping[str, Any] | None = None) -> Lowered:
    """Turn the places and checks of `gm` into operators, in place, and let Inductor compile it for its inputs.

    Args:
        patches: changes to Inductor's settings, as torch.compile's `options`.
    """
    kept: list[Site | Check] = []
    checked = {node: _lower_check(gm.graph, node, kept) for node in gm.graph.nodes if isinstance(node.target, Check)}
    for node in list(gm.graph.nodes):
        if isinstance(node.target, Site):
            _lower_site(gm.graph, node, checked, kept)
    for node in checked:
        gm.graph.erase_node(node)
    gm.graph.lint()
    gm.recompile()
    inputs = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    return _Lowered(inductor(gm, inputs, patches), kept)


def _lower_check(graph: Graph, node: Node, kept: list[Site | Check]) -> tuple[Node, Node]:
    """The adapted argument, and whether it may be used."""
    check, value = node.target, node.args[0]
    assert isinstance(check, Check)
    assert isinstance(value, Node)
    with graph.inserting_before(node):
        held = graph.call_function(torch.ops.autokernel.holds.default, (_keep(check, check.text, kept), value))
        return (graph.call_function(check.back, (value,)) if check.back else value), held


def _lower_site(graph: Graph, node: Node, checked: Mapping[Any, tuple[Node, Node]], kept: list[Site | Check]) -> None:
    site = node.target
    assert isinstance(site, Site)
    spelled, adapted = site.split(node.args)
    holds = [checked[value][1] for value in adapted if value in checked]
    own = [checked[value][0] if value in checked else value for value in adapted[: site.arity]]
    if any(value is None for value in adapted):
        own = []
    arguments = (_keep(site, site.text, kept), list(spelled), own, holds)
    with graph.inserting_before(node):
        called = graph.call_function(torch.ops.autokernel.call.default, arguments)
    called.meta = dict(node.meta)
    node.replace_all_uses_with(called)
    graph.erase_node(node)


def _keep(item: Site | Check, text: str, kept: list[Site | Check]) -> str:
    """A name that no other living place has; `kept` must outlive the graph that holds it."""
    stem = f"{item.__name__}_{text_digest(text)}"
    name = next(name for n in itertools.count() if (name := f"{stem}_{n}") not in _named)
    _named[name] = item
    kept.append(item)
    return name


def inductor(gm: GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """`gm` compiled by Inductor, for training too; slow to import, hence here."""
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(gm, list(inputs), config_patches=dict(patches or {}))
    return cast(Callable[..., Any], compiled)


class _Lowered:
    """A compiled graph, and what it calls by name. Dynamo may keep it for the life of the process: hence `release`."""

    def __init__(self, run: Callable[..., Any], kept: Sequence[Site | Check]) -> None:
        self._run: Callable[..., Any] | None = run
        self._kept = kept

    def __call__(self, *inputs: Any) -> Any:
        assert self._run is not None, "the kernels were taken out of the model"
        return self._run(*inputs)

    def release(self) -> None:
        for name in [name for name, item in _named.items() if any(item is mine for mine in self._kept)]:
            del _named[name]
        self._run, self._kept = None, ()


COMPILERS: Mapping[str, Way] = {
    "graph": Way(),
    "inductor": Way(lower=lower),
    "cudagraph": Way(record=True),
    "inductor-cudagraph": Way(lower=lower, record=True),
}
"""What runs a graph with kernels in it: PyTorch, node by node, or what Inductor makes of it; launched one by one, or
recorded and replayed."""


def way_of(compiler: str) -> Way:
    """What `Replacer` is to do with a graph. Raises: ConfigError for a compiler that is not among `COMPILERS`."""
    try:
        return COMPILERS[compiler]
    except KeyError:
        raise ConfigError(f"no compiler {compiler!r}", hint=f"one of: {', '.join(COMPILERS)}")
