"""Description of a cluster, read from a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from slapo_core import SlapoError, UnknownNameError

from .cluster_parts import Efficiency, Link, Measurements
from .file_format import hardware_text, read_fields

_FILES = Path(__file__).parent / "files"


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
        given = os.fspath(name_or_path)
        if given.endswith(".toml"):
            return cls(**read_fields(Path(given)))
        files = {path.stem: path for path in _FILES.glob("*.toml")}
        if given not in files:
            ready = [read_fields(path) for path in files.values()]
            aliases = {alias: fields for fields in ready for alias in fields["aliases"]}
            if given not in aliases:
                raise UnknownNameError.of("hardware", given, [*files, *aliases, "a path that ends in .toml"])
            return cls(**aliases[given])
        found = cls(**read_fields(files[given]))
        return _of_this_machine(found) if given == "this-machine" else found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that ``load`` reads.

        Raises:
            SlapoError: the path does not end in ``.toml``, or cannot be written.
        """
        if not os.fspath(path).endswith(".toml"):
            raise SlapoError(f"hardware file {os.fspath(path)!r}: give a path that ends in .toml")
        try:
            Path(path).write_text(hardware_text(vars(self)), encoding="utf-8")
        except OSError as err:
            raise SlapoError(f"hardware file {os.fspath(path)!r} cannot be written: {err.strerror}") from err

    def with_busy(self, ranks: int) -> Hardware:
        """Return this hardware while so many ranks of each node work at the same time."""
        return self if ranks == self.busy else replace(self, busy=ranks)

    def for_job(self, ranks: int) -> Hardware:
        """Return this hardware while a job of so many ranks works, which fills one node after the other."""
        return self.with_busy(min(self.devices_per_node, ranks))

    @cached_property
    def busy_measurements(self) -> Measurements | None:
        """Measurements with at least as many busy ranks as now, or with the most; None if nothing was measured."""
        enough = [each for each in self.measurements if each.ranks >= self.busy]
        if enough:
            return min(enough, key=lambda each: each.ranks)
        return max(self.measurements, key=lambda each: each.ranks, default=None)

    @property
    def unit_seconds(self) -> float:
        """Seconds of Python for each collective of an FSDP unit; 0 where nothing was measured."""
        return self.busy_measurements.unit_seconds if self.busy_measurements is not None else 0.0

    @property
    def overlaps(self) -> bool:
        """True if transfers run beside computation; on a CPU they take the time of the cores that compute."""
        return self.device_type != "cpu"

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
