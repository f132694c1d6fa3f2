"""What becomes of the model's tensors in the file: each under its name, or as Transformers converts it when it saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from slapo_core import BuildError

from ..safetensors_files.writer import Layout

Tensors = dict[str, torch.Tensor]
Convert = Callable[[Tensors], Mapping[str, torch.Tensor]]


class Group(NamedTuple):
    """Tensors that become others together.

    Args:
        sources: Names in the model.
        targets: What they become.
        renamed: Whether the only source becomes the only target as it is.
    """

    sources: tuple[str, ...]
    targets: tuple[Layout, ...]
    renamed: bool


def unconverted(tensors: Mapping[str, torch.Tensor]) -> list[Group]:
    """Groups of one tensor each, as it is."""
    return [Group((name,), (_layout(name, tensor),), True) for name, tensor in tensors.items()]


def converted(tensors: Mapping[str, torch.Tensor], convert: Convert) -> list[Group]:
    """Groups in the order of what a conversion gives, which is run on tensors without numbers.

    Args:
        tensors: By name, on the meta device.
        convert: A function of some of them, by name.

    Raises:
        BuildError: what becomes of them cannot be told.
    """
    with _Followed(tensors) as followed:
        made = convert(dict(tensors))
    together: dict[str, set[str]] = {name: {name} for name in tensors}
    for name, tensor in made.items():
        sources = followed.sources(tensor)
        if not sources:
            raise BuildError(f"export_weights: cannot tell what Transformers makes {name!r} of when it saves")
        merged = set().union(*(together[source] for source in sources))
        together.update(dict.fromkeys(merged, merged))
    targets: dict[int, list[str]] = {}
    for name, tensor in made.items():
        targets.setdefault(id(together[next(iter(followed.sources(tensor)))]), []).append(name)
    groups = []
    for names in targets.values():
        members = together[next(iter(followed.sources(made[names[0]])))]
        sources = tuple(name for name in tensors if name in members)
        renamed = len(sources) == len(names) == 1 and made[names[0]] is tensors[sources[0]]
        groups.append(Group(sources, tuple(_layout(name, made[name]) for name in names), renamed))
    if left := tensors.keys() - {name for group in groups for name in group.sources}:
        raise BuildError(f"export_weights: Transformers makes nothing of {min(left)!r} when it saves")
    return groups


def outcome(group: Group, tensors: Tensors, convert: Convert) -> Iterator[tuple[str, torch.Tensor]]:
    """What a group's tensors become.

    Raises:
        BuildError: something else than was planned.
    """
    if group.renamed:
        yield group.targets[0].name, tensors[group.sources[0]]
        return
    made = convert({name: tensors[name] for name in group.sources})
    if tuple(sorted(_layout(name, tensor) for name, tensor in made.items())) != tuple(sorted(group.targets)):
        raise BuildError(
            f"export_weights: Transformers makes {sorted(made)} of {', '.join(group.sources)} alone, and of the whole model "
            f"{sorted(each.name for each in group.targets)}; export with another version of it"
        )
    yield from made.items()


def _layout(name: str, tensor: torch.Tensor) -> Layout:
    return Layout(name, tuple(tensor.shape), tensor.dtype)


class _Followed(TorchFunctionMode):
    """Of which of some tensors others are made."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._known: dict[int, tuple[torch.Tensor, frozenset[str]]] = {
            id(tensor): (tensor, frozenset((name,))) for name, tensor in tensors.items()
        }

    def sources(self, tensor: torch.Tensor) -> frozenset[str]:
        """Names of what it is made of."""
        return self._known[id(tensor)][1] if id(tensor) in self._known else frozenset()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        sources = frozenset[str]().union(*map(self.sources, given))
        for each in pytree.tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self._known[id(each)] = each, sources | self.sources(each)
        return result
