"""Bytes over links and between ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from slapo_plan import Hardware, fake_ranks
from slapo_plan.estimation.link_totals import BETWEEN, WITHIN
from slapo_plan.estimation.process_groups import MeshGroups
from slapo_plan.estimation.traffic import StepTraffic
from slapo_plan.records import CollectiveRecord

NODES_OF_4 = replace(Hardware.load("h100"), devices_per_node=4)
SIZE = 1200


@contextmanager
def traffic(hardware: Hardware | None = NODES_OF_4, **axes: int) -> Iterator[StepTraffic]:
    with fake_ranks(**axes) as mesh:
        yield StepTraffic(MeshGroups(mesh), hardware)


def sent(found: StepTraffic) -> dict[tuple[int, str], int]:
    return {(each.rank, each.link): each.nbytes for each in found.links()}


@pytest.mark.parametrize(
    ("kind", "share"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("all_to_all", 0.75), ("broadcast", 0.75)],
)
def test_a_group_of_a_node_sends_within_it(kind: str, share: float) -> None:
    with traffic(tp=4, dp=2) as found:
        (total,) = found.add(0, {CollectiveRecord(kind, SIZE, (0, 1, 2, 3)): 5})
        assert (total.axis, total.count, total.link) == ("tp", 5, WITHIN)
        assert (total.within, total.between) == (share * SIZE, 0)
        assert sent(found) == {(0, WITHIN): 5 * share * SIZE}
        assert [each.count for each in found.links()] == [5]
        matrix = found.matrix()
        assert sum(map(sum, matrix.sent)) == pytest.approx(8 * 5 * share * SIZE)
        assert not any(matrix.sent[0][4:])


def test_a_group_over_nodes_works_in_two_levels() -> None:
    with traffic(dp=8) as found:
        (total,) = found.add(0, {CollectiveRecord("all_reduce", SIZE, tuple(range(8))): 1})
        # a quarter is reduced between two nodes by each device, and all within each node
        assert (total.within, total.between) == (1.5 * SIZE, SIZE / 4)
        assert total.link == "within and between nodes"
        matrix = found.matrix()
        assert matrix.sent[0][4] == matrix.sent[4][0] == SIZE / 4
        assert matrix.sent[3][0] == 1.5 * SIZE


def test_one_rank_of_each_node() -> None:
    with traffic(dp=4, tp=4) as found:
        (total,) = found.add(0, {CollectiveRecord("all_gather", SIZE, (0, 4, 8, 12)): 1})
        assert (total.within, total.between) == (0, 0.75 * SIZE)
        assert found.matrix().sent[1][5] == 0.75 * SIZE


def test_an_all_to_all_sends_to_every_rank() -> None:
    with traffic(dp=8) as found:
        found.add(0, {CollectiveRecord("all_to_all", SIZE, tuple(range(8))): 1})
        matrix = found.matrix().sent
        assert {matrix[a][b] for a in range(8) for b in range(8) if a != b} == {SIZE / 8}
        assert sent(found) == {(0, WITHIN): 3 * SIZE / 8, (0, BETWEEN): 4 * SIZE / 8}


def test_messages_are_recorded_at_both_ends_and_sent_once() -> None:
    message = CollectiveRecord("send", SIZE, (0, 4))
    with traffic(pp=2, tp=4) as found:
        assert found.add(0, {message: 3})[0].between == SIZE
        found.add(1, {message: 3})
        assert sent(found) == {(0, BETWEEN): 3 * SIZE}
        assert [found.matrix().sent[rank][4 + rank] for rank in range(4)] == [3 * SIZE] * 4


def test_groups_of_other_ranks_may_cross_nodes() -> None:
    with traffic(dp=4, tp=3) as found:
        (total,) = found.add(0, {CollectiveRecord("all_reduce", SIZE, (0, 1, 2)): 1})
        assert total.link == "within and between nodes"  # ranks 3 to 5 do, though ranks 0 to 2 do not
        assert sent(found)[0, BETWEEN] == SIZE


def test_reductions_along_the_pipeline_count_once_for_each_rank() -> None:
    with traffic(pp=4, tp=2) as found:
        for rank in range(4):
            found.add(rank, {CollectiveRecord("all_reduce", SIZE, (0, 2, 4, 6)): 1})
        assert sum(map(sum, found.matrix().sent)) == sum(each.all_bytes for each in found.links()) > 0


def test_without_hardware_links_are_axes() -> None:
    with traffic(None, dp=2, tp=2) as found:
        records = {CollectiveRecord("all_reduce", SIZE, (0, 1)): 2, CollectiveRecord("all_reduce", SIZE, (0, 2)): 1}
        assert {each.link for each in found.add(0, records)} == {None}
        assert sent(found) == {(0, "tp"): 2 * SIZE, (0, "dp"): SIZE}


@pytest.mark.parametrize(
    ("axes", "labels", "last"),
    [
        ({"dp": 8, "tp": 8}, 64, "rank 63"),
        ({"dp": 16, "tp": 8}, 32, "ranks 124-127"),
        ({"pp": 16, "dp": 128, "tp": 8}, 16, "ranks 15360-16383"),
        ({"dp": 2048, "tp": 8}, 64, "ranks 16128-16383"),
    ],
)
def test_many_ranks_are_grouped(axes: dict[str, int], labels: int, last: str) -> None:
    with traffic(**axes) as found:
        tp, dp = axes["tp"], axes["dp"]
        for rank in range(axes.get("pp", 1)):
            group = tuple(range(rank * dp * tp, (rank + 1) * dp * tp, tp))
            found.add(rank, {CollectiveRecord("all_reduce", SIZE, group): 1})
        matrix = found.matrix()
        assert (len(matrix.labels), matrix.labels[-1]) == (labels, last)
        assert sum(map(sum, matrix.sent)) == pytest.approx(sum(each.all_bytes for each in found.links()), rel=1e-3)


def test_ranks_beyond_the_mesh_are_noted() -> None:
    with traffic(dp=2) as found:
        found.add(0, {CollectiveRecord("all_reduce", SIZE, (0, 7)): 1})
        assert found.notes() == ["traffic by link leaves out the groups of ranks 0, 7, which the mesh does not have"]
        assert not found.links()


def test_a_default_device_does_not_matter() -> None:
    with torch.device("meta"), traffic(dp=2) as found:
        found.add(0, {CollectiveRecord("all_reduce", SIZE, (0, 1)): 1})
        assert Counter(each.link for each in found.links()) == {WITHIN: 1}
