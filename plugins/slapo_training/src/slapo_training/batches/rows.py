"""Splits of a batch by its rows, and joins of its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from slapo_core import BuildError

from .nested_tensors import Path, tensors_of, with_tensors
from .row_dims import OF_IMAGES, Dim, Place, RowDims, is_list, option_name_of, size_of, without_absent_images

Batch = dict[str, Any]

_ROWS_FIRST = ("labels", "input_ids")
"""Arguments that have rows in dimension 0, whatever the sizes of other arguments."""
_TOKENS = {"image": ("image_token_id", "image_token_index"), "video": ("video_token_id", "video_token_index")}
"""Names of token ids in the configs of Transformers' models."""


def check_dims(given: Any) -> None:
    """Raise ``BuildError`` for a value of ``batch_dims`` that cannot work."""
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise BuildError(f"batch_dims is {given!r}; give {{name of an argument: dimension of its rows}}")
    for name, dim in given.items():
        is_dim = dim is None or callable(dim) or (isinstance(dim, int | str) and not isinstance(dim, bool))
        if not isinstance(name, str) or not is_dim:
            raise BuildError(
                f"batch_dims[{name!r}] is {dim!r}; give a dimension, None for what goes whole to each micro-batch, the name of "
                "an argument that counts rows, or a function that does"
            )


class BatchRows:
    """Rows of the batches of one engine.

    Args:
        given: The option ``batch_dims``; ``RowDims`` locates the rows in all other arguments.
    """

    def __init__(self, given: Mapping[str, Dim] | None = None) -> None:
        self._given = dict(given or {})
        self._tokens: dict[str, int] = {}
        self._known: dict[Path, int | None] = {}
        self._counted: set[Path] = set()

    def learn_tokens(self, model: nn.Module) -> None:
        """Read the token ids of images and videos from a model's config."""
        config = getattr(model, "config", None)
        for kind, names in _TOKENS.items():
            found = [value for name in names if isinstance(value := getattr(config, name, None), int)]
            if found:
                self._tokens[kind] = found[0]

    def is_given(self, path: Path) -> bool:
        return option_name_of(path, self._given) is not None

    def count(self, batch: Mapping[str, Any]) -> int | None:
        """Return the number of rows; None if no tensor has rows.

        Raises:
            BuildError: arguments have different numbers of rows by the option.
        """
        tensors = {path: tensor for path, tensor in tensors_of(dict(batch)).items() if tensor.dim()}
        told: dict[Path, int] = {}
        for path, value in [*tensors.items(), *((name, batch[name]) for name in self._lists(batch))]:
            name = option_name_of(path, self._given)
            if name is not None and isinstance(dim := self._given[name], int):
                told[path] = size_of(path, value, dim)
        if len(set(told.values())) > 1:
            raise BuildError(f"arguments of one batch have different numbers of rows by batch_dims: {told}")
        if told:
            return next(iter(told.values()))
        free = {path: tensor for path, tensor in tensors.items() if not self.is_given(path)}
        if first := [free[name].shape[0] for name in _ROWS_FIRST if name in free]:
            return first[0]
        dims = {path: self._known.get(path, 0) for path in (free or tensors) if path not in self._counted}
        sizes = Counter(tensors[path].shape[dim] for path, dim in dims.items() if dim is not None and dim < tensors[path].dim())
        return max(sizes, key=sizes.__getitem__) if sizes else None

    def split(self, batch: Mapping[str, Any], parts: int) -> list[Batch]:
        """Split a batch into parts with equally many rows.

        Raises:
            BuildError: the batch has no rows; or, with several parts, their number is not divisible, or their place in an
                argument is not certain.
        """
        rows = self.count(batch)
        if rows == 0:
            raise BuildError("the batch has no rows; leave it out")
        if parts == 1 or rows is None:
            return [dict(batch) for _ in range(parts)]
        places = self._places(batch, is_part=False)
        if rows % parts:
            raise BuildError(
                f"{rows} rows cannot be cut into {parts} equal micro-batches; give a batch of a multiple of {parts} rows"
            )
        return self._cut(batch, places, [rows // parts] * parts)

    def division_problem(self, part: Mapping[str, Any]) -> str | None:
        """Return the reason why a part of a batch cannot be split between any two of its rows, or None."""
        try:
            places = self._places(part, is_part=True)
        except BuildError as err:
            return str(err)
        uncertain = (path for path, place in places.items() if isinstance(place, list) and None in place)
        return next(map(_uncertain_rows_message, uncertain), None)

    def cut(self, batch: Mapping[str, Any], sizes: Sequence[int]) -> list[Batch]:
        """Split a part of a batch by numbers of rows; raise ``BuildError`` if the place of the rows is not certain."""
        return self._cut(batch, self._places(batch, is_part=True), sizes)

    def join(self, parts: Sequence[Mapping[str, Any]]) -> Batch:
        given: Batch = {}
        for part in reversed(parts):  # a part without images lacks their arguments
            given.update(part)
        tensors = [tensors_of(dict(part)) for part in parts]

        def join_tensor(path: Path, tensor: torch.Tensor) -> torch.Tensor:
            dim = 0 if path in self._counted else self._known.get(path)
            found = [own[path] for own in tensors if path in own]
            return tensor if dim is None else torch.cat(_pad_images(found) if path in OF_IMAGES else found, dim)

        whole: Batch = with_tensors(given, join_tensor)
        for name in self._lists(given):
            if self._given[name] is not None:
                whole[name] = type(given[name])(each for part in parts for each in part[name])
        return whole

    def without_variable_sizes(self, batch: Mapping[str, Any]) -> Batch:
        """Return a batch without the arguments whose size may differ between replicas."""
        counted = {name for name, dim in self._given.items() if isinstance(dim, str) or callable(dim)}
        counted |= set(OF_IMAGES) if self._tokens else set()
        return {name: value for name, value in batch.items() if name not in counted}

    def _lists(self, batch: Mapping[str, Any]) -> Iterator[str]:
        """Iterate over the names of lists that the option names."""
        return (name for name, dim in self._given.items() if is_list(batch.get(name), dim))

    def _places(self, batch: Mapping[str, Any], is_part: bool) -> dict[Path, Place]:
        """Return the places of rows, and record them."""
        places = RowDims(batch, self.count(batch) or 0, self._given, self._tokens, self._known, is_part).find()
        for path, place in places.items():
            if isinstance(place, list):
                self._counted.add(path)
            else:
                self._known[path] = place
                self._counted.discard(path)
        return places

    def _cut(self, batch: Mapping[str, Any], places: Mapping[Path, Place], sizes: Sequence[int]) -> list[Batch]:
        starts, parts = [0, *accumulate(sizes)], []
        for start, stop in zip(starts, starts[1:], strict=False):
            part: Batch = with_tensors(dict(batch), partial(_narrow_rows, places, start, stop))
            for name in self._lists(batch):
                if self._given[name] is not None:
                    part[name] = batch[name][start:stop]
            parts.append(without_absent_images(part, self._tokens.get("image")))
        return parts


def _narrow_rows(places: Mapping[Path, Place], start: int, stop: int, path: Path, tensor: torch.Tensor) -> torch.Tensor:
    place = places.get(path)
    if place is None:
        return tensor.detach()
    if isinstance(place, int):
        return tensor.detach().narrow(place, start, stop - start)
    first, last = place[start], place[stop]
    if first is None or last is None:
        raise BuildError(_uncertain_rows_message(path))
    return tensor.detach()[first:last]


def _pad_images(images: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Pad the images of each row by zeros to the same number."""
    most = max(each.shape[1] for each in images) if images[0].dim() > 1 else 0
    if all(each.dim() < 2 or each.shape[1] == most for each in images):
        return list(images)
    return [torch.cat([each, each.new_zeros(len(each), most - each.shape[1], *each.shape[2:])], 1) for each in images]


def _uncertain_rows_message(path: Path) -> str:
    return (
        f"where the entries of {path!r} are cut between rows cannot be told from the tokens in 'input_ids'; say with "
        f"batch_dims={{{path.partition('.')[0]!r}: ...}} what counts its entries for each row"
    )
