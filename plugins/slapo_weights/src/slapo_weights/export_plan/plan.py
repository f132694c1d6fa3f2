"""What an export writes: the same on every rank."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from slapo_core import BuildError

from ..huggingface.save_conversion import Group, unconverted
from ..huggingface.unmodified_model import Unmodified
from ..safetensors_files.writer import METADATA, Layout
from .export_source import Source
from .tensor_origins import by_written_name, origins
from .whole_tensors import Described, Whole, described, whole_of

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_BUNDLE = 1 << 26


class Plan(NamedTuple):
    """What is written.

    Args:
        wholes: The tensors of the model, by the names that groups take them under.
        groups: What becomes of them, in order.
        files: The tensors of each file, all but the last about as many bytes as were asked for.
        unmodified: The model of Transformers, or None.
        dtype: Of the first parameter.
    """

    wholes: dict[str, Whole]
    groups: list[Group]
    files: list[list[Layout]]
    unmodified: Unmodified | None
    dtype: torch.dtype | None

    def bundles(self) -> Iterator[list[Group]]:
        """The groups, some megabytes at a time."""
        bundle: list[Group] = []
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


def planned(
    source: Source, everyone: Sequence[Mapping[str, Described]], dtype: torch.dtype | None, max_shard_size: int
) -> Plan:
    """The plan for what all ranks have said that they hold.

    Raises:
        BuildError: what is there is not what the unmodified model has.
    """
    unmodified = Unmodified.of(source.model)
    shapes = unmodified.shapes() if unmodified is not None else {}
    wholes, first = {}, None
    for name, origin in by_written_name(origins(source, (key for own in everyone for key in own)), unmodified).items():
        found = described(origin.key, everyone)
        if found is None:
            raise BuildError(
                f"export_weights: no rank has values of {origin.key!r}; build an engine of the schedule, or call "
                "consolidate_model, to give it some"
            )
        if name == METADATA:
            raise BuildError(f"export_weights: a tensor has the name {name!r}, which safetensors files keep for themselves")
        there = origin.shape(found.full_shape)
        shape = shapes.get(name, there)
        if shape != there:
            _check_padding(name, there, shape, unmodified)
        kind = dtype if dtype is not None and found.dtype.is_floating_point else found.dtype
        first = kind if first is None and kind.is_floating_point else first
        wholes[name] = whole_of(name, origin, everyone, shape, kind)
    stand_ins = {name: torch.empty(whole.shape, dtype=whole.dtype, device="meta") for name, whole in wholes.items()}
    groups = unconverted(stand_ins) if unmodified is None else unmodified.groups(stand_ins)
    for layout in (layout for group in groups for layout in group.targets):
        layout.check()
    return Plan(wholes, groups, _files(groups, max_shard_size), unmodified, first)


def parsed_size(given: int | str) -> int:
    """A number of bytes.

    Raises:
        BuildError: it is none.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(given))
    size = int(float(match[1]) * _UNITS.get(match[2].upper(), 0)) if match and not isinstance(given, bool) else 0
    if size < 1:
        raise BuildError(f"export_weights: max_shard_size is {given!r}; give a number of bytes, or a text like '5GB'")
    return size


def _check_padding(name: str, there: tuple[int, ...], wanted: tuple[int, ...], unmodified: Unmodified | None) -> None:
    """Rows of a vocabulary behind the last token may be more than it has."""
    assert unmodified is not None
    longer = len(there) == len(wanted) and there[1:] == wanted[1:] and there[:1] > wanted[:1]
    if not (longer and name in unmodified.vocabulary()):
        raise BuildError(
            f"export_weights: {name!r} has shape {there}, and {wanted} in {unmodified.name} as its config says; only the "
            "rows of a padded vocabulary are cut off"
        )


def _files(groups: list[Group], max_shard_size: int) -> list[list[Layout]]:
    """As ``huggingface_hub`` deals them out: in order, but one that is larger has a file of its own before the one begun."""
    files: list[list[Layout]] = []
    current: list[Layout] = []
    size = 0
    for layout in (layout for group in groups for layout in group.targets):
        if layout.size > max_shard_size:
            files.append([layout])
            continue
        if size + layout.size > max_shard_size:
            files.append(current)
            current, size = [], 0
        current.append(layout)
        size += layout.size
    return [*files, current] if current or not files else files
