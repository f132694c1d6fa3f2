"""Conversion of the model's tensors to those in the files, as Transformers' ``save_pretrained`` does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from slapo_core import BuildError

from ..safetensors_files.writer import TensorEntry

Tensors = dict[str, torch.Tensor]
Convert = Callable[[Tensors], Mapping[str, torch.Tensor]]


class ConversionGroup(NamedTuple):
    """Tensors of the model that are converted together; ``renamed``: the only source becomes the only target unchanged."""

    sources: tuple[str, ...]
    targets: tuple[TensorEntry, ...]
    renamed: bool


def identity_groups(tensors: Mapping[str, torch.Tensor]) -> list[ConversionGroup]:
    """Return groups of one unchanged tensor each."""
    return [ConversionGroup((name,), (_entry(name, tensor),), True) for name, tensor in tensors.items()]


def conversion_groups(tensors: Mapping[str, torch.Tensor], convert: Convert) -> list[ConversionGroup]:
    """Return groups in the order of a conversion's results; the conversion runs on meta tensors.

    ``convert`` is a function of any of these groups of tensors.

    Raises:
        BuildError: the sources of a result cannot be tracked.
    """
    with _SourceTracker(tensors) as tracker:
        made = convert(dict(tensors))
    together: dict[str, set[str]] = {name: {name} for name in tensors}
    for name, tensor in made.items():
        sources = tracker.sources(tensor)
        if not sources:
            raise BuildError(f"export_weights: cannot tell what Transformers makes {name!r} of when it saves")
        merged = set().union(*(together[source] for source in sources))
        together.update(dict.fromkeys(merged, merged))
    targets: dict[int, list[str]] = {}
    for name, tensor in made.items():
        targets.setdefault(id(together[next(iter(tracker.sources(tensor)))]), []).append(name)
    groups = []
    for names in targets.values():
        members = together[next(iter(tracker.sources(made[names[0]])))]
        sources = tuple(name for name in tensors if name in members)
        renamed = len(sources) == len(names) == 1 and made[names[0]] is tensors[sources[0]]
        groups.append(ConversionGroup(sources, tuple(_entry(name, made[name]) for name in names), renamed))
    if left := tensors.keys() - {name for group in groups for name in group.sources}:
        raise BuildError(f"export_weights: Transformers makes nothing of {min(left)!r} when it saves")
    return groups


def convert_group(group: ConversionGroup, tensors: Tensors, convert: Convert) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors that a group is converted to.

    Raises:
        BuildError: they differ from the plan.
    """
    if group.renamed:
        yield group.targets[0].name, tensors[group.sources[0]]
        return
    made = convert({name: tensors[name] for name in group.sources})
    if tuple(sorted(_entry(name, tensor) for name, tensor in made.items())) != tuple(sorted(group.targets)):
        raise BuildError(
            f"export_weights: Transformers makes {sorted(made)} of {', '.join(group.sources)} alone, and of the whole model "
            f"{sorted(each.name for each in group.targets)}; export with another version of it"
        )
    yield from made.items()


def _entry(name: str, tensor: torch.Tensor) -> TensorEntry:
    return TensorEntry(name, tuple(tensor.shape), tensor.dtype)


class _SourceTracker(TorchFunctionMode):
    """Function mode that tracks the source tensors of each result."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._known: dict[int, tuple[torch.Tensor, frozenset[str]]] = {
            id(tensor): (tensor, frozenset((name,))) for name, tensor in tensors.items()
        }

    def sources(self, tensor: torch.Tensor) -> frozenset[str]:
        return self._known[id(tensor)][1] if id(tensor) in self._known else frozenset()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        sources = frozenset[str]().union(*map(self.sources, given))
        for each in pytree.tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self._known[id(each)] = each, sources | self.sources(each)
        return result
