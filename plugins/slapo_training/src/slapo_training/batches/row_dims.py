"""Rows of a batch in its arguments: given by an option, inferred if that is certain, refused otherwise."""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import torch

from slapo_core import BuildError

from .nested_tensors import Path, tensors_of

Dim = int | str | Callable[..., Any] | None
"""Value of the option ``batch_dims`` for an argument, see ``CommonOptions.batch_dims``."""

Ends = list[int | None]
"""Numbers of entries of an argument that its first 0, 1, 2, ... rows have; None if a row ends within an entry."""

Place = int | Ends | None
"""Dimension of the rows, or their ends in dimension 0; None for an argument that goes whole to each part."""

_GRIDS = ("image_grid_thw", "video_grid_thw")
OF_TOKENS = ("pixel_values", "pixel_values_videos", *_GRIDS)
"""Transformers' argument names of images, videos, their patches and their grids."""
OF_IMAGES = (*OF_TOKENS, "pixel_attention_mask")
"""Names of arguments whose size may differ between replicas."""


def option_name_of(path: Path, given: Mapping[str, Dim]) -> str | None:
    """Return the option's name for an argument or for a structure around it; or None."""
    return next((name for name in given if path == name or path.startswith(f"{name}.")), None)


def is_list(value: Any, dim: Dim) -> bool:
    """Return True if a list or tuple has one item per row, or goes whole to each part.

    With another dimension than 0, the rows are in its tensors, e.g. in the state of an LSTM.
    """
    return isinstance(value, list | tuple) and not (isinstance(dim, int) and dim)


def size_of(path: Path, value: Any, dim: int) -> int:
    """Return the size of a tensor or a list in a dimension; raise ``BuildError`` if there is no such dimension."""
    if not isinstance(value, torch.Tensor):
        if dim != 0:
            raise BuildError(f"batch_dims[{path!r}] is {dim}, but the argument is a {type(value).__name__}; give 0 or None")
        return len(value)
    if not -value.dim() <= dim < value.dim():
        raise BuildError(f"batch_dims[{path!r}] is {dim}, but the argument has {value.dim()} dimensions")
    return value.shape[dim]


def without_absent_images(part: dict[str, Any], token: int | None) -> dict[str, Any]:
    """Return a part of a token batch without image arguments if it has no images, as a processor would.

    Images are concatenated, or padded by zeros to the same number per row. ``token`` is that of an image in ``input_ids``, or
    None if it is unknown.
    """
    ids, images = part.get("input_ids"), part.get("pixel_values")
    if not isinstance(ids, torch.Tensor):
        return part
    is_padded = isinstance(images, torch.Tensor) and images.dim() == 5
    if token is not None and is_padded and not (torch.eq(ids, token).any() or torch.as_tensor(images).any()):
        return {name: value for name, value in part.items() if name not in ("pixel_values", "pixel_attention_mask")}
    return {
        name: value
        for name, value in part.items()
        if not (name in OF_TOKENS and isinstance(value, torch.Tensor) and value.dim() and not len(value))
    }


class RowDims:
    """Locates the rows in the arguments of one batch, or of a part of one.

    Args:
        tokens: Token ids of an ``"image"`` and a ``"video"`` in ``input_ids``.
        known: Dimensions of the rows in earlier batches.
        is_part: True for a part of an earlier batch, which has the known dimensions; False to check them.
    """

    def __init__(
        self,
        batch: Mapping[str, Any],
        rows: int,
        given: Mapping[str, Dim],
        tokens: Mapping[str, int],
        known: Mapping[Path, int | None],
        is_part: bool,
    ) -> None:
        self._batch, self._rows, self._given, self._tokens = batch, rows, given, tokens
        self._known, self._is_part = known, is_part
        lists = {name for name, dim in given.items() if is_list(batch.get(name), dim)}
        self._tensors = {
            path: each for path, each in tensors_of(dict(batch)).items() if each.dim() and path.partition(".")[0] not in lists
        }

    def find(self) -> dict[Path, Place]:
        """Return the place of the rows in each tensor; raise ``BuildError`` if it is uncertain, or differs from the option."""
        return {path: self._place(path, ()) for path in self._tensors}

    def _place(self, path: Path, counted: tuple[Path, ...]) -> Place:
        """Return the place of the rows in a tensor; ``counted`` are the tensors whose entries it counts."""
        name, tensor = option_name_of(path, self._given), self._tensors[path]
        if name is None:
            return self._infer_row_dim(path, tensor)
        dim = self._given[name]
        if dim is None:
            return None
        if not isinstance(dim, int):
            return self._counted_ends(path, dim, counted)
        if size_of(path, tensor, dim) != self._rows:
            raise BuildError(
                f"{path!r} has size {tensor.shape[dim]} in dimension {dim}, where by batch_dims the {self._rows} rows are"
            )
        return dim % tensor.dim()

    def _infer_row_dim(self, path: Path, tensor: torch.Tensor) -> Place:
        shape, known = tuple(tensor.shape), self._known.get(path)
        if self._is_part and path in self._known and known is None:
            return None
        if known is not None and known < len(shape) and shape[known] == self._rows:
            return known
        if (ends := self._token_ends(path, tensor)) is not None:
            return ends
        is_first, is_second = shape[0] == self._rows, self._matches_other_arguments_from_dim_1(path, shape)
        if known is not None:
            what = f"had its rows in dimension {known} before, and now has the shape {shape} in {self._describe_batch()}"
        elif is_first and is_second and _is_integer(tensor):  # activations have rows in dimension 0
            what = f"has the shape {shape}, where dimension 0 or 1 may have the {self._rows} rows"
        elif is_first:
            return 0
        elif is_second and shape[1] != shape[2]:
            return 1
        elif self._is_broadcast(tensor):
            return None
        else:
            what = f"has the shape {shape} in {self._describe_batch()}"
        raise BuildError(
            f"{path!r} {what}; say with batch_dims={{{path.partition('.')[0]!r}: ...}} which dimension has the rows, None if "
            "it goes whole to each micro-batch, or use microbatches=1"
        )

    def _describe_batch(self) -> str:
        sizes = ", ".join(f"{name} {tuple(other.shape)}" for name, other in self._tensors.items())
        return f"a batch of {self._rows} rows, {sizes}"

    def _matches_other_arguments_from_dim_1(self, path: Path, shape: tuple[int, ...]) -> bool:
        """Return True if the shape from dimension 1 on starts like another argument's shape from dimension 0 on."""
        others = (tuple(other.shape[:2]) for name, other in self._tensors.items() if name != path and other.dim() > 1)
        return len(shape) > 2 and shape[1] == self._rows and shape[1:3] in others

    def _is_broadcast(self, tensor: torch.Tensor) -> bool:
        """Return True if an argument has one row for all: integers shaped like another argument's rows, or a shared mask."""
        shape = tuple(tensor.shape)
        if len(shape) > 2:
            return shape[:2] == (1, 1)
        rows = [other for other in self._tensors.values() if other.shape[0] == self._rows and _is_integer(other)]
        return shape[0] == 1 and _is_integer(tensor) and any(tuple(other.shape[1:]) == shape[1:] for other in rows)

    def _token_ends(self, path: Path, tensor: torch.Tensor) -> Ends | None:
        """Return the ends of each row's images or videos, by their tokens; None if tokens do not show them."""
        name, ids = path.rpartition(".")[2], self._tensors.get("input_ids")
        token = self._tokens.get("video" if "video" in name else "image")
        if name not in OF_TOKENS or token is None or ids is None:
            return None
        if ids.dim() != 2 or ids.shape[0] != self._rows or (tensor.dim() > 4 and tensor.shape[0] == self._rows):
            return None
        tokens = [0, *accumulate((ids == token).sum(1).tolist())]
        entries = [0, *accumulate(tensor.prod(1).tolist() if name in _GRIDS else [1] * len(tensor))]
        if not tokens[-1] or not entries[-1]:
            return None if tokens[-1] or len(tensor) else [0] * len(tokens)
        scaled = [entry * tokens[-1] for entry in entries]
        found = [bisect_left(scaled, number * entries[-1]) for number in tokens]
        return [end if scaled[end] == number * entries[-1] else None for end, number in zip(found, tokens, strict=True)]

    def _counted_ends(self, path: Path, count: str | Callable[..., Any], counted: tuple[Path, ...]) -> Ends:
        """Return the ends of rows in an argument whose entries another argument or a function counts."""
        ends: Ends = list(range(self._rows + 1))
        if isinstance(count, str):
            if count not in self._tensors or count in (path, *counted):
                names = ", ".join(self._batch)
                raise BuildError(f"batch_dims[{path!r}] is {count!r}, which is not another tensor of the batch; it has {names}")
            place = self._place(count, (*counted, path))
            if place is None or (isinstance(place, int) and place != 0):
                raise BuildError(f"batch_dims[{path!r}] is {count!r}, which does not have the rows in dimension 0")
            ends = place if isinstance(place, list) else ends
            counts = _count_list(path, self._tensors[count])
        else:
            counts = _count_list(path, _call_count(path, count, self._batch))
        if len(counts) != ends[-1]:
            raise BuildError(f"batch_dims[{path!r}] counts the entries of {len(counts)} rows, but the batch has {ends[-1]}")
        sums, number = [0, *accumulate(counts)], len(self._tensors[path])
        if sums[-1] != number:
            raise BuildError(f"{path!r} has {number} entries, but by batch_dims the rows have {sums[-1]}")
        return [None if end is None else sums[end] for end in ends]


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def _count_list(path: Path, counts: Any) -> list[int]:
    """Return counts as a list; entries with several sizes, e.g. of a grid, count as their product."""
    found = torch.as_tensor(counts)
    if found.is_floating_point() or found.dim() == 0:
        raise BuildError(f"batch_dims[{path!r}] gives no whole number for each row, but {counts!r}")
    return found.flatten(1).prod(1).tolist() if found.dim() > 1 else found.tolist()


def _call_count(path: Path, count: Callable[..., Any], batch: Mapping[str, Any]) -> Any:
    """Call a count function with those arguments of the batch that it names."""
    names = list(inspect.signature(count).parameters)
    if missing := [name for name in names if name not in batch]:
        raise BuildError(f"the function of batch_dims[{path!r}] takes {missing[0]!r}; the batch has {', '.join(batch)}")
    return count(*(batch[name] for name in names))
