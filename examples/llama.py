"""A small Llama-style decoder with its training loss, written the way model code usually is: plain PyTorch, eager.

RMSNorm is decomposed and computed in fp32, rotary embeddings use `rotate_half`, attention is grouped-query. Random
weights (a fixed seed), no downloads. Try it with: `autokernel run examples/llama.py`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100  # the target of a position that has no next token


@dataclass(frozen=True)
class Config:
    """Sizes of the decoder; one forward takes a fraction of a second on two CPU cores."""

    vocab: int = 32000
    hidden: int = 256
    intermediate: int = 688
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    sequence: int = 512
    eps: float = 1e-6
    rope_theta: float = 10000.0
    tied: bool = True
    seed: int = 0


class RMSNorm(nn.Module):
    """`x / rms(x) * weight`, the mean of squares taken in fp32."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(dtype)


def rotate_half(x: Tensor) -> Tensor:
    """The second half of the last dimension, negated, before the first half."""
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [batch, heads, seq, head_dim]; cos, sin: [seq, head_dim], the two halves equal."""
    return x * cos + rotate_half(x) * sin


class Rotary(nn.Module):
    """Cosines and sines of the rotary angles, [sequence, head_dim] each."""

    def __init__(self, head_dim: int, sequence: int, theta: float) -> None:
        super().__init__()
        frequency = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles = torch.outer(torch.arange(sequence, dtype=torch.float32), frequency)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, sequence: int) -> tuple[Tensor, Tensor]:
        return self.cos[:sequence], self.sin[:sequence]


class Attention(nn.Module):
    """Causal attention with fewer key and value heads than query heads."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.head_dim = config.hidden // config.heads
        self.q_proj = nn.Linear(config.hidden, config.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden, config.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden, config.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * self.head_dim, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        q = self.q_proj(x).view(batch, sequence, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, sequence, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, sequence, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, sequence, -1))


class MLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and a residual connection."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, config.eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden, config.eps)
        self.mlp = MLP(config.hidden, config.intermediate)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """Token ids [batch, seq] in, mean next-token cross entropy (a scalar) out."""

    def __init__(self, config: Config | None = None) -> None:
        super().__init__()
        config = config or Config()
        torch.manual_seed(config.seed)
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.rotary = Rotary(config.hidden // config.heads, config.sequence, config.rope_theta)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        if config.tied:
            self.lm_head.weight = self.embed.weight
        for name, parameter in self.named_parameters():
            if "norm" in name:  # as after training: not all ones, so that a kernel which ignores them is wrong
                nn.init.normal_(parameter, mean=1.0, std=0.1)

    def logits(self, tokens: Tensor) -> Tensor:
        """[batch, seq, vocab]."""
        cos, sin = self.rotary(tokens.shape[1])
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.lm_head(self.norm(x))

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.logits(tokens).float()
        targets = F.pad(tokens[:, 1:], (0, 1), value=IGNORED)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=IGNORED)


def get_inputs():
    config = Config()
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(config.vocab, (1, config.sequence), generator=generator)]


def get_init_inputs():
    return []
