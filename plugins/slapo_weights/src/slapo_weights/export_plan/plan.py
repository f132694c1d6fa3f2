"""Plan of an export, equal on every rank: tensors, conversions and files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from slapo_core import BuildError

from ..huggingface.unmodified_model import ConversionGroup, UnmodifiedModel, identity_groups
from ..safetensors_files.writer import METADATA, TensorEntry
from .export_source import ExportSource
from .tensor_origins import PieceDescription, WholeTensor, by_written_name, description_of, origins, whole_of

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_BUNDLE = 1 << 26


class ExportPlan(NamedTuple):
    """Plan of an export.

    Args:
        wholes: The model's tensors, by the names of the conversions' sources.
        groups: Conversions of these tensors, in order.
        files: Tensors per file, in files of about the requested size.
        dtype: Dtype of the first floating-point tensor.
    """

    wholes: dict[str, WholeTensor]
    groups: list[ConversionGroup]
    files: list[list[TensorEntry]]
    unmodified: UnmodifiedModel | None
    dtype: torch.dtype | None

    def bundles(self) -> Iterator[list[ConversionGroup]]:
        """Yield the groups in bundles of some megabytes, so that the first rank never holds more at a time."""
        bundle: list[ConversionGroup] = []
        size = 0
        for group in self.groups:
            own = sum(self.wholes[name].size for name in group.sources)
            if bundle and size + own > _BUNDLE:
                yield bundle
                bundle, size = [], 0
            bundle.append(group)
            size += own
        if bundle:
            yield bundle


def make_plan(
    source: ExportSource, everyone: Sequence[Mapping[str, PieceDescription]], dtype: torch.dtype | None, max_shard_size: int
) -> ExportPlan:
    """Return the plan for the pieces that all ranks hold.

    Raises:
        BuildError: the pieces are not the unmodified model's tensors.
    """
    unmodified = UnmodifiedModel.of(source.model)
    shapes = unmodified.shapes() if unmodified is not None else {}
    wholes, first = {}, None
    for name, origin in by_written_name(origins(source, (key for own in everyone for key in own)), unmodified).items():
        found = description_of(origin.key, everyone)
        if found is None:
            raise BuildError(
                f"export_weights: no rank has values of {origin.key!r}; build an engine of the schedule, or call "
                "consolidate_model, to give it some"
            )
        if name == METADATA:
            raise BuildError(f"export_weights: a tensor has the name {name!r}, which safetensors files reserve")
        there = origin.shape(found.full_shape)
        shape = shapes.get(name, there)
        if shape != there:
            _check_padding(name, there, shape, unmodified)
        kind = dtype if dtype is not None and found.dtype.is_floating_point else found.dtype
        first = kind if first is None and kind.is_floating_point else first
        wholes[name] = whole_of(name, origin, everyone, shape, kind)
    stand_ins = {name: torch.empty(whole.shape, dtype=whole.dtype, device="meta") for name, whole in wholes.items()}
    groups = identity_groups(stand_ins) if unmodified is None else unmodified.groups(stand_ins)
    for entry in (entry for group in groups for entry in group.targets):
        entry.check()
    return ExportPlan(wholes, groups, _files(groups, max_shard_size), unmodified, first)


def parse_size(given: int | str) -> int:
    """Return a size in bytes; raise ``BuildError`` if the argument is not a size."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(given))
    size = int(float(match[1]) * _UNITS.get(match[2].upper(), 0)) if match and not isinstance(given, bool) else 0
    if size < 1:
        raise BuildError(f"export_weights: max_shard_size is {given!r}; give a number of bytes, or a text like '5GB'")
    return size


def _check_padding(name: str, there: tuple[int, ...], wanted: tuple[int, ...], unmodified: UnmodifiedModel | None) -> None:
    """Refuse a shape that differs from the unmodified model's, other than by padded rows of a vocabulary."""
    assert unmodified is not None
    longer = len(there) == len(wanted) and there[1:] == wanted[1:] and there[:1] > wanted[:1]
    if not (longer and name in unmodified.vocabulary()):
        raise BuildError(
            f"export_weights: {name!r} has shape {there}, and {wanted} in {unmodified.name} as its config says; only the "
            "rows of a padded vocabulary are cut off"
        )


def _files(groups: list[ConversionGroup], max_shard_size: int) -> list[list[TensorEntry]]:
    """Distribute tensors over files as ``huggingface_hub`` does: in order; one larger than the limit gets a file of its own."""
    files: list[list[TensorEntry]] = []
    current: list[TensorEntry] = []
    size = 0
    for entry in (entry for group in groups for entry in group.targets):
        if entry.size > max_shard_size:
            files.append([entry])
            continue
        if size + entry.size > max_shard_size:
            files.append(current)
            current, size = [], 0
        current.append(entry)
        size += entry.size
    return [*files, current] if current or not files else files
