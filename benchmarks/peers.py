"""Who competes with the starters on each op: PyTorch's own ways, torch.compile, cuDNN, Liger-Kernel and QuACK.

A contestant is a callable of the op's inputs. What is not installed, or does not support the op, is left out.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from autokernel.loading import get_spec, load_file, starter_path
from autokernel.spec import Inputs

Contestant = Callable[[], Any]
OURS = ("triton", "cuda")


def contestants(op: str, inputs: Inputs, *, compiled: bool) -> dict[str, Contestant]:
    """Everyone who can compute `op` on `inputs`, by name; ours are called after their backends."""
    spec = get_spec(op)
    found: dict[str, Contestant] = {name: _call(fn, inputs) for name, fn in spec.baselines.items()}
    if compiled:
        torch._dynamo.reset()
        # As a user gets it at its best without CUDA graphs, which every contestant could be put into.
        fn = torch.compile(spec.baselines["eager"], mode="max-autotune-no-cudagraphs", dynamic=False)
        found["torch.compile"] = _call(fn, inputs)
    for maker in (_attention, _liger, _quack):
        found.update(maker(op, inputs))
    for backend in OURS:
        if path := starter_path(op, backend):
            found[backend] = _call(load_file(path, f"peers_{backend}_{op}").kernel_fn, inputs)
    return found


def _call(fn: Callable[..., Any], inputs: Inputs) -> Contestant:
    arguments = tuple(inputs.values())
    return lambda: fn(*arguments)


def _installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception:  # a package that is broken here is as good as missing
        return None


def _attention(op: str, inputs: Inputs) -> Mapping[str, Contestant]:
    """PyTorch's ways to attend, each by itself: left to choose, it takes the first that can."""
    if "attention" not in op:
        return {}
    q, k, v, mask, causal = (inputs.get(name) for name in ("q", "k", "v", "mask", "causal"))
    grouped = q.shape[1] != k.shape[1]

    def attend(way: SDPBackend) -> Tensor:
        with sdpa_kernel(way):
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=bool(causal), enable_gqa=grouped)

    ways = {"cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
    found: dict[str, Contestant] = {name: functools.partial(attend, way) for name, way in ways.items()}
    if mask is not None:
        found["flex"] = _flex(q, k, v, mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
    return found


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Contestant:
    from torch.nn.attention.flex_attention import flex_attention

    def masked(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        at = mask[batch, head, row, column]
        return torch.where(at, score, -math.inf) if mask.dtype is torch.bool else score + at

    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, score_mod=masked, enable_gqa=q.shape[1] != k.shape[1])


def _liger(op: str, inputs: Inputs) -> Mapping[str, Contestant]:
    functional = _installed("liger_kernel.transformers.functional")
    if functional is None:
        return {}
    given = tuple(inputs.values())
    if op == "rmsnorm":
        return {"liger": lambda: functional.liger_rms_norm(*given, in_place=False)}
    if op == "layernorm":
        return {"liger": lambda: functional.liger_layer_norm(*given)}
    if op == "softmax":
        return {"liger": lambda: functional.liger_softmax(given[0])}
    if op == "cross_entropy":
        return {"liger": lambda: functional.liger_cross_entropy(given[0], given[1], reduction="mean")}
    return {}


def _quack(op: str, inputs: Inputs) -> Mapping[str, Contestant]:
    if _installed("quack") is None:
        return {}
    given = tuple(inputs.values())
    if op == "matmul":
        interface = importlib.import_module("quack.gemm_interface")
        return {"quack": lambda: interface.gemm(given[0], given[1])}
    if op == "softmax":
        softmax = importlib.import_module("quack.softmax")
        return {"quack": lambda: softmax.softmax_fwd(given[0])}
    if op == "rmsnorm":
        norms = importlib.import_module("quack.rmsnorm")
        return {"quack": lambda: norms.rmsnorm_fwd(given[0], given[1], eps=given[2])[0]}
    if op == "layernorm":
        norms = importlib.import_module("quack.rmsnorm")
        weight, bias = given[1].float(), given[2].float()  # it takes nothing else
        return {"quack": lambda: norms.layernorm_fwd(given[0], weight, bias, eps=given[3])}
    if op == "cross_entropy":
        losses = importlib.import_module("quack.cross_entropy")
        return {"quack": lambda: losses.cross_entropy_fwd(given[0], given[1]).mean()}
    return {}


def relative_error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| in fp64, over what is finite in got's dtype; infinite when got is not finite there."""
    finite = want.to(got.dtype).isfinite()
    got, want = got[finite].double(), want[finite].double()
    error = float((got - want).norm() / want.norm().clamp_min(1e-30))
    return error if math.isfinite(error) else math.inf
