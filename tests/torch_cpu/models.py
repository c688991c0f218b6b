"""Small models with random weights, and their inputs, for the tests of matching and re-insertion."""

import torch
import torch.nn.functional as F
from torch import nn

from autokernel.model import LoadedModel

VOCABULARY, HIDDEN, LAYERS, SEQUENCE = 96, 64, 2, 24


class Norm(nn.Module):
    """Llama's RMSNorm; `offset` adds to the weight (Gemma's is 1 + weight), `squared` False is another op."""

    def __init__(self, eps=1e-5, offset=0.0, squared=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN))
        self.eps, self.offset, self.squared = eps, offset, squared

    def forward(self, x):
        wide = x.to(torch.float32)
        mean = (wide.pow(2) if self.squared else wide.pow(2).add(wide)).mean(-1, keepdim=True)
        normed = (wide * torch.rsqrt(mean + self.eps)).to(x.dtype)
        return normed * (self.weight + self.offset) if self.offset else self.weight * normed


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = Norm(), Norm()
        self.qkv = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x, cos, sin):
        batch, sequence, _ = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).split((HIDDEN, HIDDEN // 2, HIDDEN // 2), dim=-1)
        q, k, v = (t.view(batch, sequence, -1, 16).transpose(1, 2) for t in (q, k, v))
        q, k = (t * cos + rotate_half(t) * sin for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, sequence, -1))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class ToyLlama(nn.Module):
    """Two layers, tied embeddings, rotary tables as buffers; logits out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm()
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.lm_head.weight = self.embed.weight
        angles = torch.outer(torch.arange(64.0), 1e4 ** (-torch.arange(8) / 8))
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin(), persistent=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]])
        return self.lm_head(self.norm(x))


def loaded(model, *args, dtype=torch.float32):
    return LoadedModel(model=model.to(dtype).eval(), args=args, kwargs={}, name=type(model).__name__)


def tokens(sequence=SEQUENCE, batch=1):
    return torch.randint(VOCABULARY, (batch, sequence), generator=torch.Generator().manual_seed(1))


def toy(dtype=torch.float32):
    return loaded(ToyLlama(), tokens(), dtype=dtype)
