"""Rows of a batch: which part of each argument belongs to which of them."""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from slapo_core.errors import BuildError

from .structures import Path, tensors_of, with_tensors

Batch = dict[str, Any]
Dim = int | str | Callable[..., Any] | None
"""Place of the rows in an argument, see ``CommonOptions.batch_dims``."""

_Ends = list[int | None]
"""Where in an argument the first 0, 1, 2, ... rows end; None where that is between two of its entries."""

_REMEDY = "say with batch_dims={{{name!r}: ...}} which dimension has the rows, None if it goes whole to each micro-batch"
_ALWAYS_ROWS = ("labels", "input_ids")
"""Arguments that have the rows in dimension 0 whatever size the others have."""
_GRIDS = ("image_grid_thw", "video_grid_thw")
_OF_TOKENS = ("pixel_values", "pixel_values_videos", *_GRIDS)
"""Arguments whose entries are images or videos, or patches of these, as Transformers calls them."""
_TOKENS = {"image": ("image_token_id", "image_token_index"), "video": ("video_token_id", "video_token_index")}


def check_dims(given: Any) -> None:
    """Raise ``BuildError`` for a value of ``batch_dims`` that cannot work."""
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise BuildError(f"batch_dims is {given!r}; give {{name of an argument: dimension of its rows}}")
    for name, dim in given.items():
        if (
            not isinstance(name, str)
            or isinstance(dim, bool)
            or not (dim is None or isinstance(dim, int | str) or callable(dim))
        ):
            raise BuildError(
                f"batch_dims[{name!r}] is {dim!r}; give a dimension, None for what goes whole to each micro-batch, the name of "
                "an argument that counts rows, or a function that does"
            )


class BatchRows:
    """Cuts batches by rows, and joins them.

    Args:
        given: The option ``batch_dims``. Every other argument has its rows in dimension 0, or in dimension 1 where the others
            begin with its dimensions 1 and 2, or is whole where its dimension 0 has size 1. Images and videos follow the
            tokens in ``input_ids`` that stand for them, if the model's config names these as Transformers does.
    """

    def __init__(self, given: Mapping[str, Dim] | None = None) -> None:
        self._given = dict(given or {})
        self._tokens: dict[str, int] = {}
        self._decided: dict[Path, int | None] = {}
        self._counted: set[Path] = set()

    def learn_tokens(self, model: nn.Module) -> None:
        """Read from a model's config which tokens stand for images and videos."""
        config = getattr(model, "config", None)
        for kind, names in _TOKENS.items():
            found = [value for name in names if isinstance(value := getattr(config, name, None), int)]
            if found:
                self._tokens[kind] = found[0]

    def number(self, batch: Mapping[str, Any]) -> int | None:
        """Return the number of rows; None where no tensor has any.

        Raises:
            BuildError: arguments of which it is known have different numbers.
        """
        tensors = {path: tensor for path, tensor in tensors_of(dict(batch)).items() if tensor.dim()}
        known: dict[Path, int] = {}
        for path, value in [*tensors.items(), *((name, batch[name]) for name in self._lists(batch))]:
            dim = self._dim_of(path) if self.is_given(path) else None
            if isinstance(dim, int):
                known[path] = _size(path, value, dim)
        if len(set(known.values())) > 1:
            raise BuildError(f"arguments of one batch have different numbers of rows by batch_dims: {known}")
        if known:
            return next(iter(known.values()))
        free = {path: tensor for path, tensor in tensors.items() if not self.is_given(path)}
        if first := [free[name].shape[0] for name in _ALWAYS_ROWS if name in free]:
            return first[0]
        dims = {path: self._decided.get(path, 0) for path in (free or tensors) if path not in self._counted}
        sizes = Counter(tensors[path].shape[dim] for path, dim in dims.items() if dim is not None and dim < tensors[path].dim())
        return max(sizes, key=sizes.__getitem__) if sizes else None

    def split(self, batch: Mapping[str, Any], parts: int) -> list[Batch]:
        """Cut a batch into parts of equally many rows, and note where they are in each argument.

        Raises:
            BuildError: it has no rows, or not a multiple of the number; or where the rows of an argument are is not certain.
        """
        rows = self.number(batch)
        if rows == 0:
            raise BuildError("the batch has no rows; leave it out")
        if parts == 1 or rows is None:
            return [dict(batch) for _ in range(parts)]
        places = self._places(batch, rows, is_new=True)
        if rows % parts:
            raise BuildError(
                f"{rows} rows cannot be cut into {parts} equal micro-batches; give a batch of a multiple of {parts} rows"
            )
        self._note(places)
        return self._cut(batch, places, [rows // parts] * parts)

    def _note(self, places: Mapping[Path, int | None | _Ends]) -> None:
        self._counted = {path for path, place in places.items() if isinstance(place, list)}
        self._decided.update({path: place for path, place in places.items() if not isinstance(place, list)})

    def cut(self, batch: Mapping[str, Any], sizes: Sequence[int]) -> list[Batch]:
        """Cut a batch, or one of its parts, into parts of so many rows.

        Raises:
            BuildError: where the rows of an argument are is not certain.
        """
        places = self._places(batch, self.number(batch) or 0)
        if not self._decided:
            self._note(places)
        return self._cut(batch, places, sizes)

    def join(self, parts: Sequence[Mapping[str, Any]]) -> Batch:
        """Put the rows of several parts into one batch."""
        given: Batch = {}
        for part in reversed(parts):  # images are left out of a part that has none
            given.update(part)
        if not self._decided:
            self._note(self._places(parts[0], self.number(parts[0]) or 0))
        tensors = [tensors_of(dict(part)) for part in parts]

        def joined(path: Path, tensor: torch.Tensor) -> torch.Tensor:
            dim = 0 if path in self._counted else self._decided.get(path)
            return tensor if dim is None else torch.cat([own[path] for own in tensors if path in own], dim)

        whole = with_tensors(given, joined)
        for name in self._lists(given):
            if self._given[name] is not None:
                whole[name] = type(given[name])(each for part in parts for each in part[name])
        return whole  # type: ignore[no-any-return]

    def without_counts(self, batch: Mapping[str, Any]) -> Batch:
        """Return a batch without the arguments that have other numbers of entries for each row."""
        return {name: value for name, value in batch.items() if name not in self._counted}

    def _lists(self, batch: Mapping[str, Any]) -> Iterator[str]:
        """Yield the names of lists of rows that the option names."""
        return (name for name in self._given if isinstance(batch.get(name), list | tuple))

    def is_given(self, path: Path) -> bool:
        """Return whether the option names an argument, or what it is in."""
        return any(path == name or path.startswith(f"{name}.") for name in self._given)

    def _dim_of(self, path: Path) -> Dim:
        """Return what is given or, for parts of a batch, decided of an argument; None also where nothing is."""
        for name, dim in self._given.items():
            if path == name or path.startswith(f"{name}."):
                return dim
        return self._decided.get(path)

    def _places(self, batch: Mapping[str, Any], rows: int, is_new: bool = False) -> dict[Path, int | None | _Ends]:
        """Return for each tensor the dimension of the rows, where they end, or None if it goes whole to each part."""
        lists = set(self._lists(batch))
        tensors = {
            path: each for path, each in tensors_of(dict(batch)).items() if each.dim() and path.partition(".")[0] not in lists
        }
        places: dict[Path, int | None | _Ends] = {}
        for path, tensor in tensors.items():
            if not self.is_given(path):
                places[path] = self._default(path, tensor, rows, tensors, is_new)
            elif isinstance(dim := self._dim_of(path), int):
                if _size(path, tensor, dim) != rows:
                    raise BuildError(
                        f"{path!r} has size {tensor.shape[dim]} in dimension {dim}, where by batch_dims the {rows} rows are"
                    )
                places[path] = dim % tensor.dim()
            else:
                places[path] = dim if dim is None else []
        for path in [path for path, place in places.items() if place == []]:
            places[path] = self._counted_ends(path, batch, rows, tensors, places, ())
        return places

    def _default(
        self, path: Path, tensor: torch.Tensor, rows: int, tensors: Mapping[Path, torch.Tensor], is_new: bool
    ) -> int | None | _Ends:
        shape, before = tuple(tensor.shape), self._decided.get(path, -1)
        if not is_new and path in self._decided:
            return before if before is None or (before >= 0 and shape[before] == rows) else None
        if isinstance(before, int) and before >= 0 and before < len(shape) and shape[before] == rows:
            return before
        if (ends := self._token_ends(path, tensor, rows, tensors)) is not None:
            return ends
        others = [other for name, other in tensors.items() if name != path and other.dim() > 1 and other.shape[0] == rows]
        is_second = len(shape) > 2 and shape[1] == rows and any(shape[1:3] == tuple(other.shape[:2]) for other in others)
        if isinstance(before, int) and before >= 0 and shape[0] != 1:
            what = f"had its rows in dimension {before} before, and now has the shape {shape} in a batch of {rows} rows"
        elif shape[0] == rows and is_second and not (tensor.is_floating_point() or tensor.dtype is torch.bool):
            what = f"has the shape {shape}, where dimension 0 or 1 may have the {rows} rows"
        elif shape[0] == rows or is_second:
            return 0 if shape[0] == rows else 1
        elif shape[0] == 1:
            return None
        else:
            sizes = ", ".join(f"{name} {tuple(other.shape)}" for name, other in tensors.items())
            what = f"has the shape {shape} in a batch of {rows} rows, {sizes}"
        raise BuildError(f"{path!r} {what}; {_REMEDY.format(name=path.partition('.')[0])}, or use microbatches=1")

    def _token_ends(self, path: Path, tensor: torch.Tensor, rows: int, tensors: Mapping[Path, torch.Tensor]) -> _Ends | None:
        """Return where the images or videos of rows end, by the tokens that stand for them; None where nothing shows it."""
        name, ids = path.rpartition(".")[2], tensors.get("input_ids")
        kind = "video" if "video" in name else "image"
        is_grid = name in _GRIDS
        if name not in _OF_TOKENS or kind not in self._tokens or ids is None:
            return None
        if ids.dim() != 2 or ids.shape[0] != rows or (tensor.dim() > 4 and tensor.shape[0] == rows):
            return None
        tokens = [0, *accumulate((ids == self._tokens[kind]).sum(1).tolist())]
        entries = [0, *accumulate(tensor.prod(1).tolist() if is_grid else [1] * len(tensor))]
        if not tokens[-1] or not entries[-1]:
            return None if tokens[-1] or len(tensor) else [0] * (rows + 1)
        scaled = [entry * tokens[-1] for entry in entries]
        found = [bisect_left(scaled, token * entries[-1]) for token in tokens]
        return [end if scaled[end] == token * entries[-1] else None for end, token in zip(found, tokens, strict=True)]

    def _counted_ends(
        self,
        path: Path,
        batch: Mapping[str, Any],
        rows: int,
        tensors: Mapping[Path, torch.Tensor],
        places: Mapping[Path, int | None | _Ends],
        asked: tuple[Path, ...],
    ) -> _Ends:
        """Return where rows end in an argument that another one, or a function, counts the entries of."""
        count, ends = self._dim_of(path), list[int | None](range(rows + 1))
        if callable(count):
            counts = _numbers(path, _called(path, count, batch))
        else:
            assert isinstance(count, str)
            if count not in tensors or count in asked or count == path:
                raise BuildError(
                    f"batch_dims[{path!r}] is {count!r}, which is no other tensor of the batch; it has {', '.join(batch)}"
                )
            counts, place = _numbers(path, tensors[count]), places[count]
            if place == []:
                ends = self._counted_ends(count, batch, rows, tensors, places, (*asked, path))
            elif isinstance(place, list):
                ends = place
            elif place != 0:
                raise BuildError(f"batch_dims[{path!r}] is {count!r}, which does not have the rows in dimension 0")
        if len(counts) != ends[-1]:
            raise BuildError(f"batch_dims[{path!r}] counts the entries of {len(counts)} rows, but the batch has {ends[-1]}")
        sums = [0, *accumulate(counts)]
        if sums[-1] != len(tensors[path]):
            raise BuildError(f"{path!r} has {len(tensors[path])} entries, but by batch_dims the rows have {sums[-1]}")
        return [None if end is None else sums[end] for end in ends]

    def _cut(self, batch: Mapping[str, Any], places: Mapping[Path, int | None | _Ends], sizes: Sequence[int]) -> list[Batch]:
        starts = [0, *accumulate(sizes)]

        def piece(start: int, stop: int, path: Path, tensor: torch.Tensor) -> torch.Tensor:
            place = places.get(path)
            if isinstance(place, list):
                first, last = place[start], place[stop]
                if first is None or last is None:
                    raise BuildError(
                        f"where the {len(tensor)} entries of {path!r} are cut between rows cannot be told from the tokens in "
                        f"'input_ids'; {_REMEDY.format(name=path.partition('.')[0])}, or what counts its entries for each row"
                    )
                return tensor.detach()[first:last]
            return tensor.detach() if place is None else tensor.detach().narrow(place, start, stop - start)

        parts = []
        for start, stop in zip(starts, starts[1:], strict=False):
            part = with_tensors(dict(batch), partial(piece, start, stop))
            for name in self._lists(batch):
                if self._given[name] is not None:
                    part[name] = batch[name][start:stop]
            if "input_ids" in part:  # as a processor does it, a batch without images has no argument for them
                part = {name: value for name, value in part.items() if not (name in _OF_TOKENS and _is_empty(value))}
            parts.append(part)
        return parts


def _is_empty(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and not len(value)


def _size(path: Path, value: Any, dim: int) -> int:
    """Return the size of an argument in the dimension of its rows."""
    if not isinstance(value, torch.Tensor):
        if dim != 0:
            raise BuildError(f"batch_dims[{path!r}] is {dim}, but the argument is a {type(value).__name__}; give 0 or None")
        return len(value)
    if not -value.dim() <= dim < value.dim():
        raise BuildError(f"batch_dims[{path!r}] is {dim}, but the argument has {value.dim()} dimensions")
    return value.shape[dim]


def _numbers(path: Path, counts: Any) -> list[int]:
    """Return counts as a list; of several sizes in each entry, as of a grid, their product."""
    found = torch.as_tensor(counts)
    if found.is_floating_point() or found.dim() == 0:
        raise BuildError(f"batch_dims[{path!r}] gives no whole number for each row, but {counts!r}")
    return found.flatten(1).prod(1).tolist() if found.dim() > 1 else found.tolist()


def _called(path: Path, count: Callable[..., Any], batch: Mapping[str, Any]) -> Any:
    """Call a function with the arguments of the batch that it names."""
    names = list(inspect.signature(count).parameters)
    if missing := [name for name in names if name not in batch]:
        raise BuildError(f"the function of batch_dims[{path!r}] takes {missing[0]!r}; the batch has {', '.join(batch)}")
    return count(*(batch[name] for name in names))
