"""Models of transformers with kernels that keep keys and values in a cache: the same tokens, the same cache."""

import copy

import pytest
import torch
from test_match import matches
from test_replace import export
from test_training import ORACLE

import autokernel
from autokernel.errors import ConfigError
from autokernel.model import LoadedModel
from autokernel.modelinputs import place_inputs
from autokernel.outputs import disagreement, expect, output_leaves

transformers = pytest.importorskip("transformers")

PROMPT, VOCABULARY = 12, 64
OPS = ("flash_attention", "rmsnorm")
CALLS = {"flash_attention": 1, "rmsnorm": 3}


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    config = transformers.LlamaConfig(**sizes, **heads, **special, tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config).eval()


def prompt():
    return torch.randint(3, VOCABULARY, (1, PROMPT), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Kernels for a forward over the prompt that fills a cache, as generation begins with."""
    folder = tmp_path_factory.mktemp("run")
    inputs = {"input_ids": prompt(), "use_cache": True}
    found = matches(LoadedModel(model=llama(), args=(), kwargs=inputs, name="llama"), OPS)
    for op in OPS:
        cases = list({match.case.key: match.case for match in found if match.op == op}.values())
        export(folder, op, ORACLE.format(op=op), cases)
    return folder


def test_a_forward_fills_the_cache_that_it_was_given(run):
    model, plain = llama(), llama()
    applied = autokernel.apply(model, run)
    caches = [transformers.DynamicCache(config=model.config) for _ in range(2)]
    with torch.no_grad():
        for tokens in (prompt(), prompt()[:, :1]):
            got, want = (
                item(input_ids=tokens, cache=cache, use_cache=True)
                for item, cache in zip((model, plain), caches, strict=True)
            )
            assert type(got) is type(want)
            torch.testing.assert_close(got.logits, want.logits)
    assert applied.calls == CALLS  # of the prompt
    assert applied.fallbacks == CALLS  # of the one token after it
    assert got.cache is caches[0]
    assert caches[0].get_seq_length() == PROMPT + 1
    torch.testing.assert_close(caches[0].layers[0].keys, caches[1].layers[0].keys)


def test_the_cache_is_compared_as_part_of_the_output(run):
    item = LoadedModel(model=llama(), args=(), kwargs={"input_ids": prompt(), "use_cache": True}, name="llama")
    expected = expect(item)
    assert expected.names == ("output.logits", "output.cache.layers[0].keys", "output.cache.layers[0].values")
    autokernel.apply(item.model, run)
    assert disagreement(output_leaves(item.model, item), expected) is None


def test_a_cache_as_an_input_is_refused():
    cache = transformers.DynamicCache(config=llama().config)
    with pytest.raises(ConfigError, match="a DynamicCache, which each forward would fill"):
        place_inputs((), {"input_ids": prompt(), "cache": cache}, torch.device("cpu"), None)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_generation_gives_the_same_tokens(run, kind):
    """A growing cache is other shapes at each step, of which torch.compile captures so many; a static one is two."""
    model, plain = llama(), llama()
    applied = autokernel.apply(model, run)
    options = {"max_new_tokens": 5, "do_sample": False, "cache_implementation": kind}
    want = plain.generate(prompt(), **options)
    with torch._dynamo.config.patch(recompile_limit=3):
        assert torch.equal(model.generate(prompt(), **options), want)
    assert applied.calls["rmsnorm"] == CALLS["rmsnorm"]
    assert applied.fallbacks["rmsnorm"] == CALLS["rmsnorm"] * (2 if kind == "dynamic" else 4)
    assert applied.uncaptured == (2 if kind == "dynamic" else 0)
    applied.undo()
    assert torch.equal(model.generate(prompt(), **options), want)


def test_beams_and_padding_give_the_same_tokens(run):
    """The cache's rows change places between steps, and the mask is no causal one."""
    model, plain = llama(), llama()
    autokernel.apply(model, run)
    ids = prompt().repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    options = {"max_new_tokens": 3, "do_sample": False, "num_beams": 2, "attention_mask": mask}
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


def test_training_with_a_loss_has_the_same_gradients(run):
    model, plain = llama(), llama()
    applied = autokernel.apply(model, run)
    for item in (model, plain):
        item(input_ids=prompt(), labels=prompt(), use_cache=False).loss.backward()
    assert applied.calls["rmsnorm"] == CALLS["rmsnorm"]
    assert applied.fallbacks["flash_attention"] == 1  # its keys, straight from the product, have other strides
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for (name, got), (_, want) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-6, msg=name)


class Nested(torch.nn.Module):
    """Inputs in a dict, a keyword, and an output that is a dataclass within a dict."""

    def __init__(self):
        super().__init__()
        self.norm = copy.deepcopy(llama().model.norm)

    def forward(self, batch, *, scale=1.0):
        y = self.norm(batch["x"][0]) * scale
        return {"out": transformers.modeling_outputs.BaseModelOutput(last_hidden_state=y), "scale": scale}


def test_nested_inputs_and_outputs_keep_their_types(run):
    model, plain = Nested(), Nested()
    applied = autokernel.apply(model, run, ops=["rmsnorm"])
    batch = {"x": [torch.randn(1, PROMPT, 32)], "unused": "text"}
    with torch.no_grad():
        got, want = model(batch, scale=2.0), plain(batch, scale=2.0)
    assert applied.calls == {"rmsnorm": 1}
    assert got["scale"] == 2.0
    assert type(got["out"]) is type(want["out"])
    torch.testing.assert_close(got["out"].last_hidden_state, want["out"].last_hidden_state)


def translator():
    """An encoder and a decoder whose output has the caches of both."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 1, "num_heads": 4, "vocab_size": VOCABULARY}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()
    inputs = {"input_ids": prompt(), "decoder_input_ids": prompt()[:, :5], "use_cache": True}
    return LoadedModel(model=model, args=(), kwargs=inputs, name="t5")


def test_both_caches_of_an_encoder_and_a_decoder_are_compared():
    item = translator()
    expected = expect(item)
    cached = [name.split(".", 2)[2] for name in expected.names if "cache" in name]  # transformers renamed the field
    assert cached == [
        f"{part}_attention_cache.layers[0].{states}" for part in ("self", "cross") for states in ("keys", "values")
    ]
    assert disagreement(output_leaves(item.model, item), expected) is None
    for index, name in enumerate(expected.names):
        if name.endswith("cross_attention_cache.layers[0].values"):
            changed = list(output_leaves(item.model, item))
            changed[index] = changed[index] * 1.5
            assert f"output tensor {index}" in disagreement(changed, expected)


def test_such_a_cache_is_no_input_either():
    cache = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
    with pytest.raises(ConfigError, match="EncoderDecoderCache, which each forward would fill further"):
        place_inputs((), {"past_key_values": cache}, torch.device("cpu"), None)
