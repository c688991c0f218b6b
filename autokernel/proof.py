"""Proof by numbers that a piece of a captured graph computes an op: both run on random inputs and must agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autokernel.judge.compare import Truth, mismatch, native_error
from autokernel.nodes import ancestors, node_value
from autokernel.records import Case
from autokernel.spec import Inputs, KernelSpec, Spelling, describe, place, upcast

PROOF_SEED = 20250719
MAX_FP64_FLOPS = 2e9
"""Above this much work the oracle runs in fp32: a proof may take a second, not a minute."""

MAX_ROWS = 256
"""Rows of the result that are compared: what is another op differs in all of them."""


def disproof(
    spec: KernelSpec,
    spelling: Spelling,
    case: Case,
    inputs: Mapping[str, Node],
    nodes: Sequence[Node],
    gm: GraphModule,
) -> str | None:
    """None when `nodes` compute the op on `case`, else one line that says how they differ.

    Inputs are the op's own random ones (parameters, masks and scales all matter); the truth is the oracle in fp64.
    """
    device = str(nodes[-1].meta["val"].device)
    given = _shared(spec.make_inputs(case, PROOF_SEED, device), spelling, inputs)
    with torch.no_grad():
        environment = {node: _spelled(spelling, name, node, given) for name, node in inputs.items()}
        actual = run_nodes(gm, nodes, environment)
        wide = torch.float64 if spec.flops(case) <= MAX_FP64_FLOPS else torch.float32
        truth = spec.oracle(**upcast(given, wide)).to(torch.float64)
        if actual.shape != truth.shape:
            return f"result of shape {tuple(actual.shape)}, the op's has {tuple(truth.shape)}"
        actual, truth, own = (_some_rows(value) for value in (actual, truth, spec.oracle(**given)))
        proof = Truth(value=truth, native_error=native_error(own, truth))
    return mismatch(actual, proof, case.dtype, spec.tolerances[case.dtype])


def _shared(given: Inputs, spelling: Spelling, inputs: Mapping[str, Node]) -> Inputs:
    """The same values for arguments that are one node of the graph, as in attention of a tensor with itself."""
    first: dict[Node, str] = {}
    plain = [name for name in inputs if name in given and name not in spelling.adapters]
    return given | {name: given[first.setdefault(inputs[name], name)] for name in plain}


def _some_rows(value: Tensor) -> Tensor:
    """Up to MAX_ROWS rows of the last dimension, spread over the whole."""
    if value.dim() < 2:
        return value
    rows = value.reshape(-1, value.shape[-1])
    return rows[:: -(-rows.shape[0] // MAX_ROWS)] if rows.shape[0] > MAX_ROWS else rows


def _spelled(spelling: Spelling, name: str, node: Node, given: Inputs) -> Tensor:
    """The spelling's argument with the values of the op's inputs and the strides that the graph recorded."""
    adapter = spelling.adapters.get(name)
    if adapter is None:
        value: Tensor = given[name]
        return value
    recorded = node.meta["val"]
    return place(adapter.spell(given, tuple(recorded.shape)), describe(recorded), str(recorded.device))


def run_nodes(gm: GraphModule, nodes: Sequence[Node], environment: Mapping[Node, Any]) -> Any:
    """Value of the last of `nodes`, run in order from the values in `environment`."""
    values = dict(environment)
    for node in nodes:
        values[node] = node_value(gm, node, values)
    return values[nodes[-1]]


def argument_value(gm: GraphModule, given: Sequence[Any], node: Node) -> Any:
    """Value of one node when the graph is `given` these inputs; only what it depends on is run."""
    needed = ancestors(node)
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    environment = dict(zip(placeholders, given, strict=True))
    order = [n for n in gm.graph.nodes if n in needed and n.op != "placeholder"]
    with torch.no_grad():
        return run_nodes(gm, order, environment) if order else environment[node]
