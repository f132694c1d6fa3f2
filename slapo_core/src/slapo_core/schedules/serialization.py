"""Arguments of steps as data (JSON), and this data as Python source. Reading data runs no code but trusted classes."""

from __future__ import annotations

import importlib
import inspect
import json
import keyword
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..interfaces.codec import Codec
from ..registration.registry import default_registry
from ..reporting.errors import ScheduleError
from ..reporting.logger import get_logger

_RECIPE = "_slapo_recipe"
_PLAIN = (type(None), bool, int, float, str)


def make(cls: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """Return ``cls(*args, **kwargs)`` with a record of the call, so that a schedule that uses the module can be saved.

    A saved schedule holds the call, not the weights. A replay builds the module anew.

    Args:
        cls: An importable module class.
        *args: Arguments of ``cls``.
        **kwargs: Arguments of ``cls``.

    Raises:
        ScheduleError: a keyword is not a Python name.

    Example:
        >>> sch = create_schedule(nn.Sequential(nn.ReLU()))
        >>> sch["0"].replace(make(nn.LeakyReLU, 0.2))
        Schedule('0': LeakyReLU)
        >>> print(sch.journal)
        sch['0'].replace(slapo_core.make(torch.nn.modules.activation.LeakyReLU, 0.2))
    """
    check_names(kwargs)
    module = cls(*args, **kwargs)
    module.__dict__[_RECIPE] = (cls, args, kwargs)
    return module


def check_names(kwargs: Iterable[str]) -> None:
    """Refuse keyword arguments that are not Python names, which source could not express."""
    if bad := [name for name in kwargs if not name.isidentifier() or keyword.iskeyword(name)]:
        raise ScheduleError(f"{bad[0]!r} is not the name of an argument")


def encode(value: Any, strict: bool = True) -> Any:
    """Return a value as JSON data: plain values, lists and dicts as they are, others as ``{"$kind": data}``.

    Args:
        value: An argument of a step.
        strict: False returns a description of a value without such a form, for ``to_source`` to show.

    Raises:
        ScheduleError: the value has no such form; says which value, and what to use instead.
    """
    if isinstance(value, _PLAIN) and not _is_non_finite(value):
        return json.loads(json.dumps(value))  # converts a subclass, e.g. NumPy's float64 or an enum, to its base type
    try:
        for codec in _codecs().values():
            if codec.fits(value):
                parts = codec.parts(value).items()
                return {codec.name: encode({key: part for key, part in parts if _is_written(key, part, codec)}, strict)}
        for name, kind in _KINDS.items():
            if kind.fits(value):
                return {name: encode(kind.parts(value), strict)}
        if type(value) is list:
            return [encode(item, strict) for item in value]
        if type(value) is dict:
            return {key: encode(item, strict) for key, item in value.items()}
        raise _unwritable_error(value)
    except ScheduleError:
        if strict:
            raise
        return {"$unknown": _describe(value)}


def decode(data: Any, trust: Sequence[str] = (), schedule: Any = None) -> Any:
    """Return the value that ``encode`` wrote.

    Args:
        data: JSON data.
        trust: Modules, besides ``torch.nn``, whose classes and functions may be imported.
        schedule: The top schedule; codecs look up graph nodes there.

    Raises:
        ScheduleError: malformed data, or an object from a module that is not trusted.
    """
    if isinstance(data, list):
        return [decode(item, trust, schedule) for item in data]
    if not isinstance(data, dict):
        return data
    name = next(iter(data), "")
    codec = _codecs().get(name)
    if codec is not None and isinstance(written := data[name], dict):
        data = {name: {key: _trusted_or_none(item, trust) if key in codec.optional else item for key, item in written.items()}}
    parts = {key: decode(item, trust, schedule) for key, item in data.items()}
    if not any(key.startswith("$") for key in data):
        return parts
    if len(data) > 1 or codec is None and name not in _KINDS:
        raise ScheduleError(f"not a value of a saved schedule: {data!r}; the plugin with its codec may not be installed")
    if codec is not None:
        return codec.build(parts[name], schedule)
    return _import(parts[name], trust) if name == "$import" else _KINDS[name].build(parts[name])


def round_trip(value: Any, schedule: Any) -> Any:
    """Return an argument of a step as a replay of the saved schedule on ``schedule`` would pass it.

    Raises:
        ScheduleError: the argument has no written form.

    Example:
        >>> layer = make(nn.LeakyReLU, 0.2)
        >>> copied = round_trip({"new": layer}, create_schedule(nn.ReLU()))["new"]
        >>> copied, copied is layer
        (LeakyReLU(negative_slope=0.2), False)
    """
    data = encode(value)
    return decode(data, tuple(imports_of(data)), schedule)


def to_source(data: Any) -> str:
    """Return data of ``encode`` as a Python expression. A value without written form is ``<...>``, which does not parse."""
    if isinstance(data, list):
        return _Source([to_source(item) for item in data])
    if not isinstance(data, dict):
        return _Source(repr(data))
    for name, inner in data.items():
        if name.startswith("$"):
            if codec := _codecs().get(name):
                return _Source(codec.source(to_source(inner)))
            return _Source(_KINDS[name].source(inner) if name in _KINDS else f"<{inner}>")
    return _Source({key: to_source(item) for key, item in data.items()})


def imports_of(data: Any) -> set[str]:
    """Return the modules that ``to_source(data)`` needs imported."""
    if isinstance(data, dict):
        modules = {**_KIND_IMPORTS, **{name: codec.module for name, codec in _codecs().items() if codec.module}}
        own = {data["$import"].partition(":")[0]} if "$import" in data else {modules[key] for key in data if key in modules}
        return own | imports_of(list(data.values()))
    return set().union(*map(imports_of, data)) if isinstance(data, list) else set()


class _Source(str):
    """Source text; unquoted in the ``repr`` of a container."""

    __repr__ = str.__str__


def _is_non_finite(value: Any) -> bool:
    return isinstance(value, float) and value - value != 0  # infinity or NaN, which JSON cannot express


def _is_escaped_dict(value: Any) -> bool:
    return type(value) is dict and any(type(key) is not str or key.startswith("$") for key in value)


def _is_importable(value: Any) -> bool:
    return isinstance(value, type) or inspect.isroutine(value)


def _import_path(value: Any) -> str:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    for home in (module, "torch.nn.functional", "torch"):  # torch's built-in functions do not record their public module
        if not home or any(word.startswith("_") for word in f"{home}.{name}".split(".")):
            continue  # a private module, __main__ included, cannot be imported again
        if _resolve(home, name) is value:
            return f"{home}:{name}"
    raise _unwritable_error(value)


def _import(path: Any, trust: Sequence[str]) -> Any:
    module, _, name = path.partition(":") if isinstance(path, str) else ("", "", "")
    if not all(word.isidentifier() and not word.startswith("_") for word in [*module.split("."), *name.split(".")]):
        raise ScheduleError(f"not an import path: {path!r}")
    trusted = _is_below(module, trust)
    if not (trusted or _is_below(module, ["torch.nn"])):
        raise ScheduleError(f"{path!r} is not from a trusted module; pass trust=[{module!r}] if you trust it")
    found = _resolve(module, name)
    fit = isinstance(found, type) and issubclass(found, nn.Module) or module == "torch.nn.functional" or trusted
    if not (_is_importable(found) and _is_defined_in(found, module) and fit):
        raise ScheduleError(f"{path!r} is not a class or function of {module!r}")
    return found


def _codecs() -> dict[str, type[Codec]]:
    return {codec.name: codec for codec in default_registry().codecs}


def _is_written(key: str, part: Any, codec: type[Codec]) -> bool:
    """Return True if a part is written: an optional one only if it can be imported again."""
    if key not in codec.optional:
        return True
    try:
        return part is not None and bool(_import_path(part))
    except ScheduleError:
        return False


def _trusted_or_none(data: Any, trust: Sequence[str]) -> Any:
    """Return the data of an optional part, or None if its module is not trusted or has no such function."""
    try:
        return data if inspect.isfunction(decode(data, trust)) else None
    except ScheduleError as err:
        get_logger().debug("a saved value goes without an optional part: %s", err)
        return None


def _resolve(module: str, name: str) -> Any:
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError, ValueError):
        return None


def _is_below(module: str, homes: Sequence[str]) -> bool:
    return any(module == home or module.startswith(f"{home}.") for home in homes)


def _is_defined_in(value: Any, module: str) -> bool:
    """Return True if the trusted module itself defines the object; False if it imports the object from elsewhere."""
    owner = getattr(value, "__module__", None) or module
    return bool(owner == module or owner.startswith(("torch.nn.", "torch._C")))


def _make(recipe: dict[str, Any]) -> nn.Module:
    cls = recipe["class"]
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ScheduleError(f"only modules can be made, not {_describe(cls)}")
    return make(cls, *recipe["args"], **recipe["kwargs"])


def _make_source(data: Any) -> str:
    words = [data["class"], *data["args"]]
    kwargs = [f"{key}={to_source(item)}" for key, item in data["kwargs"].items()]
    return f"slapo_core.make({', '.join([*map(to_source, words), *kwargs])})"


def _recipe(module: nn.Module) -> dict[str, Any]:
    if _RECIPE in module.__dict__:
        cls, args, kwargs = module.__dict__[_RECIPE]
        return {"class": cls, "args": list(args), "kwargs": kwargs}
    cls = type(module)
    try:
        inspect.signature(cls).bind()
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            if _configuration(cls()) == _configuration(module):
                return {"class": cls, "args": [], "kwargs": {}}
    except Exception as err:  # it needs arguments, or a user's constructor raised
        raise _unwritable_error(module) from err
    raise _unwritable_error(module)


def _configuration(module: nn.Module) -> list[Any]:
    """Return everything that distinguishes a module, except the values of its weights."""
    hidden = {"_parameters", "_buffers", "_modules", "training", _RECIPE}

    def own(inner: nn.Module) -> Any:
        tensors = {**inner._parameters, **inner._buffers}
        shapes = {name: None if tensor is None else (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        return type(inner), shapes, {key: value for key, value in inner.__dict__.items() if key not in hidden}

    return [(name, own(inner)) for name, inner in module.named_modules()]


def _unwritable_error(value: Any) -> ScheduleError:
    if isinstance(value, nn.Module):
        advice = "build it with slapo.make(cls, ...)"
    elif _is_importable(value):
        advice = "define it at the top level of an importable module"
    elif isinstance(value, torch.Tensor):
        advice = "give tensors to create_schedule(..., example_inputs=...)"
    else:
        advice = "use plain data, importable functions and classes, or slapo.make(cls, ...)"
    return ScheduleError(f"cannot write down {_describe(value)}; {advice}")


def _describe(value: Any) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, nn.Module):
        return f"the module {kind}"
    if _is_importable(value):
        return f"the {type(value).__name__} {getattr(value, '__qualname__', value)!r}"
    return f"{value!r} of type {kind}" if len(repr(value)) < 80 else f"a {kind}"


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ScheduleError(f"no dtype {name!r}")
    return found


def _is_a(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types)


class _Kind(NamedTuple):
    """Form of a value that JSON cannot express: ``{"$kind": data of its parts}``."""

    fits: Callable[[Any], bool]
    parts: Callable[[Any], Any]
    build: Callable[[Any], Any]
    """Return the value for its parts. ``decode`` itself handles values that need the schedule or trust."""
    source: Callable[[Any], str]
    """Return the Python expression for the data."""


_KINDS = {  # tried in this order
    "$float": _Kind(_is_non_finite, repr, float, lambda data: f"float({data!r})"),
    "$tuple": _Kind(_is_a(tuple), list, tuple, lambda data: repr(tuple(map(to_source, data)))),
    "$set": _Kind(_is_a(set, frozenset), lambda value: sorted(value, key=repr), set, lambda data: f"set({to_source(data)})"),
    "$dict": _Kind(_is_escaped_dict, lambda value: [*map(list, value.items())], dict, lambda data: f"dict({to_source(data)})"),
    "$dtype": _Kind(_is_a(torch.dtype), lambda value: str(value)[len("torch.") :], _dtype, lambda data: f"torch.{data}"),
    "$device": _Kind(_is_a(torch.device), str, torch.device, lambda data: f"torch.device({data!r})"),
    "$make": _Kind(_is_a(nn.Module), _recipe, _make, _make_source),
    "$import": _Kind(_is_importable, _import_path, lambda parts: None, lambda data: data.replace(":", ".")),
}
_KIND_IMPORTS = {"$dtype": "torch", "$device": "torch", "$make": "slapo_core"}
