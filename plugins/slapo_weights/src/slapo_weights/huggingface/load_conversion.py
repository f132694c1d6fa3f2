"""Names and views of the files' tensors in the model, with the conversions of Transformers' ``from_pretrained``."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch

from slapo_core import BuildError

from ..safetensors_files.reader import WeightFiles
from ..tensor_views.box_view import TensorView, concatenate, stack
from .unmodified_model import UnmodifiedModel


class UnreadTensor:
    """A tensor of files that has not been read; ``isinstance`` takes it for a ``torch.Tensor``."""

    def __init__(self, source: TensorView) -> None:
        self.source = source

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """``torch.Tensor``: conversions use ``isinstance`` to tell a tensor from a list of tensors."""
        return torch.Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            raise NotImplementedError(f"{getattr(func, '__name__', func)}, which needs the whole tensor")
        return handler(*args, **(kwargs or {}))

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.source.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def ndim(self) -> int:
        return len(self.source.shape)

    def reshape(self, *shape: Any) -> UnreadTensor:
        """Return the tensor in another shape, given as one argument or as several."""
        return UnreadTensor(self.source.reshape(shape if isinstance(shape[0], int) else shape[0]))

    view = reshape

    def transpose(self, dim0: int, dim1: int) -> UnreadTensor:
        return _transpose(self, dim0, dim1)

    def size(self, dim: int) -> int:
        return self.source.shape[dim]

    def contiguous(self) -> UnreadTensor:
        """Return the tensor itself; it is contiguous once it is read."""
        return self

    def squeeze(self, dim: int) -> UnreadTensor:
        """Return the tensor without the dimension if its size is 1."""
        return UnreadTensor(self.source.squeeze(dim)) if self.source.shape[dim] == 1 else self

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"{name}, which needs the whole tensor")


def _transpose(tensor: UnreadTensor, dim0: int, dim1: int) -> UnreadTensor:
    return UnreadTensor(tensor.source.transpose(dim0, dim1))


def _split(tensor: UnreadTensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[UnreadTensor, ...]:
    dim, whole = dim % len(tensor.shape), tensor.shape[dim]
    each = [min(sizes, whole - at) for at in range(0, whole, sizes)] if isinstance(sizes, int) else list(sizes)
    if sum(each) != whole:
        raise ValueError(f"a size of {whole} cannot be split into {each}")
    starts = [sum(each[:number]) for number in range(len(each))]
    return tuple(UnreadTensor(tensor.source.narrow(dim, start, start + size)) for start, size in zip(starts, each, strict=True))


def _chunk(tensor: UnreadTensor, chunks: int, dim: int = 0) -> tuple[UnreadTensor, ...]:
    return _split(tensor, -(-tensor.shape[dim] // chunks), dim)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    torch.cat: lambda tensors, dim=0: UnreadTensor(concatenate([each.source for each in tensors], dim)),
    torch.stack: lambda tensors, dim=0: UnreadTensor(stack([each.source for each in tensors], dim)),
    torch.transpose: _transpose,
    torch.split: _split,
    torch.chunk: _chunk,
}


class LoadedNames(NamedTuple):
    """The files' tensors by the model's names.

    Args:
        views: Name in the unmodified model to the view of the files.
        ignored: Names in the files that the model's class ignores.
        unread: Messages on tensors that cannot be read in parts.
    """

    views: dict[str, TensorView]
    ignored: frozenset[str]
    unread: tuple[str, ...]


def load_names(files: WeightFiles, unmodified: UnmodifiedModel | None) -> LoadedNames:
    """Return the tensors of files by their names in the model; without ``unmodified`` it is not a Transformers' model."""
    whole = {name: TensorView.of(files, name) for name in files.entries}
    if unmodified is None:
        return LoadedNames(whole, frozenset(), ())
    views, unread = _convert_tensors(whole, unmodified.model)
    return LoadedNames(views, frozenset(_ignored_names(views, unmodified)), tuple(unread))


def ignorable_names(unmodified: UnmodifiedModel | None) -> re.Pattern[str] | None:
    """Return a pattern of the names that files may lack for the model's class, or None."""
    patterns = unmodified.model._keys_to_ignore_on_load_missing if unmodified is not None else None
    return re.compile("|".join(f"({pattern})" for pattern in sorted(patterns))) if patterns else None


def _ignored_names(names: Collection[str], unmodified: UnmodifiedModel) -> Iterator[str]:
    model: Any = unmodified.model
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    # buffers that were saved once and are computed now, as from_pretrained knows them
    former = {r"rotary_emb\.inv_freq": "rotary_emb.inv_freq", r"(^|\.)position_ids$": "position_ids"}
    buffers = [name for name, _ in model.named_buffers()]
    patterns |= {pattern for pattern, end in former.items() if any(name.endswith(end) for name in buffers)}
    own = model.state_dict().keys()
    return (name for name in names if name not in own and any(re.search(pattern, name) for pattern in patterns))


def _convert_tensors(whole: dict[str, TensorView], model: Any) -> tuple[dict[str, TensorView], list[str]]:
    """Convert the tensors as ``from_pretrained`` does; return views by the model's names, and messages on failures.

    It follows ``convert_and_load_state_dict_in_model`` of Transformers, on unread tensors.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    steps = get_model_conversion_mapping(model)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    own, prefix = model.state_dict(), model.base_model_prefix
    views: dict[str, TensorView] = {}
    collected: dict[str, tuple[Any, list[str]]] = {}
    for name in sorted(whole, key=dot_natural_key):
        key, pattern = rename_source_key(name, renamings, converters, prefix, own)
        if key not in own and name in own:
            key, pattern = rename_source_key(name, [], [], prefix, own)
        if key not in own:  # several may get one name here, as experts of a layer that the model lacks
            views.setdefault(key, whole[name])
            continue
        if pattern is None:
            if key in views:
                raise BuildError(f"{views[key].names[0]} and {name} are both {key} in the model; one of them has to go")
            views[key] = whole[name]
            continue
        converter, names = collected.setdefault(key, (deepcopy(by_pattern[pattern]), []))
        converter.add_tensor(key, name, pattern, UnreadTensor(whole[name]))
        names.append(name)
    unread = []
    for key, (converter, names) in collected.items():
        try:
            made = converter.convert(key, model=model, config=model.config)
        except (NotImplementedError, ValueError, LookupError, AttributeError, TypeError) as err:
            unread.append(f"{key}, which Transformers makes of {', '.join(names[:3])} with {converter.operations}: {err}")
            continue
        views.update({name: (each[0] if isinstance(each, list) else each).source for name, each in made.items()})
    return views, unread
