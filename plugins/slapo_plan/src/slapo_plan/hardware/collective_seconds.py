"""Seconds of collectives and messages between devices, and the bytes that they send over each kind of link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil, log2
from typing import NamedTuple

from ..records import CollectiveRecord
from .cluster_parts import Link
from .description import Hardware
from .rate_curve import Curve

_VOLUME = {"all_reduce": 2.0}
"""Copies of the tensor that pass a link in the limit of many ranks; 1 for all other kinds."""


def collective_seconds(record: CollectiveRecord, hardware: Hardware) -> float:
    """Return the seconds of one collective or message; 0 for a group of one rank.

    Within a node, measured curves are read where the hardware has them. Otherwise a ring or a tree is assumed, whichever is
    faster. A group over several nodes works hierarchically: its devices of a node share the transfers between nodes, and the
    transfers within nodes run beside them. A device has its own share of the network, so that groups that cross it at the
    same time, one for each device of a node, do not slow each other.

    Args:
        record: The collective; its global ranks decide which links it uses.
        hardware: The cluster.
    """
    count = len(record.ranks)
    if count < 2 or (record.kind == "send" and record.ranks[0] == record.ranks[1]):
        return 0.0
    nodes, local = _nodes_of(record.ranks, hardware)
    if nodes > 1:
        return _between_nodes(record, hardware, nodes, local)
    if (curve := _measured_seconds(record.kind, count, hardware)) is not None:
        return curve.at(record.nbytes)
    bandwidth = _bandwidth(hardware.link, record.kind, count, hardware.devices_per_node)
    return _within(record.kind, record.nbytes, count, bandwidth, hardware.link.latency)


class LinkBytes(NamedTuple):
    """Bytes that one rank of a group sends in one collective, the mean over the ranks of the group.

    Args:
        within: Bytes over the links of its node.
        between: Bytes over the network to other nodes.
    """

    within: float
    between: float


def _nodes_of(ranks: Sequence[int], hardware: Hardware) -> tuple[int, int]:
    """Return the number of nodes of some global ranks, and the number of these ranks in the node that has the fewest."""
    per_node = Counter(map(hardware.node_of, ranks))
    return len(per_node), min(per_node.values())


def link_bytes(kind: str, nbytes: int, count: int, nodes: int = 1, local: int = 1) -> LinkBytes:
    """Return the bytes that a rank sends, by the algorithms that ``collective_seconds`` assumes; rings and trees send as many.

    Args:
        kind: As in ``CollectiveRecord``; of a message, the bytes of its sender.
        nbytes: Bytes of the whole tensor.
        count: Number of ranks.
        nodes: Number of nodes of the group.
        local: Number of its ranks in a node, if there are several nodes.
    """
    if kind == "send":
        return LinkBytes(0.0, nbytes) if nodes > 1 else LinkBytes(nbytes, 0.0)
    if nodes == 1:
        return LinkBytes(_share(kind, nbytes, count), 0.0)
    if kind == "all_to_all":
        return LinkBytes(nbytes * (local - 1) / count, nbytes * (count - local) / count)
    return LinkBytes(_share(kind, nbytes, local), _share(kind, nbytes / local, nodes))


def _share(kind: str, nbytes: float, count: int) -> float:
    """Return the bytes that each of so many ranks sends, in the mean."""
    copies = 1 / count if kind in ("gather", "scatter") else _VOLUME.get(kind, 1.0)  # each rank's part passes one link
    return copies * nbytes * (count - 1) / count


def _measured_seconds(kind: str, count: int, hardware: Hardware) -> Curve | None:
    """Return the curve of a collective of so many ranks; if none was measured, that of the next larger or the largest group."""
    if hardware.busy_measurements is None:
        return None
    named = (key.split() for key in hardware.busy_measurements.collectives)
    sizes = sorted(int(size) for name, size in named if name == _measured_kind(kind))
    if not sizes:
        return None
    size = next((size for size in sizes if size >= count), sizes[-1])
    return hardware.busy_measurements.collectives[f"{_measured_kind(kind)} {size}"]


def _measured_kind(kind: str) -> str:
    """Return the measured kind that stands for a kind."""
    return {"broadcast": "all_gather", "reduce": "all_reduce", "gather": "all_gather", "scatter": "all_gather"}.get(kind, kind)


def _bandwidth(link: Link, kind: str, count: int, devices: int) -> float:
    """Return the bytes a second of each device of a group of a node."""
    bandwidth = link.bandwidth * link.efficiency
    if link.topology == "all-to-all" and devices > 1:
        return bandwidth * (count - 1) / (devices - 1)
    if link.topology == "ring" and (kind == "send" or count < devices):
        return bandwidth / 2
    return bandwidth


def _within(kind: str, nbytes: int, count: int, bandwidth: float, latency: float) -> float:
    """Return the seconds over one kind of link."""
    hops = ceil(log2(count))
    if kind == "send":
        return latency + nbytes / bandwidth
    if kind in ("broadcast", "reduce"):
        return hops * latency + nbytes / bandwidth
    if kind == "all_to_all":
        return latency + nbytes * (count - 1) / count / bandwidth
    moved = _VOLUME.get(kind, 1.0) * nbytes
    rounds = 2 if kind == "all_reduce" else 1
    ring = rounds * (count - 1) * latency + moved * (count - 1) / count / bandwidth
    if kind != "all_reduce":
        return ring
    return min(ring, rounds * hops * latency + moved / bandwidth)


def _between_nodes(record: CollectiveRecord, hardware: Hardware, nodes: int, local: int) -> float:
    """Return the seconds of a group with ``local`` devices in each of several nodes."""
    kind, nbytes, network = record.kind, record.nbytes, hardware.network
    bandwidth = network.bandwidth * network.efficiency
    if kind == "send":
        return network.latency + nbytes / bandwidth
    count = len(record.ranks)
    inside = _bandwidth(hardware.link, kind, local, hardware.devices_per_node) if local > 1 else 1.0
    if kind == "all_to_all":
        across, beside = nbytes * (count - local) / count / bandwidth, nbytes * (local - 1) / count / inside
        return network.latency + max(across, beside)
    across = _within(kind, nbytes // local, nodes, bandwidth, network.latency)
    if local == 1:
        return across
    beside = _within(kind, nbytes, local, inside, hardware.link.latency)
    begin = _within(kind, 0, local, inside, hardware.link.latency)  # neither part starts before the first messages of the other
    return max(across + begin, beside + network.latency)
