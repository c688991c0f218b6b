"""One training step of models that nobody here wrote, with every starter in its place: are the gradients the same?

    python benchmarks/gradients.py
    python benchmarks/gradients.py --models llama,gpt2 --compiler inductor
    python benchmarks/gradients.py --models llama --backend triton --sizes gpu --seconds 10

Each model of zoo.py is in training mode, dropout included, and draws the same random numbers with and without kernels.
Gradients are compared with those of an fp64 run, the error being relative to a parameter's largest gradient, or to a
thousandth of the model's largest where that is more: some gradients are zero but for rounding. Inductor draws other
random numbers than eager, so that with it models are in evaluation mode. `--sizes gpu` is for bf16 models of a few
hundred million parameters. `--seconds` also times the step, forward and backward, with and without kernels in turns.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from zoo import FACTORIES

import autokernel
from autokernel.capture import capture
from autokernel.customop import COMPILERS
from autokernel.errors import AutokernelError
from autokernel.interleave import MOST_BLOCKS, interleave
from autokernel.loading import starter_path
from autokernel.match import Matcher
from autokernel.model import LoadedModel, load_model
from autokernel.outputs import named_tensors
from autokernel.profiler import model_device
from autokernel.settings import BACKENDS, device_of

ZOO = Path(__file__).parent / "zoo.py"
FLOOR = 1e-3  # of the model's largest gradient
SEED = 0

Gradients = Mapping[str, Tensor]


def row(name: str, args: argparse.Namespace, folder: Path) -> tuple[str, bool]:
    """A line of the table, and whether the gradients agree."""
    torch._dynamo.reset()
    loaded = load_model(
        f"{ZOO}:{name}{'_gpu' if args.sizes == 'gpu' else ''}",
        device=device_of(args.backend),
        dtype="bf16" if args.sizes == "gpu" else None,
        seed=SEED,
    )
    model, inputs = loaded.model, loaded.kwargs
    _export(loaded, args.backend, folder)
    model.train(args.compiler == "graph")
    plain = copy.deepcopy(model)
    own = _gradients(plain, inputs)
    truth = _truth(model, inputs) or own
    with autokernel.apply(model, folder, compiler=args.compiler) as applied:
        got = _gradients(model, inputs)
        calls, left = sum(applied.calls.values()), sum(applied.fallbacks.values())
        speed = _step_speed(plain, loaded, args.seconds) if args.seconds else ""
    error, eager = _error(got, truth), _error(own, truth)
    agrees = error <= max(8 * eager, 1e-4)
    return f"| {name} | {calls} | {left} | {len(own)} | {error:.1e} | {eager:.1e} |{speed}", agrees and calls > 0


def _truth(model: nn.Module, inputs: Mapping[str, Any]) -> Gradients | None:
    """The gradients in fp64; None for a model that fixes its own dtypes."""
    try:
        wide = copy.deepcopy(model).double()
        return _gradients(wide, {key: _widened(value) for key, value in inputs.items()})
    except RuntimeError:
        return None


def _step_speed(plain: nn.Module, loaded: LoadedModel, seconds: float) -> str:
    """Two cells: milliseconds of a step without kernels, and of one with them; medians of steps that take turns."""

    def step(model: nn.Module) -> Callable[..., Gradients]:
        return torch.enable_grad()(lambda **inputs: _gradients(model, inputs))

    runs = {"plain": step(plain), "kernels": step(loaded.model)}
    times = interleave(runs, loaded, model_device(loaded), seconds, MOST_BLOCKS)
    return "".join(f" {statistics.median(times[name]) / 1e3:.2f} |" for name in runs)


def _export(loaded: LoadedModel, backend: str, folder: Path) -> None:
    """The starters with the calls that the model makes without gradients, laid out as a run exports its kernels."""
    shutil.rmtree(folder / "optimized", ignore_errors=True)
    matcher = Matcher()
    found = [match for graph in capture(loaded) for match in matcher.find(graph.gm)]
    for op in sorted({match.op for match in found}):
        starter = starter_path(op, backend)
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
    model.zero_grad()
    first = next(leaf for _, leaf in named_tensors(model(**inputs), "output"))
    if first.dim():
        generator = torch.Generator(first.device).manual_seed(SEED)
        first = first * torch.randn(first.shape, generator=generator, device=first.device)
    first.mean().backward()
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
    parser.add_argument("--backend", choices=BACKENDS, default="cpp", help="of the starters")
    parser.add_argument("--sizes", choices=("small", "gpu"), default="small")
    parser.add_argument("--seconds", type=float, default=0.0, help="for timing the step; 0 leaves it out")
    args = parser.parse_args(arguments)
    columns = ["model", "kernels called", "ran the original", "parameters", "error", "eager's"]
    columns += ["step in ms", "with kernels"] if args.seconds else []
    print("| " + " | ".join(columns) + " |" + "\n" + "|---" * len(columns) + "|")
    good = True
    with tempfile.TemporaryDirectory(prefix="autokernel-gradients-") as folder:
        for name in args.models:
            try:
                line, agrees = row(name, args, Path(folder))
            except AutokernelError as error:
                line, agrees = f"| {name} | FAILED: {error} |", False
            print(line, flush=True)
            good = good and agrees
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
