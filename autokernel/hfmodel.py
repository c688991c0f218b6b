"""Models of the transformers library by architecture or config, with random weights; nothing is ever downloaded.

What has to be chosen (sizes of an architecture named without a config, batch and sequence of the inputs) is small
and returned as notes.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autokernel.errors import ConfigError

SMALL_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
}
"""Sizes of a model that is named by architecture only: a forward takes tens of milliseconds on a CPU."""

BATCH, SEQUENCE = 1, 128
FACTORY_HINT = "build model and inputs yourself in a file: model.py:build"


def from_transformers(name: str) -> tuple[nn.Module, dict[str, Tensor], str, tuple[str, ...]]:
    """(model, keyword inputs, name, notes) for an architecture (`LlamaForCausalLM`) or a local config's path.

    Raises: ConfigError when transformers is missing, the name is unknown, or the inputs cannot be made.
    """
    try:
        import transformers
    except ImportError:
        raise ConfigError(f"hf:{name} needs the transformers library", hint="pip install transformers") from None
    try:
        config, cls, notes = _config_and_class(transformers, name)
        config.use_cache = False
        model: nn.Module = cls(config)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"hf:{name}: {type(error).__name__}: {error}", hint=FACTORY_HINT) from None
    inputs, input_note = _make_inputs(model, config)
    notes = (*notes, "random weights, nothing downloaded; use_cache=False", input_note)
    return model, inputs, cls.__name__, notes


def _config_and_class(transformers: Any, name: str) -> tuple[Any, Any, tuple[str, ...]]:
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _from_config_file(transformers, path)
    if "/" in name or name.endswith(".json"):
        raise ConfigError(
            f"hf:{name}: there is no such config here, and nothing is downloaded",
            hint="give the path of a config.json, or an architecture such as hf:LlamaForCausalLM",
        )
    cls: Any = getattr(transformers, name, None)
    if getattr(cls, "config_class", None) is None or not issubclass(cls, nn.Module):
        raise ConfigError(
            f"hf:{name}: transformers {transformers.__version__} has no model class of this name",
            hint="use a class name such as LlamaForCausalLM, Qwen2ForCausalLM, BertModel",
        )
    config, note = _small_config(cls.config_class, name)
    return config, cls, (note,)


def _from_config_file(transformers: Any, path: Path) -> tuple[Any, Any, tuple[str, ...]]:
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", hint="give a transformers config.json") from None
    if not isinstance(raw, dict) or raw.get("model_type") not in transformers.CONFIG_MAPPING:
        kind = raw.get("model_type") if isinstance(raw, dict) else None
        raise ConfigError(f"{path}: unknown model_type {kind!r}", hint="give a transformers config.json")
    config = transformers.CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    named = (raw.get("architectures") or [None])[0]
    cls = getattr(transformers, named, None) if named else None
    if cls is not None:
        return config, cls, ()
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    cls = mapping[type(config)] if type(config) in mapping else transformers.MODEL_MAPPING[type(config)]
    return config, cls, (f"{path.name} names no known architecture: took {cls.__name__}",)


def _small_config(config_class: Any, name: str) -> tuple[Any, str]:
    """A config of few, small layers, and a note of the sizes that were set."""
    default = config_class()
    if hasattr(default, "text_config") or (hasattr(default, "sub_configs") and default.sub_configs):
        raise ConfigError(f"hf:{name} is made of several models; no small config can be chosen", hint=FACTORY_HINT)
    sizes = {key: value for key, value in SMALL_SIZES.items() if hasattr(default, key)}
    if not sizes:
        raise ConfigError(f"hf:{name}: no small config can be chosen for it", hint=FACTORY_HINT)
    vocab = sizes.get("vocab_size")
    special: dict[str, Any] = {}
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(default, key, None)
        if vocab is not None and isinstance(value, int) and value >= vocab:
            special[key] = None if key == "pad_token_id" else vocab - 1
    config = config_class(**sizes, **special)
    return config, "sizes chosen for " + name + ": " + ", ".join(f"{k}={v}" for k, v in {**sizes, **special}.items())


def _make_inputs(model: nn.Module, config: Any) -> tuple[dict[str, Tensor], str]:
    """Keyword inputs for a text or an image model, and a note of what was chosen."""
    generator = torch.Generator().manual_seed(0)
    takes = inspect.signature(model.forward).parameters
    vocab = getattr(config, "vocab_size", None)
    if "input_ids" in takes and vocab:
        length = min(SEQUENCE, getattr(config, "max_position_embeddings", None) or SEQUENCE)
        ids = torch.randint(vocab, (BATCH, length), generator=generator)
        inputs = {"input_ids": ids}
        if getattr(config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = torch.randint(vocab, (BATCH, length), generator=generator)
        return inputs, f"inputs chosen: {', '.join(inputs)} [{BATCH}, {length}] random below {vocab}"
    if "pixel_values" in takes and isinstance(getattr(config, "image_size", None), int):
        shape = (BATCH, getattr(config, "num_channels", 3), config.image_size, config.image_size)
        return {"pixel_values": torch.randn(shape, generator=generator)}, f"inputs chosen: pixel_values {list(shape)}"
    needed = [key for key, p in takes.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    raise ConfigError(f"{type(model).__name__}: no inputs can be chosen for {needed or list(takes)}", hint=FACTORY_HINT)
