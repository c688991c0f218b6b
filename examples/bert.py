"""A small BERT-style encoder: eager softmax attention with a padding mask, LayerNorm after each residual.

Inputs are keywords, as transformers models take them. Random weights (a fixed seed), no downloads.
Try it with: `autokernel run examples/bert.py`.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, HIDDEN, LAYERS, HEADS, SEQUENCE, BATCH = 8192, 384, 4, 6, 128, 4


class SelfAttention(nn.Module):
    """Bidirectional attention; `bias` [batch, 1, 1, seq] is 0 for tokens and very negative for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.output = nn.Linear(HIDDEN, HIDDEN)

    def split(self, x: Tensor) -> Tensor:
        """[batch, seq, hidden] -> [batch, heads, seq, head_dim]."""
        return x.view(*x.shape[:2], HEADS, HIDDEN // HEADS).transpose(1, 2)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(HIDDEN // HEADS) + bias
        context = torch.matmul(F.softmax(scores, dim=-1), v)
        return self.output(context.transpose(1, 2).reshape(x.shape))


class Layer(nn.Module):
    """Attention, then MLP with exact GELU; each is added to its input and normalized."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = SelfAttention()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.norm_1, self.norm_2 = nn.LayerNorm(HIDDEN, eps=1e-12), nn.LayerNorm(HIDDEN, eps=1e-12)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = self.norm_1(x + self.attention(x, bias))
        return self.norm_2(x + self.down(F.gelu(self.up(x))))


class Model(nn.Module):
    """Token ids and mask [batch, seq] in; hidden states [batch, seq, hidden] and pooled output [batch, hidden] out."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN, eps=1e-12)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.pooler = nn.Linear(HIDDEN, HIDDEN)
        for name, parameter in self.named_parameters():
            if "norm" in name:  # as after training: scale and shift matter
                nn.init.normal_(parameter, mean=1.0 if name.endswith("weight") else 0.0, std=0.1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        positions = self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        x = self.norm(self.tokens(input_ids) + positions)
        bias = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        for layer in self.layers:
            x = layer(x, bias)
        return {"last_hidden_state": x, "pooler_output": torch.tanh(self.pooler(x[:, 0]))}


def get_inputs():
    lengths = torch.tensor([SEQUENCE, SEQUENCE // 2, SEQUENCE - 1, 7])
    mask = (torch.arange(SEQUENCE)[None, :] < lengths[:, None]).to(torch.int64)
    ids = torch.randint(VOCAB, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids * mask, "attention_mask": mask}


def get_init_inputs():
    return []
