"""One training step of models that nobody here wrote, with every starter in its place: are the gradients the same?

    python benchmarks/gradients.py
    python benchmarks/gradients.py --models llama,gpt2 --compiler inductor

Each model of zoo.py is in training mode, dropout included, and draws the same random numbers with and without kernels.
Gradients are compared with those of an fp64 run, the error being relative to a parameter's largest gradient, or to a
thousandth of the model's largest where that is more: some gradients are zero but for rounding. Inductor draws other
random numbers than eager, so that with it models are in evaluation mode.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from zoo import FACTORIES

import autokernel
from autokernel.capture import capture
from autokernel.customop import COMPILERS
from autokernel.errors import AutokernelError
from autokernel.loading import starter_path
from autokernel.match import Matcher
from autokernel.model import LoadedModel
from autokernel.outputs import named_tensors

FLOOR = 1e-3  # of the model's largest gradient
SEED = 0

Gradients = Mapping[str, Tensor]


def row(name: str, compiler: str, folder: Path) -> tuple[str, bool]:
    """A line of the table, and whether the gradients agree."""
    torch._dynamo.reset()
    torch.manual_seed(SEED)
    model, inputs = FACTORIES[name](gpu=False)
    _export(LoadedModel(model=model.eval(), args=(), kwargs=inputs, name=name), folder)
    model.train(compiler == "graph")
    plain, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    wide_inputs = {key: _widened(value) for key, value in inputs.items()}
    own = _gradients(plain, inputs)
    try:
        truth = _gradients(wide, wide_inputs)
    except RuntimeError:  # a model that fixes its own dtypes
        truth = own
    with autokernel.apply(model, folder, compiler=compiler) as applied:
        got = _gradients(model, inputs)
    error, eager = _error(got, truth), _error(own, truth)
    agrees = error <= max(8 * eager, 1e-4)
    calls, left = sum(applied.calls.values()), sum(applied.fallbacks.values())
    return f"| {name} | {calls} | {left} | {len(own)} | {error:.1e} | {eager:.1e} |", agrees and calls > 0


def _export(loaded: LoadedModel, folder: Path) -> None:
    """The starters with the calls that the model makes without gradients, laid out as a run exports its kernels."""
    shutil.rmtree(folder / "optimized", ignore_errors=True)
    matcher = Matcher()
    found = [match for graph in capture(loaded) for match in matcher.find(graph.gm)]
    for op in sorted({match.op for match in found}):
        starter = starter_path(op, "cpp")
        if starter is None:
            continue
        cases = {match.case.key: match.case.to_json() for match in found if match.op == op}
        path = folder / "optimized" / op / "kernel.py"
        path.parent.mkdir(parents=True)
        path.write_text(starter.read_text())
        (path.parent / "meta.json").write_text(json.dumps({"op": op, "cases": list(cases.values()), "used": True}))


def _gradients(model: nn.Module, inputs: Mapping[str, Any]) -> Gradients:
    """Each parameter's gradient of the loss, or of a fixed random weighting of the first output; none is zero."""
    torch.manual_seed(SEED)
    first = next(leaf for _, leaf in named_tensors(model(**inputs), "output"))
    weights = torch.randn(first.shape, generator=torch.Generator().manual_seed(SEED)) if first.dim() else 1.0
    (first * weights).mean().backward()
    return {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}


def _widened(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _error(got: Gradients, truth: Gradients) -> float:
    floor = FLOOR * max(float(value.abs().max()) for value in truth.values())
    return max(
        float((got[name] - value).abs().max()) / max(float(value.abs().max()), floor) for name, value in truth.items()
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table; exit 1 when a model failed or its gradients differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(FACTORIES), help="names of zoo.py")
    parser.add_argument("--compiler", choices=tuple(COMPILERS), default="graph")
    args = parser.parse_args(arguments)
    print("| model | kernels called | ran the original | parameters | error | eager's |\n|---|---|---|---|---|---|")
    good = True
    with tempfile.TemporaryDirectory(prefix="autokernel-gradients-") as folder:
        for name in args.models:
            try:
                line, agrees = row(name, args.compiler, Path(folder))
            except AutokernelError as error:
                line, agrees = f"| {name} | FAILED: {error} |", False
            print(line, flush=True)
            good = good and agrees
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
