"""Turn what a user names (a file, a factory, an importable class, a transformers architecture) into a model and inputs.

Every fault of the user's code becomes a ConfigError that shows the user's own exception and the line it came from;
every choice made on the user's behalf is a line in `LoadedModel.notes`. What the model computes is not known here.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from autokernel.errors import ConfigError, DeviceError
from autokernel.loading import load_file
from autokernel.modelinputs import as_call, describe_inputs, kind_of, named_leaves, place_inputs, shown_call
from autokernel.spec import DTYPES
from autokernel.usercode import blaming, first_line, importable, seeded, shown_exception

CONVENTION = "a model file defines `class Model(nn.Module)`, `get_inputs()` and, if Model takes arguments, "
CONVENTION += "`get_init_inputs()`; or name a factory that returns (model, inputs): model.py:build"


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model in eval mode with the inputs of one forward, all on one device.

    `notes` lists in plain words what was chosen without being asked for.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a spec named, before it is placed on a device: a model, its raw inputs, and where they came from."""

    model: nn.Module
    inputs: Any
    name: str
    notes: tuple[str, ...] = ()


def load_model(spec: str, *, device: str = "cpu", dtype: str | None = None, seed: int = 0) -> LoadedModel:
    """The model that `spec` names, in eval mode on `device`, with its inputs; equal seeds give equal weights.

    Args:
        spec: `file.py`, `file.py:factory`, `module:Class`, or `hf:<architecture or path of a config>`.
        dtype: cast floating parameters and inputs (`bf16`...); None leaves them as the file made them.

    Raises: ConfigError when the spec or the user's code is at fault, DeviceError when `device` is not there.
    """
    target = checked_device(device)
    if dtype is not None and (dtype not in DTYPES or not DTYPES[dtype].is_floating_point):
        raise ConfigError(f"unknown dtype {dtype!r}", hint="use fp32, bf16, fp16 or fp64")
    with seeded(seed, target):
        source = _load(spec)
        model = _place_model(source, target, dtype)
    args, kwargs, input_notes = as_call(source.inputs)
    args, kwargs = place_inputs(args, kwargs, target, dtype)
    notes = [*source.notes, *input_notes]
    if dtype is not None:
        notes.append(f"floating parameters and inputs cast to {dtype}")
    return LoadedModel(model=model, args=args, kwargs=kwargs, name=source.name, notes=tuple(notes))


def forward(loaded: LoadedModel) -> Any:
    """The model's output for its own inputs, without gradients.

    Raises: ConfigError with the model's own exception, its line, and the inputs' shapes.
    """
    check_devices(loaded)
    try:
        with torch.no_grad():
            return loaded.model(*loaded.args, **loaded.kwargs)
    except Exception as error:
        given = describe_inputs(loaded.args, loaded.kwargs)
        message = f"{loaded.name}: the model's forward raised {shown_exception(error, _model_file(loaded.model))}"
        raise ConfigError(f"{message}\n  inputs: {given}", hint=_forward_hint(error)) from None


def checked_device(device: str) -> torch.device:
    """`device` as PyTorch names it. Raises: ConfigError when it is no device, DeviceError when it is not here."""
    try:
        target = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"unknown device {device!r}", hint="use cpu, cuda or cuda:<number>") from None
    if target.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (target.index or 0) >= count:
            raise DeviceError(
                f"device {device!r} is not available: PyTorch {torch.__version__} sees {count} CUDA devices",
                hint="use --device cpu, or install a CUDA build of PyTorch and check `nvidia-smi`",
            )
        return torch.device("cuda", target.index or 0)
    return target


# --- the forms of a spec ---------------------------------------------------------------------------------------------


def _load(spec: str) -> Source:
    if spec.startswith("hf:"):
        from autokernel.hfmodel import from_transformers

        model, inputs, name, notes = from_transformers(spec.removeprefix("hf:"))
        return Source(model=model, inputs=inputs, name=name, notes=notes)
    place, _, attribute = (spec, "", "") if Path(spec).exists() else spec.rpartition(":")
    if not place:  # no colon: a path, present or not
        place, attribute = spec, ""
    if attribute and not place.endswith(".py"):
        return _from_module(place, attribute)
    return _from_file(Path(place), attribute)


def _from_file(path: Path, attribute: str) -> Source:
    if path.is_dir():
        raise ConfigError(f"{path} is a folder, not a model file", hint="name a Python file inside it")
    if not path.is_file():
        raise ConfigError(f"model file {path} does not exist", hint="check the path; " + CONVENTION)
    if path.suffix != ".py":
        raise ConfigError(f"{path} is not a Python file (its name does not end in .py)", hint=CONVENTION)
    path = path.resolve()
    name = f"autokernel_model_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    with importable(path.parent):
        with blaming(f"{path.name} could not be loaded:", path):
            module = load_file(path, name)
        return _build(module, path, attribute)


def _from_module(place: str, attribute: str) -> Source:
    with importable(Path.cwd()):
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is not None and (place == error.name or place.startswith(error.name + ".")):
                raise ConfigError(
                    f"no module named {place!r} can be imported", hint=f"install it, or give a file: {place}.py"
                ) from None
            raise ConfigError(f"module {place} could not be imported: {error}", hint="install what it needs") from None
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"module {place} could not be imported: {shown_exception(error, None)}", hint="fix the module"
            ) from None
        return _build(module, Path(module.__file__ or place), attribute)


def _build(module: ModuleType, path: Path, attribute: str) -> Source:
    """Model and inputs from `attribute` of `module`: a factory, a class, or (when empty) the class `Model`."""
    made = _attribute(module, path, attribute)
    name = path.stem if not attribute else f"{path.stem}.{attribute}"
    if not callable(made):
        raise ConfigError(f"{path.name}: {attribute or 'Model'} is not callable", hint=CONVENTION)
    if isinstance(made, type) and not issubclass(made, nn.Module):
        raise ConfigError(f"{path.name}: class {made.__name__} is not a torch.nn.Module", hint=CONVENTION)
    if isinstance(made, type):
        model, notes = _construct(made, module, path)
        return Source(model=model, inputs=_call_get_inputs(module, path), name=name, notes=notes)
    with blaming(f"{path.name}: {attribute or 'Model'}() raised", path):
        result = made()
    if isinstance(result, nn.Module):
        note = f"{attribute or 'Model'}() returned a model alone; inputs come from get_inputs()"
        return Source(model=result, inputs=_call_get_inputs(module, path), name=name, notes=(note,))
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module):
        return Source(model=result[0], inputs=result[1], name=name)
    raise ConfigError(
        f"{path.name}: {attribute or 'Model'}() returned {kind_of(result)}, not (model, inputs)", hint=CONVENTION
    )


def _attribute(module: ModuleType, path: Path, attribute: str) -> Any:
    made: Any = module
    for part in (attribute or "Model").split("."):
        if not hasattr(made, part):
            own = [k for k, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__]
            defines = ", ".join(own) if own else "no class and no function"
            raise ConfigError(f"{path.name} has no {attribute or 'Model'}; it defines {defines}", hint=CONVENTION)
        made = getattr(made, part)
    return made


def _construct(cls: type[nn.Module], module: ModuleType, path: Path) -> tuple[nn.Module, tuple[str, ...]]:
    notes: tuple[str, ...] = ()
    given: Any = []
    get_init_inputs = getattr(module, "get_init_inputs", None)
    if get_init_inputs is not None:
        with blaming(f"{path.name}: get_init_inputs() raised", path):
            given = get_init_inputs()
    args, kwargs, notes = as_call(given, source="get_init_inputs()")
    hint = "" if get_init_inputs else "define get_init_inputs() if Model needs arguments"
    with blaming(f"{path.name}: {cls.__name__}({shown_call(args, kwargs)}) raised", path, hint=hint):
        return cls(*args, **kwargs), notes


def _call_get_inputs(module: ModuleType, path: Path) -> Any:
    get_inputs: Callable[[], Any] | None = getattr(module, "get_inputs", None)
    if get_inputs is None:
        raise ConfigError(f"{path.name} has no get_inputs()", hint="define get_inputs(), returning forward's arguments")
    with blaming(f"{path.name}: get_inputs() raised", path):
        return get_inputs()


# --- placing and running ---------------------------------------------------------------------------------------------


def check_devices(loaded: LoadedModel) -> None:
    """Raises: ConfigError naming the first tensor argument that is not where the parameters are."""
    own = next(iter([*loaded.model.parameters(), *loaded.model.buffers()]), None)
    if own is None:
        return
    for name, value in named_leaves(loaded.args, loaded.kwargs):
        # PyTorch lets a 0-dimensional CPU tensor meet tensors of any device.
        if isinstance(value, Tensor) and value.device != own.device and value.dim() > 0:
            raise ConfigError(
                f"{loaded.name}: {name} is on {value.device}, the parameters are on {own.device}",
                hint="create inputs on the CPU and choose the device with --device",
            )


def _place_model(source: Source, target: torch.device, dtype: str | None) -> nn.Module:
    try:
        source.model.eval()
        return source.model.to(device=target, dtype=DTYPES[dtype] if dtype else None)
    except Exception as error:
        raise ConfigError(
            f"{source.name}: the model cannot be moved to {target}: {type(error).__name__}: {first_line(error)}",
            hint="parameters must hold values (not be on the meta device) and fit into memory",
        ) from None


def _model_file(model: nn.Module) -> Path | None:
    try:
        return Path(inspect.getfile(type(model)))
    except TypeError:
        return None


def _forward_hint(error: Exception) -> str:
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return "use a smaller batch or a smaller model"
    if "device" in str(error):
        return "register plain tensors of the model as buffers, so that they move with it"
    return "get_inputs() must return what forward takes"
