"""Row ops, a product and an attention in bf16 at the shapes at which `benchmarks/peers_gpu.py` compares them.

No model that anybody would train, but a fair test of the kernels: every call is large, and each op has several shapes.
Needs a GPU. Try it with: `autokernel run examples/ops_gpu.py:build --backend triton --ops rmsnorm,layernorm`.
"""

import torch
import torch.nn.functional as F
from torch import nn

ROWS = ((8192, 8192), (32768, 4096), (4096, 4096))
PRODUCT, ATTENTION = 2048, (2, 32, 2048, 64)
EPS = 1e-6


class Ops(nn.Module):
    """RMSNorm, LayerNorm and softmax of each of three matrices, a square product, a causal attention."""

    def __init__(self) -> None:
        super().__init__()
        widths = sorted({cols for _, cols in ROWS})
        self.weights = nn.ParameterDict({str(cols): nn.Parameter(1 + 0.1 * torch.randn(cols)) for cols in widths})
        self.biases = nn.ParameterDict({str(cols): nn.Parameter(0.1 * torch.randn(cols)) for cols in widths})

    def forward(self, matrices, a, b, q, k, v):
        found = []
        for x in matrices:
            weight, bias = self.weights[str(x.shape[-1])], self.biases[str(x.shape[-1])]
            found += [
                F.rms_norm(x, weight.shape, weight, EPS),
                F.layer_norm(x, weight.shape, weight, bias),
                F.softmax(x, dim=-1),
            ]
        return [*found, a @ b, F.scaled_dot_product_attention(q, k, v, is_causal=True)]


def build():
    """(model, inputs)"""
    torch.manual_seed(0)
    randn = torch.Generator().manual_seed(1)

    def matrix(*shape):
        return torch.randn(*shape, generator=randn, dtype=torch.bfloat16)

    inputs = (
        [matrix(*shape) for shape in ROWS],
        matrix(PRODUCT, PRODUCT),
        matrix(PRODUCT, PRODUCT),
        *(matrix(*ATTENTION) for _ in range(3)),
    )
    return Ops().to(torch.bfloat16).eval(), inputs
