"""Seconds of collectives by size, group and place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slapo_plan.hardware import Curve, Hardware, Link, Measurements, collective_seconds, link_bytes
from slapo_plan.records import CollectiveRecord

FLAT = Curve([[1, 1e10]])
SWITCHED = Link(100e9, 1e-6)
CLUSTER = replace(Hardware.load("h100"), link=SWITCHED, network=Link(10e9, 1e-5), devices_per_node=4)
LARGE = 10**10


def _seconds(kind: str, nbytes: int, ranks: tuple[int, ...], hardware: Hardware = CLUSTER) -> float:
    return collective_seconds(CollectiveRecord(kind, nbytes, ranks), hardware)


NODE, TWO_NODES, ACROSS = (0, 1, 2, 3), tuple(range(8)), (0, 4)


@pytest.mark.parametrize(
    ("kind", "volume"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("broadcast", 1.0),
        ("gather", 0.75),
    ],
)
def test_long_collectives_take_their_volume(kind: str, volume: float) -> None:
    assert _seconds(kind, LARGE, NODE) == pytest.approx(volume * LARGE / 100e9, rel=0.01)


def test_a_group_of_one_sends_nothing() -> None:
    assert _seconds("all_reduce", LARGE, (3,)) == 0
    assert _seconds("send", LARGE, (3, 3)) == 0


def test_short_collectives_take_latency_by_a_tree() -> None:
    assert _seconds("all_reduce", 8, NODE) == pytest.approx(4e-6, rel=0.01)


def test_messages_take_the_link_between_their_ends() -> None:
    assert _seconds("send", LARGE, (0, 3)) == pytest.approx(0.1, rel=0.01)
    assert _seconds("send", LARGE, (3, 4)) == pytest.approx(1.0, rel=0.01)


def test_devices_of_a_node_share_the_transfers_to_other_nodes() -> None:
    # each device moves a quarter between the nodes at 10 GB/s, beside 1.5 of all within a node at 100 GB/s
    assert _seconds("all_reduce", LARGE, TWO_NODES) == pytest.approx(max(LARGE / 4 / 10e9, 1.5 * LARGE / 100e9), rel=0.01)
    assert _seconds("all_reduce", LARGE, ACROSS) == pytest.approx(LARGE / 10e9, rel=0.01)


def test_an_all_to_all_sends_what_leaves_the_node_over_the_network() -> None:
    assert _seconds("all_to_all", LARGE, TWO_NODES) == pytest.approx(LARGE / 2 / 10e9, rel=0.01)


def test_in_a_full_mesh_one_peer_has_one_link() -> None:
    mesh = replace(CLUSTER, link=Link(90e9, 1e-6, "all-to-all"))
    assert _seconds("send", LARGE, (0, 1), mesh) == pytest.approx(LARGE / 30e9, rel=0.01)
    assert _seconds("all_gather", LARGE, NODE, mesh) == pytest.approx(0.75 * LARGE / 90e9, rel=0.01)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"])
@pytest.mark.parametrize("name", ["h100", "mi300x", "l40s"])
def test_more_bytes_take_longer_and_more_nodes_too(kind: str, name: str) -> None:
    hardware = Hardware.load(name)
    groups = [(0, 1), (0, 8)] if kind == "send" else [tuple(range(8)), tuple(range(16)), tuple(range(64))]
    rows = [[_seconds(kind, nbytes, ranks, hardware) for nbytes in (10**3, 10**6, 10**9)] for ranks in groups]
    assert all(row == sorted(row) for row in rows)
    assert [row[-1] for row in rows] == sorted(row[-1] for row in rows)


def test_measured_seconds_are_read_within_a_node() -> None:
    curves = {"all_reduce 2": Curve([[10, 1e-3], [1000, 1e-2]], rises=True), "all_reduce 4": Curve([[10, 5e-3]], rises=True)}
    measured = Measurements(1, 1e-5, {"float32": FLAT}, {}, FLAT, FLAT, {}, curves)
    here = replace(CLUSTER, measurements=(measured,))
    assert _seconds("all_reduce", 10000, (0, 1), here) == pytest.approx(0.1)
    assert _seconds("all_reduce", 10, (0, 1, 2), here) == 5e-3
    assert _seconds("all_to_all", 10**9, (0, 1), here) == _seconds("all_to_all", 10**9, (0, 1))


def test_each_rank_but_the_root_sends_its_part_to_a_gather() -> None:
    assert link_bytes("gather", 400, 4).within == 75  # in the mean: three of four ranks send 100
