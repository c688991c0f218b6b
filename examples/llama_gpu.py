"""A Llama of half a billion parameters from the transformers library, in bf16: what a GPU needs some milliseconds for.

Needs a GPU and `pip install transformers`; random weights from a config, nothing is downloaded.
Try it with: `autokernel run examples/llama_gpu.py:build --backend triton` (or `--backend cuda`); `:build_loss` is the
forward of a training step, with Llama 3's vocabulary.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

BATCH, SEQUENCE = 4, 2048


def build():
    """(model, keyword inputs) of one forward over a batch of token ids."""
    model, ids = _model_and_ids(vocabulary=32000)
    return model, {"input_ids": ids}


def build_loss():
    """The same with labels and 128,256 tokens: next to the logits the model returns their loss."""
    model, ids = _model_and_ids(vocabulary=128256)
    return model, {"input_ids": ids, "labels": ids}


def _model_and_ids(vocabulary):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    return model, torch.randint(vocabulary, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
