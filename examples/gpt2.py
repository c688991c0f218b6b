"""A small GPT-2-style decoder: LayerNorm, learned positions, masked attention, the tanh form of GELU; returns logits.

Random weights (a fixed seed), no downloads. Try it with: `autokernel run examples/gpt2.py`.
"""

import math

import torch
from torch import Tensor, nn

VOCAB, HIDDEN, LAYERS, HEADS, SEQUENCE = 16384, 384, 4, 6, 256


def gelu_new(x: Tensor) -> Tensor:
    """GELU by its tanh approximation, spelled out."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        future = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        heads = (batch, sequence, HEADS, HIDDEN // HEADS)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(x).split(HIDDEN, dim=-1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(HIDDEN // HEADS)
        scores = scores.masked_fill(self.future[:sequence, :sequence], torch.finfo(scores.dtype).min)
        context = scores.softmax(dim=-1) @ v
        return self.out(context.transpose(1, 2).reshape(batch, sequence, HIDDEN))


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = Attention()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.down(gelu_new(self.up(self.ln_2(x))))


class Model(nn.Module):
    """Token ids [batch, seq] in, logits [batch, seq, vocab] out."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        for name, parameter in self.named_parameters():
            if "ln_" in name:  # as after training: scale and shift matter
                nn.init.normal_(parameter, mean=1.0 if name.endswith("weight") else 0.0, std=0.1)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        self.lm_head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def get_inputs():
    return [torch.randint(VOCAB, (1, SEQUENCE), generator=torch.Generator().manual_seed(1))]


def get_init_inputs():
    return []
