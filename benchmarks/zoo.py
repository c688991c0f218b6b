"""Models that nobody here wrote, with random weights, as factories that `autokernel run` takes as they are.

    autokernel run benchmarks/zoo.py:llama
    autokernel run benchmarks/zoo.py:llama_gpu --dtype bf16

Each factory returns (model, keyword inputs). `<name>` has a few million parameters, `<name>_gpu` a few hundred million
and longer inputs. Nothing is downloaded. timm's are there where timm is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, dict[str, Any]]

VOCABULARY = 2048


def _tokens(batch: int, sequence: int, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(4, vocabulary, (batch, sequence))  # above the special tokens: none of them is padding


def _decoder(name: str, *, gpu: bool, **extra: Any) -> Built:
    """A causal language model of transformers, logits and the shifted loss out."""
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": VOCABULARY}
    if gpu:
        sizes |= {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 24}
        sizes |= {"num_key_value_heads": 8, "vocab_size": 32000}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False, "head_dim": None}
    sizes |= extra
    config_class = getattr(transformers, f"{name}Config")
    if sizes["head_dim"] is None:
        sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    model = getattr(transformers, f"{name}ForCausalLM")(config_class(**sizes))
    ids = _tokens(4, 1024, 32000) if gpu else _tokens(1, 128)
    return model, {"input_ids": ids, "labels": ids}


def _gpt2(*, gpu: bool) -> Built:
    import transformers

    sizes = {"n_embd": 1024, "n_layer": 24, "n_head": 16} if gpu else {"n_embd": 256, "n_layer": 2, "n_head": 8}
    vocabulary = 32000 if gpu else VOCABULARY
    config = transformers.GPT2Config(
        **sizes, vocab_size=vocabulary, n_positions=1024, use_cache=False, bos_token_id=1, eos_token_id=2
    )
    ids = _tokens(4, 1024, vocabulary) if gpu else _tokens(1, 128)
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def _bert(*, gpu: bool, padded: bool = False) -> Built:
    """Hidden states of a batch; `padded` gives its sequences different lengths, which a mask says."""
    import transformers

    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8}
    if gpu:
        sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    vocabulary = 30522 if gpu else VOCABULARY
    model = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=vocabulary))
    inputs = {"input_ids": _tokens(16, 512, vocabulary) if gpu else _tokens(2, 128)}
    if padded:
        batch, longest = inputs["input_ids"].shape
        lengths = torch.linspace(longest, longest // 2, batch).round()
        inputs["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
    return model, inputs


def _t5(*, gpu: bool) -> Built:
    import transformers

    sizes = {"d_model": 256, "d_ff": 512, "d_kv": 32, "num_layers": 2, "num_heads": 8}
    if gpu:
        sizes = {"d_model": 1024, "d_ff": 2816, "d_kv": 64, "num_layers": 12, "num_heads": 16}
    vocabulary = 32128 if gpu else VOCABULARY
    config = transformers.T5Config(
        **sizes, vocab_size=vocabulary, feed_forward_proj="gated-gelu", use_cache=False, decoder_start_token_id=0
    )
    batch, sequence = (8, 512) if gpu else (1, 128)
    inputs = {"input_ids": _tokens(batch, sequence, vocabulary), "labels": _tokens(batch, sequence // 2, vocabulary)}
    return transformers.T5ForConditionalGeneration(config), inputs


def _vit(*, gpu: bool) -> Built:
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 8, "image_size": 128}
    if gpu:
        sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes))
    return model, {"pixel_values": torch.randn(32, 3, 224, 224) if gpu else torch.randn(1, 3, 128, 128)}


def _whisper(*, gpu: bool) -> Built:
    import transformers

    width, layers, heads, positions = (1024, 12, 16, 1500) if gpu else (256, 2, 8, 100)
    vocabulary = 32000 if gpu else VOCABULARY
    config = transformers.WhisperConfig(
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        vocab_size=vocabulary,
        max_source_positions=positions,
        max_target_positions=448,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    batch = 4 if gpu else 1
    inputs = {"input_features": torch.randn(batch, config.num_mel_bins, 2 * positions)}
    inputs["decoder_input_ids"] = _tokens(batch, 128, vocabulary)
    return transformers.WhisperForConditionalGeneration(config), inputs


def _mamba(*, gpu: bool) -> Built:
    import transformers

    width, layers = (1024, 24) if gpu else (256, 2)
    vocabulary = 32000 if gpu else VOCABULARY
    config = transformers.MambaConfig(
        hidden_size=width, num_hidden_layers=layers, vocab_size=vocabulary, use_cache=False, pad_token_id=0
    )
    return transformers.MambaForCausalLM(config), {"input_ids": _tokens(1, 256 if gpu else 64, vocabulary)}


def _timm(name: str, large: str, *, gpu: bool, **extra: Any) -> Built:
    import timm

    model = timm.create_model(large if gpu else name, pretrained=False, **({} if gpu else extra))
    side = model.default_cfg["input_size"][-1] if gpu else extra.get("img_size", 128)
    return model, {"x": torch.randn(32 if gpu else 1, 3, side, side)}


FACTORIES: dict[str, Callable[..., Built]] = {
    "llama": partial(_decoder, "Llama"),
    "qwen2": partial(_decoder, "Qwen2"),
    "qwen3": partial(_decoder, "Qwen3"),
    "gemma": partial(_decoder, "Gemma"),
    "mistral": partial(_decoder, "Mistral"),
    "phi": partial(_decoder, "Phi"),
    "gpt2": _gpt2,
    "gpt_neox": partial(_decoder, "GPTNeoX"),
    "bert": _bert,
    "bert_padded": partial(_bert, padded=True),
    "t5": _t5,
    "vit": _vit,
    "whisper": _whisper,
    "mixtral": partial(_decoder, "Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "mamba": _mamba,
    "timm_vit": partial(_timm, "vit_tiny_patch16_224", "vit_large_patch16_224", img_size=128, depth=4),
    "timm_convnext": partial(_timm, "convnext_atto", "convnext_large"),
    "timm_resnet": partial(_timm, "resnet18", "resnet152"),
}
"""Factories by name, each with a keyword `gpu`."""

for _name, _factory in FACTORIES.items():
    globals()[_name] = partial(_factory, gpu=False)
    globals()[f"{_name}_gpu"] = partial(_factory, gpu=True)
