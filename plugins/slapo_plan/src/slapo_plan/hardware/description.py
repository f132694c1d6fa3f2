"""Description of a cluster: devices, nodes, links, and what was measured on them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from slapo_core import SlapoError, UnknownNameError

from .rate_curve import Curve

_FILES = Path(__file__).parent / "files"


@dataclass(frozen=True)
class Link:
    """Connection of each device to others.

    Args:
        bandwidth: Bytes a second that a device can send, and receive at the same time.
        latency: Seconds of the shortest message.
        topology: ``"switched"``: any device sends to any other at full bandwidth. ``"all-to-all"``: an equal share of the
            bandwidth leads to each other device of the node. ``"ring"``: to two neighbours.
        efficiency: Share of the bandwidth that long transfers reach.
    """

    bandwidth: float
    latency: float
    topology: str = "switched"
    efficiency: float = 1.0


@dataclass(frozen=True)
class Efficiency:
    """Shares of the peak that large operators reach where nothing was measured.

    Args:
        matmul: Share of the peak FLOP/s of a large product.
        attention: Share of the peak FLOP/s of a fused attention.
        memory: Share of the memory bandwidth of a large element-wise operator.
        half_flops: FLOPs of a product that reaches half of that share.
        half_bytes: Bytes of an element-wise operator that reaches half of that share.
    """

    matmul: float = 0.7
    attention: float = 0.4
    memory: float = 0.8
    half_flops: float = 0.0
    half_bytes: float = 0.0


@dataclass(frozen=True)
class Measurements:
    """What was measured while so many ranks of a node worked at the same time.

    Args:
        ranks: Number of these ranks.
        launch_seconds: Seconds of one tiny operator of a module, forward or backward, with all that Python does for it.
        matmul: FLOP/s by FLOPs of one product, by name of the type.
        attention: FLOP/s by FLOPs of one head, by name of the type and ``" forward"`` or ``" backward"``.
        pointwise: Bytes a second of an addition, by bytes.
        in_place: Bytes a second of an addition in place, by bytes.
        operators: Seconds of an operator in units of an addition of as many bytes, in place if its name ends in ``_``.
        collectives: Seconds by bytes, by kind and number of ranks, e.g. ``"all_reduce 2"``.
    """

    ranks: int
    launch_seconds: float
    matmul: Mapping[str, Curve]
    attention: Mapping[str, Curve]
    pointwise: Curve
    in_place: Curve
    operators: Mapping[str, float]
    collectives: Mapping[str, Curve]


@dataclass(frozen=True, eq=False)
class Hardware:
    """A cluster of equal nodes with equal devices.

    Args:
        name: Name, e.g. ``"h100"``.
        memory_bytes: Memory of a device.
        usable_bytes: Part of it that tensors may fill; the rest is for the driver, libraries and fragmentation.
        flops: Dense peak FLOP/s of matrix products by name of the type, e.g. ``"bfloat16"``.
        bandwidth: Bytes a second between a device and its memory.
        launch_seconds: Seconds that each operator takes at least.
        devices_per_node: Number of devices of a node.
        link: Link of a device within its node.
        network: Link of a device to devices of other nodes.
        device_type: ``"cuda"`` or ``"cpu"``.
        efficiency: Shares of the peaks that are reached where nothing was measured.
        measurements: What was measured, by number of busy ranks; empty for the ready files.
        busy: Number of ranks of a node that work at the same time; decides between ``measurements``.
        aliases: Other names.

    Example:
        >>> Hardware.load("h100-80g").devices_per_node
        8
        >>> Hardware.load("h101")
        Traceback (most recent call last):
        slapo_core.reporting.errors.UnknownNameError: no hardware 'h101'; did you mean 'h100'?; available: ...
    """

    name: str
    memory_bytes: int
    usable_bytes: int
    flops: Mapping[str, float]
    bandwidth: float
    launch_seconds: float
    devices_per_node: int
    link: Link
    network: Link
    device_type: str = "cuda"
    efficiency: Efficiency = field(default_factory=Efficiency)
    measurements: tuple[Measurements, ...] = ()
    busy: int = 1
    aliases: tuple[str, ...] = ()

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the ready files."""
        return sorted(path.stem for path in _FILES.glob("*.toml"))

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str]) -> Hardware:
        """Return the hardware of a ready file by its name or an alias, or of a file by its path, which ends in ``.toml``.

        ``"this-machine"`` has the memory and the number of cores of the machine it is loaded on.

        Raises:
            UnknownNameError: no such name.
            SlapoError: no such file, or a key of the file is missing, unknown or of a wrong kind.
        """
        from .file_format import read  # noqa: PLC0415  it makes a Hardware

        given = os.fspath(name_or_path)
        if given.endswith(".toml"):
            return read(Path(given))
        files = {path.stem: path for path in _FILES.glob("*.toml")}
        if given not in files:
            aliases = {alias: found for found in map(read, files.values()) for alias in found.aliases}
            if given not in aliases:
                raise UnknownNameError.of("hardware", given, [*files, *aliases, "a path that ends in .toml"])
            return aliases[given]
        found = read(files[given])
        return _of_this_machine(found) if given == "this-machine" else found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that ``load`` reads.

        Raises:
            SlapoError: the path does not end in ``.toml``, or cannot be written.
        """
        from .file_format import text  # noqa: PLC0415  it imports this module

        if not os.fspath(path).endswith(".toml"):
            raise SlapoError(f"hardware file {os.fspath(path)!r}: give a path that ends in .toml")
        try:
            Path(path).write_text(text(self), encoding="utf-8")
        except OSError as err:
            raise SlapoError(f"hardware file {os.fspath(path)!r} cannot be written: {err.strerror}") from err

    def with_busy(self, ranks: int) -> Hardware:
        """Return this hardware while so many ranks of each node work at the same time."""
        return self if ranks == self.busy else replace(self, busy=ranks)

    @cached_property
    def measured(self) -> Measurements | None:
        """Measurements with at least as many busy ranks as now, or with the most; None if nothing was measured."""
        enough = [each for each in self.measurements if each.ranks >= self.busy]
        if enough:
            return min(enough, key=lambda each: each.ranks)
        return max(self.measurements, key=lambda each: each.ranks, default=None)

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Return the peak FLOP/s of products of a type; a type that the file lacks counts as ``float32``."""
        return self.flops.get(str(dtype).removeprefix("torch."), self.flops["float32"])

    def node_of(self, rank: int) -> int:
        """Return the node of a global rank: ranks fill one node after the other."""
        return rank // self.devices_per_node

    def __repr__(self) -> str:
        return f"Hardware({self.name!r})"


def _of_this_machine(found: Hardware) -> Hardware:
    cores: Any = getattr(os, "sched_getaffinity", None)
    devices = len(cores(0)) if cores else os.cpu_count() or 1
    memory = (
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else found.memory_bytes * devices
    )
    share = memory // devices
    usable = int(share * found.usable_bytes / found.memory_bytes)
    return replace(found, devices_per_node=devices, memory_bytes=share, usable_bytes=usable)
