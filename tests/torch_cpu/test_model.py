import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from autokernel.errors import ConfigError, DeviceError
from autokernel.model import LoadedModel, forward, load_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

GOOD = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.linear(x))

def get_inputs():
    return [torch.randn(2, 4)]
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "model.py") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


def refused(spec: str, **options) -> ConfigError:
    """The error that `load_model` raises; one without a hint would leave the user alone."""
    with pytest.raises(ConfigError) as caught:
        load_model(spec, **options)
    assert caught.value.hint
    assert "Traceback" not in str(caught.value)
    return caught.value


def forward_refused(spec: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        forward(load_model(spec))
    assert caught.value.hint
    return caught.value


# --- what is accepted ---


def test_a_kernelbench_file_is_loaded_in_eval_mode(write):
    loaded = load_model(write(GOOD))
    assert loaded.name == "model"
    assert not loaded.model.training
    assert torch.equal(forward(loaded), forward(loaded))  # dropout is off
    assert not forward(loaded).requires_grad
    assert loaded.notes == ()


def test_equal_seeds_give_equal_weights_and_inputs_and_leave_the_callers_generator_alone(write):
    spec = write(GOOD)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second, third = load_model(spec, seed=1), load_model(spec, seed=1), load_model(spec, seed=2)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first.model.linear.weight, second.model.linear.weight)
    assert torch.equal(first.args[0], second.args[0])
    assert not torch.equal(first.model.linear.weight, third.model.linear.weight)


@pytest.mark.parametrize("init", ["[8]", "[[8], {}]", "[[], {'width': 8}]", "{'width': 8}"])
def test_init_inputs_are_a_list_or_args_and_kwargs(write, init):
    spec = write(GOOD.replace("(2, 4)", "(2, 8)") + f"\ndef get_init_inputs():\n    return {init}\n")
    loaded = load_model(spec)
    assert forward(loaded).shape == (2, 8)
    assert bool(loaded.notes) == init.startswith("[[")  # the reading as (args, kwargs) is said


@pytest.mark.parametrize(
    ("inputs", "noted"),
    [
        ("[torch.ones(2, 4)]", False),
        ("(torch.ones(2, 4),)", False),
        ("{'x': torch.ones(2, 4)}", False),
        ("([], {'x': torch.ones(2, 4)})", True),
        ("([torch.ones(2, 4)], {})", True),
        ("torch.ones(2, 4)", True),
    ],
)
def test_inputs_are_args_kwargs_or_both_and_guesses_are_noted(write, inputs, noted):
    loaded = load_model(write(GOOD.replace("[torch.randn(2, 4)]", inputs)))
    assert forward(loaded).shape == (2, 4)
    assert bool(loaded.notes) == noted


def test_inputs_may_be_nested(write):
    spec = write("""
        import torch
        from torch import nn
        class Model(nn.Module):
            def forward(self, batch, scale, *, flag):
                return batch["a"][0] * scale if flag else None
        def get_inputs():
            return [{"a": (torch.ones(3), "text")}, 2.0], {"flag": True}
    """)
    assert forward(load_model(spec)).tolist() == [2.0, 2.0, 2.0]


def test_dtype_casts_floating_tensors_only_and_says_so(write):
    spec = write(GOOD.replace("[torch.randn(2, 4)]", "[torch.randn(2, 4)], {}"))
    loaded = load_model(spec, dtype="bf16")
    assert forward(loaded).dtype == torch.bfloat16
    assert any("bf16" in note for note in loaded.notes)
    tokens = load_model(str(EXAMPLES / "bert.py"), dtype="bf16")
    assert tokens.kwargs["input_ids"].dtype == torch.int64


def test_a_factory_returns_model_and_inputs(write):
    spec = write(GOOD + "\ndef build():\n    return Model(6), {'x': torch.ones(1, 6)}\n")
    loaded = load_model(spec + ":build")
    assert loaded.name == "model.build"
    assert forward(loaded).shape == (1, 6)


def test_a_factory_may_return_a_model_alone_and_a_class_may_be_named(write):
    spec = write(GOOD + "\ndef build():\n    return Model()\nclass Other(Model):\n    pass\n")
    assert "get_inputs()" in " ".join(load_model(spec + ":build").notes)
    assert type(load_model(spec + ":Other").model).__name__ == "Other"


def test_a_model_with_a_dataclass_config_and_a_sibling_import(write, tmp_path):
    write("WIDTH = 4\n", "sizes_of_this_model.py")
    text = """
        from __future__ import annotations
        from dataclasses import dataclass, field
        from typing import ClassVar
        from sizes_of_this_model import WIDTH

        @dataclass(kw_only=True)
        class Config:
            width: int = WIDTH
            extra: ClassVar[int] = 1
            more: list[int] = field(default_factory=list)
    """
    path_before = list(sys.path)
    loaded = load_model(write(textwrap.dedent(text) + GOOD.replace("width=4", "width=Config().width")))
    assert forward(loaded).shape == (2, 4)
    assert sys.path == path_before


def test_two_files_with_siblings_of_one_name_each_get_their_own(tmp_path):
    for folder, value in (("one", 1.0), ("two", 2.0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "constants_beside_model.py").write_text(f"VALUE = {value}\n")
        text = "from constants_beside_model import VALUE\n" + GOOD.replace("self.drop(self.linear(x))", "x * 0 + VALUE")
        (tmp_path / folder / "model.py").write_text(text)
    outputs = [forward(load_model(str(tmp_path / name / "model.py")))[0, 0].item() for name in ("one", "two", "one")]
    assert outputs == [1.0, 2.0, 1.0]


def test_sys_path_is_restored_after_a_failure(write):
    before = list(sys.path)
    refused(write("import sys\nsys.path.append('/nowhere')\nraise RuntimeError('boom')\n"))
    assert sys.path == before


def test_an_importable_module_and_class(write, tmp_path, monkeypatch):
    write(GOOD, "importable_model.py")
    monkeypatch.syspath_prepend(tmp_path)
    loaded = load_model("importable_model:Model")
    assert loaded.name == "importable_model.Model"
    assert forward(loaded).shape == (2, 4)


def test_a_model_that_only_works_in_eager_is_loaded_and_run(write):
    spec = write(GOOD.replace("return self.drop(", "return x if float(x.sum()) > 0 else self.drop("))
    assert forward(load_model(spec)).shape == (2, 4)


# --- what is refused ---


def test_a_missing_file(tmp_path):
    error = refused(str(tmp_path / "absent.py"))
    assert "absent.py does not exist" in str(error)
    assert error.exit_code == 2
    assert "does not exist" in str(refused(str(tmp_path / "absent.py:build")))
    assert "does not exist" in str(refused("no_colon_and_no_suffix"))


def test_a_folder_and_a_file_of_another_kind(write, tmp_path):
    assert "is a folder" in str(refused(str(tmp_path)))
    assert "not a Python file" in str(refused(write("hello", "model.txt")))


def test_a_syntax_error_shows_file_line_and_text(write):
    message = str(refused(write("import torch\ndef broken(:\n    pass\n")))
    assert "SyntaxError" in message
    assert "model.py:2: def broken(:" in message


def test_bytes_that_are_no_python(tmp_path):
    (tmp_path / "model.py").write_bytes(b"\x80\x81\x00PK")
    assert "could not be loaded" in str(refused(str(tmp_path / "model.py")))


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("raise KeyError('lost')", "KeyError: 'lost'"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("1 / 0", "ZeroDiv"),
    ],
)
def test_a_file_that_raises_shows_its_own_exception_and_line(write, code, shown):
    message = str(refused(write(f"import torch\n\n{code}\n")))
    assert shown in message
    assert f"model.py:3: {code}" in message


def test_a_missing_import_is_named(write):
    message = str(refused(write("import a_module_that_nobody_has\n" + GOOD)))
    assert "No module named 'a_module_that_nobody_has'" in message
    assert "model.py:1" in message


def test_a_file_without_model_lists_what_it_defines(write):
    message = str(refused(write(GOOD.replace("class Model", "class Network"))))
    assert "has no Model" in message
    assert "Network, get_inputs" in message
    assert "no class and no function" in str(refused(write("x = 1\n")))


def test_a_model_that_is_no_module(write):
    assert "not a torch.nn.Module" in str(refused(write("class Model:\n    pass\n")))
    assert "not callable" in str(refused(write("Model = 3\n")))


def test_a_file_without_get_inputs(write):
    assert "no get_inputs()" in str(refused(write(GOOD.replace("get_inputs", "other"))))


def test_inputs_of_an_unusable_kind(write):
    assert "get_inputs() returned None" in str(refused(write(GOOD.replace("return [torch.randn(2, 4)]", "pass"))))
    assert "key 3" in str(refused(write(GOOD.replace("[torch.randn(2, 4)]", "{3: torch.ones(1)}"))))


def test_get_inputs_raising(write):
    message = str(refused(write(GOOD.replace("return [torch.randn(2, 4)]", "raise ValueError('no data')"))))
    assert "get_inputs() raised ValueError: no data" in message
    assert "raise ValueError('no data')" in message


def test_a_constructor_raising_shows_the_users_line(write):
    message = str(refused(write(GOOD.replace("super().__init__()", "super().__init__(); self.table = {}['k']"))))
    assert "Model() raised KeyError: 'k'" in message
    assert "self.table = {}['k']" in message


def test_a_constructor_that_needs_arguments_hints_at_get_init_inputs(write):
    error = refused(write(GOOD.replace("width=4", "width")))
    assert "missing 1 required positional argument: 'width'" in str(error)
    assert "get_init_inputs" in error.hint


def test_get_init_inputs_raising(write):
    spec = write(GOOD + "\ndef get_init_inputs():\n    raise OSError('disk')\n")
    assert "get_init_inputs() raised OSError: disk" in str(refused(spec))


def test_a_factory_returning_something_else(write):
    spec = write(GOOD + "\ndef build():\n    return 3\ndef broken():\n    return {}['k']\n")
    assert "not (model, inputs)" in str(refused(spec + ":build"))
    assert "broken() raised KeyError" in str(refused(spec + ":broken"))
    assert "has no absent; it defines Model, get_inputs, build, broken" in str(refused(spec + ":absent"))


def test_a_forward_that_raises_shows_exception_line_and_shapes(write):
    error = forward_refused(write(GOOD.replace("(2, 4)", "(2, 5)")))
    assert "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x5 and 4x4)" in str(error)
    assert "return self.drop(self.linear(x))" in str(error)
    assert "argument 0: [2, 5] fp32 cpu" in str(error)


def test_a_forward_with_other_arguments_shows_its_own_error(write):
    error = forward_refused(write(GOOD.replace("def forward(self, x)", "def forward(self, x, y)")))
    assert "missing 1 required positional argument: 'y'" in str(error)
    assert "get_inputs()" in error.hint


def test_an_input_that_the_file_put_on_another_device_is_named(write):
    spec = write(GOOD.replace("[torch.randn(2, 4)]", "{'x': {'deep': [torch.ones(2, 4, device='meta')]}}"))
    assert "argument 'x'['deep'][0] of get_inputs() is on meta, the model is on cpu" in str(refused(spec))


def test_forward_names_an_argument_that_is_not_where_the_parameters_are():
    loaded = LoadedModel(model=nn.Linear(2, 2), args=(torch.ones(1, 2, device="meta"),), kwargs={}, name="m")
    with pytest.raises(ConfigError, match="argument 0 is on meta, the parameters are on cpu"):
        forward(loaded)


def test_parameters_without_values(write):
    spec = write(GOOD.replace("nn.Linear(width, width)", "nn.Linear(width, width, device='meta')"))
    assert "cannot be moved to cpu" in str(refused(spec))


def test_an_unknown_device_and_dtype(write):
    spec = write(GOOD)
    assert "unknown device" in str(refused(spec, device="quantum"))
    assert "unknown dtype" in str(refused(spec, dtype="int64"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_a_device_that_is_not_here(write):
    with pytest.raises(DeviceError, match="not available") as caught:
        load_model(write(GOOD), device="cuda")
    assert caught.value.exit_code == 3


def test_modules_that_cannot_be_imported(write, tmp_path, monkeypatch):
    assert "no module named 'nowhere_to_be_found'" in str(refused("nowhere_to_be_found:Model"))
    write("import a_module_that_nobody_has\n", "half_there.py")
    write("raise ValueError('at import')\n", "raising_module.py")
    monkeypatch.chdir(tmp_path)
    assert "a_module_that_nobody_has" in str(refused("half_there:Model"))
    assert "ValueError: at import (raising_module.py:1" in str(refused("raising_module:Model"))


# --- transformers and the examples ---


def test_an_architecture_by_name_is_small_and_says_what_was_chosen():
    loaded = load_model("hf:LlamaForCausalLM")
    vocab = loaded.model.config.vocab_size
    assert loaded.kwargs["input_ids"].max() < vocab
    assert forward(loaded).logits.shape[-1] == vocab
    notes = " ".join(loaded.notes)
    assert "hidden_size=256" in notes
    assert "input_ids [1, 128]" in notes
    assert "random weights" in notes


def test_a_config_file_is_used_as_it_is(tmp_path):
    from transformers import GPT2Config

    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=1)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    for spec in (f"hf:{tmp_path}", f"hf:{tmp_path / 'config.json'}"):
        loaded = load_model(spec)
        assert loaded.name == "GPT2LMHeadModel"
        assert forward(loaded).logits.shape == (1, 16, 50)
    text = (tmp_path / "config.json").read_text().replace("GPT2LMHeadModel", "SomethingElse")
    (tmp_path / "config.json").write_text(text)
    assert "took GPT2LMHeadModel" in " ".join(load_model(f"hf:{tmp_path}").notes)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("hf:NoSuchModel", "no model class of this name"),
        ("hf:someone/some-model", "nothing is downloaded"),
        ("hf:LlavaForConditionalGeneration", "made of several models"),
    ],
)
def test_what_cannot_be_built_from_transformers(spec, expected):
    assert expected in str(refused(spec))


def test_a_damaged_config_file(tmp_path):
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in str(refused(f"hf:{tmp_path}"))
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    assert "unknown model_type 'abacus'" in str(refused(f"hf:{tmp_path}"))


@pytest.mark.parametrize(
    ("example", "shapes"),
    [
        ("llama.py", [()]),
        ("gpt2.py", [(1, 256, 16384)]),
        ("bert.py", [(4, 128, 384), (4, 384)]),
        ("hf_qwen.py:build", [(), (1, 256, 16384)]),
    ],
)
def test_an_example_runs_and_is_the_same_each_time(example, shapes):
    first, second = load_model(str(EXAMPLES / example)), load_model(str(EXAMPLES / example), seed=7)
    outputs = [leaf for leaf in pytree.tree_leaves(forward(first)) if isinstance(leaf, torch.Tensor)]
    assert [tuple(output.shape) for output in outputs] == shapes
    assert all(output.isfinite().all() for output in outputs)
    assert all(map(torch.equal, first.model.parameters(), second.model.parameters()))


def test_the_llama_example_agrees_with_its_own_logits():
    loaded = load_model(str(EXAMPLES / "llama.py"))
    (tokens,) = loaded.args
    with torch.no_grad():
        log_probabilities = loaded.model.logits(tokens).double().log_softmax(-1)
    expected = -log_probabilities[0, :-1].gather(-1, tokens[0, 1:, None]).mean()
    torch.testing.assert_close(forward(loaded).double(), expected, rtol=1e-5, atol=0)
