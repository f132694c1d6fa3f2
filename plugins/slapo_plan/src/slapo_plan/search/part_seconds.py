"""Seconds and floating-point operations of the parts of a model on a device; each is computed once."""

from __future__ import annotations

from ..estimation.rank_work import main_dtype, model_flops_of
from ..estimation.step_time import pass_seconds
from ..hardware import Hardware, collective_seconds
from ..recording.segments import PassRecord
from ..records import CollectiveRecord
from .model_record import ModelRecord, Part


class PartSeconds:
    """Seconds on a device.

    Args:
        hardware: The device.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self._known: dict[int, tuple[PassRecord, float]] = {}
        self._collectives: dict[CollectiveRecord, float] = {}
        self._flops: dict[int, tuple[ModelRecord, int]] = {}
        self._peaks: dict[int, tuple[ModelRecord, float]] = {}

    def __call__(self, record: PassRecord) -> float:
        """Return the seconds of a pass, its collectives included."""
        if id(record) not in self._known:
            self._known[id(record)] = record, pass_seconds(record, self.hardware)
        return self._known[id(record)][1]

    def collective(self, record: CollectiveRecord) -> float:
        """Return the seconds of a collective."""
        if record not in self._collectives:
            self._collectives[record] = collective_seconds(record, self.hardware)
        return self._collectives[record]

    def flops(self, record: ModelRecord) -> int:
        """Return the operations of a forward of the whole model and of its backward, on one rank of each stage."""
        if id(record) not in self._flops:
            parts = [record.first.entry, *record.blocks["none"], record.last.exit]
            known = {id(each): _flops_of_passes(each) for each in dict.fromkeys(parts)}
            self._flops[id(record)] = record, sum(known[id(each)] for each in parts)
        return self._flops[id(record)][1]

    def peak_flops(self, record: ModelRecord) -> float:
        """Return the peak FLOP/s of the type in which the forward computes most operations."""
        if id(record) not in self._peaks:
            parts = dict.fromkeys([record.first.entry, *record.blocks["none"], record.last.exit])
            dtype = main_dtype(each.forward for each in parts)
            self._peaks[id(record)] = record, self.hardware.peak_flops(dtype)
        return self._peaks[id(record)][1]


def _flops_of_passes(part: Part) -> int:
    return model_flops_of((*part.forward.work, *part.next_backward.work))
