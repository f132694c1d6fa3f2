"""Split points: cuts of a pipe before or after modules, given by their paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from ..tracing.cuts import Cut, Where

if TYPE_CHECKING:
    from ._torch_private import SplitPoint

_POINTS: dict[str, Where] = {"BEGINNING": "before", "END": "after"}
_POINTS_ATTRIBUTE = "_slapo_split_points"
"""Attribute of a module with its split points."""


def annotate_split_points(mod: nn.Module, spec: Mapping[str, SplitPoint]) -> None:
    """Record split points on modules, for ``pipeline`` and ``Pipe.from_tracing``. Forwards do not change.

    Args:
        spec: Paths of modules below it to ``SplitPoint.BEGINNING``, before the module's forward, or ``SplitPoint.END``, after.

    Raises:
        AttributeError: a path names no module; the message has the longest prefix that exists. Nothing was recorded.
        ValueError: a value is not a split point.
    """
    for cut in split_points(mod, spec):
        module = mod.get_submodule(cut)
        module.__dict__[_POINTS_ATTRIBUTE] = tuple(dict.fromkeys([*module.__dict__.get(_POINTS_ATTRIBUTE, ()), cut.where]))


def split_points(mod: nn.Module, spec: Mapping[str, SplitPoint]) -> list[Cut]:
    """Return the cuts of a specification; errors as for ``annotate_split_points``."""
    return [Cut(_check_path(mod, path), _where(path, point)) for path, point in spec.items()]


def annotated_points(mod: nn.Module) -> Iterator[Cut]:
    """Yield the cuts that were recorded on the modules of a model."""
    for path, module in mod.named_modules():
        for where in module.__dict__.get(_POINTS_ATTRIBUTE, ()) if path else ():
            yield Cut(path, where)


def _where(path: str, point: Any) -> Where:
    if getattr(point, "name", None) not in _POINTS or type(point).__name__ != "SplitPoint":
        raise ValueError(f"the split point of {path!r} is {point!r}; give SplitPoint.BEGINNING or SplitPoint.END")
    return _POINTS[point.name]


def _check_path(mod: nn.Module, path: str) -> str:
    names, module, here = path.split("."), mod, ""
    for depth, name in enumerate(names):
        child = module._modules.get(name)
        if child is None:
            last = f"the last part that exists is {here!r}" if here else "no part of it exists"
            missing = ".".join(names[: depth + 1])
            raise AttributeError(f"split point {path!r}: the {type(mod).__name__} has no module {missing!r}; {last}")
        module, here = child, ".".join(names[: depth + 1])
    return path
