"""A small Qwen2 from the transformers library, by a factory: random weights from a config, nothing is downloaded.

Needs `pip install transformers`. Try it with: `autokernel run examples/hf_qwen.py:build`.
"""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

SEQUENCE = 256


def build():
    """(model, keyword inputs) of one forward that returns the training loss and the logits."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=16384,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        use_cache=False,
    )
    model = Qwen2ForCausalLM(config).eval()
    ids = torch.randint(config.vocab_size, (1, SEQUENCE), generator=torch.Generator().manual_seed(1))
    return model, {"input_ids": ids, "labels": ids}
