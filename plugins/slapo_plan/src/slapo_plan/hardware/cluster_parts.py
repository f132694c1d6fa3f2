"""Parts of the description of a cluster: links, assumed efficiencies, and measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .rate_curve import Curve


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
    """Measured rates and seconds, taken while a number of ranks of a node worked at the same time.

    Args:
        ranks: Number of these ranks.
        launch_seconds: Seconds of one tiny operator of a module, forward or backward, with all that Python does for it.
        matmul: FLOP/s by FLOPs of one product, by name of the type.
        attention: FLOP/s by FLOPs of one head, by name of the type and ``" forward"``, ``" backward"``,
            ``" causal forward"`` or ``" causal backward"``; those that a causal kernel skips are counted.
        pointwise: Bytes a second of an addition, by bytes.
        in_place: Bytes a second of an addition in place, by bytes.
        operators: Seconds of an operator in units of an addition of as many bytes, in place if its name ends in ``_``.
        collectives: Seconds by bytes, by kind and number of ranks, e.g. ``"all_reduce 2"``: the mean among ranks that compute.
        hook_seconds: Seconds that an operator takes longer under a checkpoint, whose hooks see the tensors that it saves.
        unit_seconds: Seconds of Python for each collective of an FSDP unit that is gathered as it runs.
    """

    ranks: int
    launch_seconds: float
    matmul: Mapping[str, Curve]
    attention: Mapping[str, Curve]
    pointwise: Curve
    in_place: Curve
    operators: Mapping[str, float]
    collectives: Mapping[str, Curve]
    hook_seconds: float = 0.0
    unit_seconds: float = 0.0
