"""Arguments of steps as data (JSON) and as Python source. Nothing here can run what a file merely mentions."""

from __future__ import annotations

import functools
import importlib
import inspect
import keyword
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from .errors import ScheduleError
from .matching import find_by_name, match_data

_RECIPE = "_slapo_recipe"
_PLAIN = (type(None), bool, int, str)


def make(cls: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """Build ``cls(*args, **kwargs)`` and remember how, so that a schedule that uses the module can be saved.

    A saved schedule holds the recipe, not the weights: replaying it builds the module anew.
    """
    module = cls(*args, **kwargs)
    module.__dict__[_RECIPE] = (cls, args, kwargs)
    return module


def encode(value: Any) -> Any:
    """A value as JSON data.

    Raises:
        ScheduleError: the value has no such form; says which and what to do.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else {"$float": repr(value)}
    for kind, (matches, to_data, _) in _KINDS.items():
        if matches(value):
            return {f"${kind}": to_data(value)} if kind != "list" else to_data(value)
    raise ScheduleError(f"cannot write down {_describe(value)}; {_advice(value)}")


def decode(data: Any, trust: Sequence[str] = (), context: Any = None) -> Any:
    """The value that ``encode`` wrote.

    Args:
        data: JSON data.
        trust: Modules, besides ``torch.nn``, whose classes and functions may be imported.
        context: The schedule the step is for, to find graph nodes by name in.

    Raises:
        ScheduleError: malformed data, or an object from a module that is not trusted.
    """
    if isinstance(data, (*_PLAIN, float)):
        return data
    again = functools.partial(decode, trust=trust, context=context)
    if isinstance(data, list):
        return [again(item) for item in data]
    if isinstance(data, dict) and len(data) == 1:
        ((key, inner),) = data.items()
        if key == "$import":
            return _import(inner, trust)
        if key == "$match":
            return find_by_name(context, again(inner))
        if key[:1] == "$" and key[1:] in _KINDS:
            return _KINDS[key[1:]][2](inner, again)
    raise ScheduleError(f"not a value of a saved schedule: {data!r}")


def to_source(value: Any) -> str:
    """A value as a Python expression; what has none is shown as ``<...>``, which does not parse."""
    if isinstance(value, nn.Module):
        try:
            cls, args, kwargs = _recipe(value)
        except ScheduleError:
            return f"<{type(value).__module__}.{type(value).__qualname__} module>"
        words = [_import_path(cls).replace(":", "."), *map(to_source, args)]
        return f"slapo_core.make({', '.join([*words, *(f'{key}={to_source(item)}' for key, item in kwargs.items())])})"
    if isinstance(value, (torch.dtype, float)):
        return f'float("{value}")' if isinstance(value, float) and value - value != 0 else repr(value)
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if _is_match(value):
        return f"slapo_core.match(sch, {to_source(match_data(value))})"
    if type(value) in (list, tuple, set):
        return _sequence_source(value)
    if type(value) is dict:
        return "{" + ", ".join(f"{to_source(key)}: {to_source(item)}" for key, item in value.items()) + "}"
    if isinstance(value, _PLAIN):
        return repr(value)
    try:
        return _import_path(value).replace(":", ".")
    except ScheduleError:
        return f"<{_describe(value)}>"


def imports_of(value: Any) -> set[str]:
    """The modules that ``to_source(value)`` needs imported."""
    if isinstance(value, (torch.dtype, torch.device)):
        return {"torch"}
    if isinstance(value, nn.Module):
        cls, args, kwargs = _recipe(value)
        return {"slapo_core"}.union(*map(imports_of, [cls, *args, *kwargs.values()]))
    if _is_match(value):
        return {"slapo_core"} | imports_of(match_data(value))
    if isinstance(value, (list, tuple, set)):
        return set().union(*map(imports_of, value))
    if isinstance(value, dict):
        return imports_of([*value, *value.values()])
    return {_import_path(value).partition(":")[0]} if _is_importable(value) else set()


def _sequence_source(value: Any) -> str:
    items = [to_source(item) for item in (sorted(value, key=repr) if isinstance(value, set) else value)]
    if isinstance(value, list):
        return f"[{', '.join(items)}]"
    if isinstance(value, set):
        return f"{{{', '.join(items)}}}" if items else "set()"
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def _is_importable(value: Any) -> bool:
    return isinstance(value, type) or inspect.isroutine(value)


def _import_path(value: Any) -> str:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    for home in (module, "torch.nn.functional", "torch"):  # torch's built-in functions do not know their public home
        if not home or any(word.startswith("_") for word in f"{home}.{name}".split(".")):
            continue  # what is private, __main__ included, could not be imported again
        if _resolve(home, name) is value:
            return f"{home}:{name}"
    raise ScheduleError(f"cannot write down {_describe(value)}; {_advice(value)}")


def _resolve(module: str, name: str) -> Any:
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError):
        return None
    return found


def _import(path: Any, trust: Sequence[str]) -> Any:
    module, _, name = path.partition(":") if isinstance(path, str) else ("", "", "")
    words = [*module.split("."), *name.split(".")]
    if not all(word.isidentifier() and not keyword.iskeyword(word) and not word.startswith("_") for word in words):
        raise ScheduleError(f"not an import path: {path!r}")
    trusted = _is_below(module, trust)
    if not (trusted or _is_below(module, ["torch.nn"])):
        raise ScheduleError(f"{path!r} is not from a trusted module; pass trust=[{module!r}] if you trust it")
    found = _resolve(module, name)
    fit = isinstance(found, type) and issubclass(found, nn.Module) or module == "torch.nn.functional" or trusted
    if not (_is_importable(found) and _at_home(found, module) and fit):
        raise ScheduleError(f"{path!r} is no class or function of {module!r}")
    return found


def _is_below(module: str, homes: Sequence[str]) -> bool:
    return any(module == home or module.startswith(f"{home}.") for home in homes)


def _at_home(value: Any, module: str) -> bool:
    """Whether the module that was trusted defines the object, rather than importing it from elsewhere."""
    owner = getattr(value, "__module__", None) or module
    return bool(owner == module or owner.startswith(("torch.nn.", "torch._C")))


def _make(data: Any, again: Callable[[Any], Any]) -> nn.Module:
    cls = again(data["class"])
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ScheduleError(f"only modules can be made, not {data['class']!r}")
    return make(cls, *again(data["args"]), **{key: again(item) for key, item in data["kwargs"].items()})


def _make_data(module: nn.Module) -> dict[str, Any]:
    cls, args, kwargs = _recipe(module)
    return {"class": encode(cls), "args": encode(list(args)), "kwargs": {key: encode(item) for key, item in kwargs.items()}}


def _recipe(module: nn.Module) -> tuple[type[nn.Module], tuple[Any, ...], dict[str, Any]]:
    recorded = module.__dict__.get(_RECIPE)
    if recorded is not None:
        return recorded  # type: ignore[no-any-return]
    cls = type(module)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(cls).parameters.values()
    if all(parameter.default is not parameter.empty or parameter.kind in variadic for parameter in parameters):
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            plain = cls()
        if _same_configuration(plain, module):
            return cls, (), {}
    raise ScheduleError(f"cannot write down {_describe(module)}; {_advice(module)}")


def _same_configuration(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules differ in their weights' values at most."""
    hidden = {"_parameters", "_buffers", "_modules", "training", _RECIPE}

    def shape(module: nn.Module) -> Any:
        tensors = {**module._parameters, **module._buffers}
        return {name: None if tensor is None else (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}

    def plain(module: nn.Module) -> Any:
        return {key: value for key, value in module.__dict__.items() if key not in hidden}

    return (
        type(one) is type(other)
        and shape(one) == shape(other)
        and plain(one) == plain(other)
        and list(one._modules) == list(other._modules)
        and all(_same_configuration(a, b) for a, b in zip(one.children(), other.children(), strict=True))
    )


def _is_match(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], fx.Node) for item in value)
    )


def _describe(value: Any) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, nn.Module):
        return f"the module {kind}"
    if _is_importable(value):
        return f"the {type(value).__name__} {getattr(value, '__qualname__', value)!r}"
    return f"{value!r} of type {kind}" if len(repr(value)) < 80 else f"a {kind}"


def _advice(value: Any) -> str:
    if isinstance(value, nn.Module):
        return "build it with slapo.make(cls, ...)"
    if callable(value):
        return "define it at the top level of an importable module"
    if isinstance(value, torch.Tensor):
        return "give tensors to create_schedule(..., example_inputs=...)"
    return "use plain data, importable functions and classes, or slapo.make(cls, ...)"


def _pairs(value: dict[Any, Any]) -> list[list[Any]]:
    return [[encode(key), encode(item)] for key, item in value.items()]


def _items(value: Any) -> list[Any]:
    return [encode(item) for item in value]


_Kind = tuple[Callable[[Any], bool], Callable[[Any], Any], Callable[[Any, Any], Any]]
_KINDS: dict[str, _Kind] = {  # kind: (matches, to data, from data); tried in this order
    "match": (_is_match, lambda v: encode(match_data(v)), lambda data, again: None),
    "list": (lambda v: type(v) is list, _items, lambda data, again: None),
    "tuple": (lambda v: isinstance(v, tuple), _items, lambda data, again: tuple(again(data))),
    "set": (
        lambda v: isinstance(v, (set, frozenset)),
        lambda v: _items(sorted(v, key=repr)),
        lambda data, again: set(again(data)),
    ),
    "dict": (lambda v: type(v) is dict, _pairs, lambda data, again: {again(key): again(item) for key, item in data}),
    "dtype": (lambda v: isinstance(v, torch.dtype), lambda v: str(v).removeprefix("torch."), lambda data, again: _dtype(data)),
    "device": (lambda v: isinstance(v, torch.device), str, lambda data, again: torch.device(data)),
    "float": (lambda v: False, repr, lambda data, again: float(data)),
    "make": (lambda v: isinstance(v, nn.Module), _make_data, _make),
    "import": (_is_importable, _import_path, lambda data, again: None),
}


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ScheduleError(f"no dtype {name!r}")
    return found
