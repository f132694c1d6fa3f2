"""Seconds of operators on a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..records import CollectiveRecord, OperatorRecord, Work
from .cluster_parts import Measurements
from .collective_seconds import collective_seconds
from .description import Hardware
from .rate_curve import Curve


class WorkSeconds(NamedTuple):
    """Seconds of the work of one rank.

    Args:
        compute: Seconds of operators.
        communication: Seconds of collectives that the rank waits for.
        overlapped: Seconds of collectives beside which it goes on computing.
    """

    compute: float
    communication: float
    overlapped: float


def work_seconds(work: Iterable[Work], hardware: Hardware) -> WorkSeconds:
    """Return the seconds of operators and collectives in order; equal records are computed once.

    Overlapped collectives of a pass are started by hooks in Python, as those of FSDP units: computation waits for that code, as
    for that of the reductions over the same ranks.
    """
    compute = communication = overlapped = 0.0
    counts = Counter(work)
    of_units = {each.ranks for each in counts if isinstance(each, CollectiveRecord) and each.overlapped}
    for record, count in counts.items():
        if isinstance(record, OperatorRecord):
            compute += count * operator_seconds(record, hardware)
            continue
        if record.overlapped:
            overlapped += count * collective_seconds(record, hardware)
        else:
            communication += count * collective_seconds(record, hardware)
        if record.overlapped or (record.kind == "reduce_scatter" and record.ranks in of_units):
            compute += count * hardware.unit_seconds
    return WorkSeconds(compute, communication, overlapped)


def operator_seconds(record: OperatorRecord, hardware: Hardware) -> float:
    """Return the seconds of one call: its launch, and the longer of computing and moving its bytes.

    Args:
        record: The call.
        hardware: The device. With measurements, its curves for ``busy`` ranks are read.
    """
    measured = hardware.busy_measurements
    if measured is None:
        return hardware.launch_seconds + max(_ideal_compute(record, hardware), _ideal_memory(record, hardware))
    launch = measured.launch_seconds + (measured.hook_seconds if record.hooked else 0.0)
    if record.kind == "pointwise":
        slower = measured.operators.get(record.name, 1.0)
        curve = measured.in_place if record.name.endswith("_") else measured.pointwise
        return launch + slower * record.nbytes / curve.at(record.nbytes)
    moving = record.nbytes / max(rate for _, rate in measured.in_place.points)
    return launch + max(record.flops / _measured_rate(record, hardware, measured), moving)


def _ideal_compute(record: OperatorRecord, hardware: Hardware) -> float:
    efficiency = hardware.efficiency
    share = efficiency.attention if record.kind == "attention" else efficiency.matmul
    computed = record.flops * (0.5 if _is_causal(record) else 1.0)
    return (computed + (efficiency.half_flops if record.flops else 0)) / (share * hardware.peak_flops(record.dtype))


def _ideal_memory(record: OperatorRecord, hardware: Hardware) -> float:
    return (record.nbytes + hardware.efficiency.half_bytes) / (hardware.efficiency.memory * hardware.bandwidth)


def _is_causal(record: OperatorRecord) -> bool:
    return record.name.endswith(".causal")


def _measured_rate(record: OperatorRecord, hardware: Hardware, measured: Measurements) -> float:
    """Return the FLOP/s of a product or an attention, by the FLOPs of one product of a batch or of one head."""
    if record.kind == "attention" and record.shape and measured.attention:
        direction = " backward" if "backward" in record.name else " forward"
        kinds = [" causal" + direction, direction] if _is_causal(record) else [direction]
        return _rate(record, hardware, measured.attention, kinds, record.shape[0] * record.shape[1])
    return _rate(record, hardware, measured.matmul, [""], record.shape[0] if record.shape else 1)


def _rate(record: OperatorRecord, hardware: Hardware, curves: Mapping[str, Curve], kinds: Sequence[str], parts: int) -> float:
    """Return the rate of the first kind that was measured; of a missing type, that of float32 scaled by their peaks."""
    dtype = str(record.dtype).removeprefix("torch.")
    peak = hardware.peak_flops(record.dtype)
    for kind in kinds:
        for known, scale in ((dtype, 1.0), ("float32", peak / hardware.flops["float32"])):
            if (curve := curves.get(known + kind)) is not None:
                return curve.at(record.flops / max(1, parts)) * scale
    return peak * hardware.efficiency.matmul
