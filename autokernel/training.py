"""Graphs that need gradients: kernels in the forward, and in the backward what the model's author wrote.

AOT Autograd traces forward and backward as one joint graph, in which detached values, `no_grad`, dropout, autocast and
checkpoints have already become what they mean. A kernel takes the place of its nodes in the forward alone; the backward
still uses them, so they are computed anew there from the op's arguments. Then the graph is cut in two. Which kernels
there are is not known here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from autokernel.attention import whole_attention_in_training, whole_layouts
from autokernel.biases import split_biases
from autokernel.capture import Backend, GraphCompiler, boxed, drop_aliases, real_tensors
from autokernel.nodes import ancestors

Place = Callable[[GraphModule, set[Node]], set[Node]]
"""A joint graph and the nodes of its forward -> the nodes whose place kernels have taken there."""

Partition = Callable[..., tuple[GraphModule, GraphModule]]
"""How to cut a joint graph, as AOT Autograd asks for it."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What compiles a forward, a backward, and a graph that has turned out to need no gradients after all."""

    forward: GraphCompiler
    backward: GraphCompiler
    inference: GraphCompiler


class NothingTakenError(Exception):
    """No kernel has a place in the graph, so that it is better left to whoever compiles such graphs."""


class _AttentionLeftError(Exception):
    def __init__(self, layouts: set[Hashable]) -> None:
        super().__init__(layouts)
        self.layouts = layouts


def compile_training(
    gm: GraphModule, inputs: Sequence[Any], *, place: Place, partition: Partition, parts: Parts
) -> Callable[..., Any]:
    """A graph that Dynamo captured, as one call with gradients.

    Raises: NothingTakenError when `place` finds none; whatever AOT Autograd raises on a graph that it cannot trace.
    """
    apart: set[Hashable] = set()
    while True:
        try:
            return _compile(gm, inputs, apart, place, partition, parts)
        except _AttentionLeftError as left:
            if left.layouts <= apart:
                raise NothingTakenError from None
            apart |= left.layouts  # no kernel took these: PyTorch keeps more than their arguments for the backward


def _compile(
    gm: GraphModule,
    inputs: Sequence[Any],
    apart: set[Hashable],
    place: Place,
    partition: Partition,
    parts: Parts,
) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd

    whole = contextlib.ExitStack()

    def cut(
        joint: GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **more: Any
    ) -> tuple[GraphModule, GraphModule]:
        whole.close()  # the graph is traced; whoever compiles it on may take attention apart
        with real_tensors():
            _take(joint, num_fwd_outputs, place, apart)
        return partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **more)

    def compiler(compile_part: GraphCompiler) -> Backend:
        def run(part: GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
            whole.close()
            with real_tensors():
                return boxed(compile_part(part))

        return run

    def inference(part: GraphModule) -> Callable[..., Any]:
        drop_aliases(part)
        split_biases(part)
        return parts.inference(part)

    with whole:
        whole.enter_context(whole_attention_in_training(apart))
        lower = aot_autograd(
            fw_compiler=compiler(parts.forward),
            bw_compiler=compiler(parts.backward),
            inference_compiler=compiler(inference),
            partition_fn=cut,
        )
        compiled: Callable[..., Any] = lower(gm, inputs)
    return compiled


def _take(joint: GraphModule, outputs: int, place: Place, apart: set[Hashable]) -> None:
    drop_aliases(joint)
    split_biases(joint)
    taken = place(joint, _forward_nodes(joint, outputs))
    if left := whole_layouts(joint.graph) - apart:
        raise _AttentionLeftError(left)
    if not taken:
        raise NothingTakenError
    _move_to_backward(joint, taken, _forward_nodes(joint, outputs))
    joint.graph.lint()
    joint.recompile()


def _forward_nodes(joint: GraphModule, outputs: int) -> set[Node]:
    """What the forward's results are computed from, and the node that returns them."""
    end = joint.graph.output_node()
    (returned,) = end.args
    assert isinstance(returned, (list, tuple))
    found: set[Node] = {end}
    for node in returned[:outputs]:
        if isinstance(node, Node):
            found |= ancestors(node)
    return found


def _move_to_backward(joint: GraphModule, taken: set[Node], needed: set[Node]) -> None:
    """Put the nodes whose place was taken, and what only they lead to, behind the last node of the forward.

    AOT Autograd's partitioner goes by their place and their tag, and would keep their values from the forward.
    """
    moved: list[Node] = []
    gone: set[Node] = set()
    for node in joint.graph.nodes:
        left = _of_forward(node) and node.op == "call_function" and node not in needed
        if left and (node in taken or any(source in gone for source in node.all_input_nodes)):
            moved.append(node)
            gone.add(node)
    last = [node for node in joint.graph.nodes if node not in gone and (_of_forward(node) or node.op == "placeholder")]
    at = last[-1]
    for node in moved:
        at.append(node)
        node.meta = {**node.meta, _TAG: "is_backward"}
        at = node


def _of_forward(node: Node) -> bool:
    return bool(node.meta.get(_TAG) == "is_forward")


_TAG = "partitioner_tag"


def keep_all(joint: GraphModule, joint_inputs: Any, **more: Any) -> tuple[GraphModule, GraphModule]:
    """Cut so that the backward gets what eager would have kept for it."""
    from torch._functorch.partitioners import default_partition

    parts: tuple[GraphModule, GraphModule] = default_partition(joint, joint_inputs, **more)
    return parts


def keep_little(joint: GraphModule, joint_inputs: Any, **more: Any) -> tuple[GraphModule, GraphModule]:
    """Cut where least memory is kept, as torch.compile does: what is cheap is computed anew in the backward."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    parts: tuple[GraphModule, GraphModule] = min_cut_rematerialization_partition(joint, joint_inputs, **more)
    return parts
