"""Puts kernels in the place of matched ops in the graphs that torch.compile's front end captures, and counts them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from weakref import WeakSet

from torch.fx import GraphModule, Node

from autokernel.biases import add_biases_in_sites, join_biases, put_products_in_sites
from autokernel.capture import MAX_REASON, Backend, Tally, as_captured, inference_backend
from autokernel.cudagraph import Recorded, conditions, unrecordable
from autokernel.fold import fold_constants, share_repeated
from autokernel.match import Match, Matcher
from autokernel.sites import Replacement, Site, insert
from autokernel.training import NothingTakenError, Parts, compile_training, keep_all, keep_little

_log = logging.getLogger(__name__)


class Lowered(Protocol):
    """What runs a graph with kernels in it in PyTorch's stead, until it is released."""

    def __call__(self, *inputs: Any) -> Any: ...
    def release(self) -> None: ...


Lower = Callable[[GraphModule], Lowered]


@dataclass(frozen=True, kw_only=True)
class Way:
    """What runs a graph with kernels in it: PyTorch node by node, or what `lower` makes of it.

    With `record` that is replayed as a CUDA graph where it needs no gradients and can be recorded.
    """

    lower: Lower | None = None
    record: bool = False


@dataclass(kw_only=True)
class Replacer:
    """A torch.compile backend's state: the kernels by op, each for other calls, and how the graphs it saw were treated.

    `way` is also that of the backward of a graph that needs gradients. Such a graph in which no kernel has a place is
    left to `train`. `record` may be changed at any time.
    """

    replacements: Mapping[str, Sequence[Replacement]]
    way: Way = Way()
    train: Backend = as_captured
    record: bool = field(init=False)
    graphs: int = 0
    training_graphs: int = 0
    tally: Tally = field(default_factory=Tally)
    matcher: Matcher = field(init=False)
    _lowered: WeakSet[Lowered] = field(default_factory=WeakSet, init=False, repr=False)
    _recorded: WeakSet[Recorded] = field(default_factory=WeakSet, init=False, repr=False)
    _unrecorded: list[str] = field(default_factory=list, init=False, repr=False)
    _said: set[str] = field(default_factory=set, init=False, repr=False)

    def __post_init__(self) -> None:
        self.matcher = Matcher(ops=tuple(self.replacements))
        self.record = self.way.record

    @classmethod
    def of(cls, kernels: Sequence[Replacement], way: Way = Way(), train: Backend = as_captured) -> Replacer:
        """One with these kernels; of two for one call of an op, the first is taken."""
        by_op = {item.op: [other for other in kernels if other.op == item.op] for item in kernels}
        return cls(replacements=by_op, way=way, train=train)

    @property
    def calls(self) -> dict[str, int]:
        """How often each op's kernel has run."""
        return {op: sum(item.calls for item in items) for op, items in self.replacements.items()}

    @property
    def fallbacks(self) -> dict[str, int]:
        """How often an op ran as the model wrote it, because the call was not among those verified."""
        return {op: sum(item.fallbacks for item in items) for op, items in self.replacements.items()}

    @property
    def unrecorded(self) -> list[str]:
        """Why graphs that have run are not recorded, or could not be."""
        return [*self._unrecorded, *(item.refused for item in self._recorded if item.refused)]

    @property
    def backend(self) -> Backend:
        """What to give to `compile_call`."""
        return inference_backend(self._compile, train=self._train)

    def _compile(self, gm: GraphModule) -> Callable[..., Any]:
        self.graphs += 1
        _, left = self._place(gm)
        self._tidy(gm)
        why, asked = unrecordable(gm), conditions(gm)
        run = self._lower(gm)
        if why is None:
            counters = [item for items in self.replacements.values() for item in items]
            self._recorded.add(recorded := Recorded(run, counters, lambda: self.record, asked))
            run = recorded
        else:
            self._unrecorded.append(why)
        return self._counting(run, left)

    def _place(self, gm: GraphModule, within: set[Node] | None = None) -> tuple[set[Node], Counter[str]]:
        """Put kernels into the graph, or those nodes of it; the nodes that they stand for, and what was left by op."""
        taken: set[Node] = set()
        left: Counter[str] = Counter()
        adapted: dict[tuple[int, Node], Node] = {}
        moved: dict[Node, Node] = {}
        for match in self.matcher.find(gm, within, prefer=lambda match: self._kernel_for(match) is not None):
            replacement = self._kernel_for(match)
            if replacement:
                inputs = {name: moved.get(node, node) for name, node in match.inputs.items()}
                moved[match.output] = insert(gm.graph, replace(match, inputs=inputs), replacement, adapted)
                taken |= set(match.nodes)
            else:
                left[match.op] += 1
        join_biases(gm)
        return taken, left

    def _kernel_for(self, match: Match) -> Replacement | None:
        return next((item for item in self.replacements[match.op] if item.verified(match.case)), None)

    def _finish(self, gm: GraphModule, left: Mapping[str, int]) -> Callable[..., Any]:
        """What runs a part of a graph that needs gradients."""
        self._tidy(gm)
        return self._counting(self._lower(gm), left)

    def _lower(self, gm: GraphModule) -> Callable[..., Any]:
        if self.way.lower is None:
            run: Callable[..., Any] = gm.forward
            return run
        self._lowered.add(lowered := self.way.lower(gm))
        return lowered

    def _finish_backward(self, gm: GraphModule) -> Callable[..., Any]:
        """As `_finish`; it stays after `release`, as `undo` may come before the backward, unless kernels are in it."""
        if any(isinstance(node.target, Site) for node in gm.graph.nodes):  # of a checkpoint, which runs them again
            return self._finish(gm, {})
        self._tidy(gm)
        return self.way.lower(gm) if self.way.lower else gm.forward

    def _tidy(self, gm: GraphModule) -> None:
        if self.way.lower is None:  # an operator of its own takes no bias along
            add_biases_in_sites(gm)
            put_products_in_sites(gm)
        fold_constants(gm)
        share_repeated(gm)
        gm.graph.lint()

    def forget_recordings(self) -> None:
        """Free the memory of CUDA graphs; what is called again is recorded again."""
        for item in self._recorded:
            item.release()

    def release(self) -> None:
        """Free what the compiled graphs hold; they cannot be called any more."""
        for item in (*self._lowered, *self._recorded):
            item.release()

    def _counting(self, run: Callable[..., Any], left: Mapping[str, int]) -> Callable[..., Any]:
        def counted(*inputs: Any) -> Any:
            self.tally.runs += 1
            for op, count in left.items():
                first, *_ = self.replacements[op]
                if first.enabled:
                    first.fallbacks += count
            return run(*inputs)

        return counted

    def _train(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        left: Counter[str] = Counter()
        try:
            return self._compile_training(gm, inputs, left)
        except NothingTakenError:
            why = "no kernel has a place in it"
        except Exception as error:  # what AOT Autograd and Inductor refuse has no common class
            why = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:MAX_REASON]}"
        if why not in self._said:
            _log.warning("a graph that needs gradients runs without kernels: %s", why)
        self._said.add(why)
        self.training_graphs += 1
        return self._counting(self.train(gm, inputs), left)

    def _compile_training(self, gm: GraphModule, inputs: Sequence[Any], left: Counter[str]) -> Callable[..., Any]:
        def place(joint: GraphModule, within: set[Node]) -> set[Node]:
            nonlocal left
            taken, missed = self._place(joint, within)
            left |= missed  # of a first attempt, too: attention that no kernel takes is taken apart in the next
            return taken

        parts = Parts(
            forward=lambda part: self._finish(part, left), backward=self._finish_backward, inference=self._compile
        )
        partition = keep_little if self.way.lower else keep_all
        compiled = compile_training(gm, inputs, place=place, partition=partition, parts=parts)
        self.graphs += 1
        return compiled
