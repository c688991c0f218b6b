"""The plan: which ops occur in a model, how much of its time they take, and what a better kernel could gain.

Occurrences come from `match`, times from running the captured graph node by node, headroom from the op's own count of
FLOPs and bytes against measured ceilings. Nothing is optimized here.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch.fx import Node

from autokernel.amdahl import potential, rank
from autokernel.capture import CapturedGraph, capture
from autokernel.errors import ConfigError
from autokernel.loading import ANY_CAPTURED, REFERENCE, STARTER, get_spec, is_captured
from autokernel.match import Match, Matcher
from autokernel.model import LoadedModel
from autokernel.profiler import ModelProfile, attribute_nodes
from autokernel.proof import argument_value
from autokernel.records import Case, PlannedOp, TimedCase
from autokernel.regions.choose import RegionOp, Regions
from autokernel.regions.partition import is_view
from autokernel.roofline import Ceilings, floor_us
from autokernel.spec import Adapter, KernelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The ops worth working on, greatest potential first.

    `wall_us` is one eager forward; `graphs` how many graphs the model was captured as; `notes` say in plain words what
    looked like an op and was refused. `files` are those of captured subgraphs among the ops: texts by op and file name.
    """

    model: str
    device: str
    wall_us: float
    graphs: int
    ops: tuple[PlannedOp, ...]
    notes: tuple[str, ...] = ()
    files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        return asdict(self)

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Plan:
        """Inverse of `to_json`."""
        ops = tuple(PlannedOp.from_json(op) for op in raw["ops"])
        return Plan(**{**raw, "ops": ops, "notes": tuple(raw["notes"])})


def make_plan(
    loaded: LoadedModel,
    *,
    profile: ModelProfile,
    ceilings: Ceilings | None,
    ops: Sequence[str] | None = None,
    backend: str = "cpp",
) -> Plan:
    """Match, time and rank the ops of a model, and what fuses of the rest.

    Args:
        ops: only these; None means all that are known. `graph` stands for the captured subgraphs, and so does the name
            of one: they are what is left when all other ops are found.
        ceilings: None where they are unknown, and then headroom is.
        backend: for which captured subgraphs get a first kernel.

    Raises: ConfigError when the model cannot be captured, an op is unknown, or none of the ops occurs in it.
    """
    for op in ops or ():
        if not is_captured(op):
            get_spec(op)
    graphs = capture(loaded)
    looked = _Looked(ops=ops, regions=Regions(model=loaded.name))
    for graph in graphs:
        looked.look_at(graph)
    chosen = looked.chosen_regions(backend)
    if not looked.found and not chosen:
        raise _nothing_found(loaded, ops, looked.matcher)
    # Node by node a graph may take longer than the eager forward; shares are of the wall time and sum to 1 at most.
    scale = min(1.0, profile.wall_us / looked.total_us)
    specs = [get_spec(op) for op in looked.found] + [item.spec for item in chosen]
    calls = looked.found | {item.spec.op: [(item.case, item.time_us / item.calls)] * item.calls for item in chosen}
    planned = [_planned(spec, calls[spec.op], scale, profile.wall_us, ceilings) for spec in specs]
    return Plan(
        model=loaded.name,
        device=profile.device,
        wall_us=profile.wall_us,
        graphs=len(graphs),
        ops=rank(planned),
        notes=looked.all_notes(),
        files={item.spec.op: {REFERENCE: item.reference, STARTER: item.starter} for item in chosen},
    )


class _Looked:
    """What a model's graphs hold: `found`, the calls by op with their times in us; `total_us`, that of all nodes."""

    def __init__(self, ops: Sequence[str] | None, regions: Regions) -> None:
        self._ops, self._regions = ops, regions
        self._wants_regions = ops is None or any(map(is_captured, ops))
        # Regions are what is left when every op is found, also those that nobody asks for.
        self.matcher = Matcher(ops=None if self._wants_regions else ops)
        self.found: dict[str, list[tuple[Case, float]]] = defaultdict(list)
        self.total_us = 0.0
        self._notes: list[str] = []

    def look_at(self, graph: CapturedGraph) -> None:
        """Find and time the graph's ops and regions."""
        matches, refused = true_matches(self.matcher, graph)
        self._notes += refused
        times = attribute_nodes(graph.gm, graph.inputs)
        self.total_us += sum(times.values()) * graph.calls
        for match in matches:
            if self._ops is None or match.op in self._ops:
                self.found[match.op] += [(match.case, _time_us(match, times))] * graph.calls
        if self._wants_regions:
            taken = {node for match in matches for node in match.nodes if not is_view(node)}
            self._regions.add(graph, taken, times)

    def chosen_regions(self, backend: str) -> list[RegionOp]:
        """The regions that are worth an op, or are named."""
        named = frozenset(self._ops or ()) - {ANY_CAPTURED}
        everything = self._ops is None or ANY_CAPTURED in self._ops
        return self._regions.chosen(self.total_us, backend, only=None if everything else named)

    def all_notes(self) -> tuple[str, ...]:
        """What looked like an op or was a region, and is left alone."""
        looks = [f"looks like {op} and is not: {reason}" for op, reason in dict.fromkeys(self.matcher.refused)]
        return (*self._notes, *looks, *self._regions.notes)


def true_matches(matcher: Matcher, graph: CapturedGraph) -> tuple[list[Match], list[str]]:
    """The graph's matches whose adapters hold on the recorded values, and what the others say."""
    kept: list[Match] = []
    refused: list[str] = []

    @functools.cache  # layers share their masks and tables, and each match is asked for twice
    def value(node: Node) -> Any:
        return argument_value(graph.gm, graph.inputs, node)

    @functools.cache
    def holds(adapter: Adapter, node: Node) -> bool:
        return adapter.holds(value(node))

    def untrue(match: Match) -> str | None:
        adapters = match.spelling.adapters.items()
        return next((name for name, adapter in adapters if not holds(adapter, match.inputs[name])), None)

    for match in matcher.find(graph.gm, prefer=lambda match: untrue(match) is None):
        if name := untrue(match):
            refused.append(f"{match.op} at {match.output.name} is left alone: its {name} is not what the op takes")
        else:
            kept.append(match)
    return kept, list(dict.fromkeys(refused))


def _time_us(match: Match, times: Mapping[str, float]) -> float:
    return sum(times.get(node.name, 0.0) for node in match.nodes if _only_for(match, node))


def _only_for(match: Match, node: Node) -> bool:
    """Whether replacing the match makes the node unnecessary; a view may be used elsewhere too."""
    return node is match.output or all(user in match.nodes for user in node.users)


def _planned(
    spec: KernelSpec, occurrences: Sequence[tuple[Case, float]], scale: float, wall_us: float, ceilings: Ceilings | None
) -> PlannedOp:
    time_us = scale * sum(us for _, us in occurrences)
    calls = Counter(case.key for case, _ in occurrences)
    cases = {case.key: case for case, _ in occurrences}
    floor = _floor_us(spec, [(cases[key], count) for key, count in calls.items()], ceilings)
    headroom = None if floor is None else max(0.0, 1.0 - floor / time_us)
    share = min(1.0, time_us / wall_us)
    return PlannedOp(
        op=spec.op,
        cases=tuple(TimedCase(case=cases[key], calls=count) for key, count in calls.most_common()),
        time_us=time_us,
        share=share,
        headroom=headroom,
        potential=potential(share, headroom),
    )


def _floor_us(spec: KernelSpec, calls: Sequence[tuple[Case, int]], ceilings: Ceilings | None) -> float | None:
    if ceilings is None:
        return None
    total = 0.0
    for case, count in calls:
        floor = floor_us(spec.flops(case), spec.bytes_moved(case), case.dtype, ceilings)
        if floor is None:
            return None
        total += count * floor
    return total


def _nothing_found(loaded: LoadedModel, ops: Sequence[str] | None, matcher: Matcher) -> ConfigError:
    wanted = f"none of {', '.join(ops)} occurs" if ops else "no known op occurs"
    why = "; ".join(f"{op}: {reason}" for op, reason in dict.fromkeys(matcher.refused))
    return ConfigError(
        f"{wanted} in {loaded.name}" + (f" ({why})" if why else ""),
        hint="leave --ops out to see what occurs" if ops else "`autokernel profile` shows where the time goes",
    )
