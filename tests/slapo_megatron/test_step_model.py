"""Order of actions of Megatron's pipelines beside Megatron's own schedule table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slapo_core import BuildError
from slapo_megatron.step_model import MegatronStepModel

pytestmark = [pytest.mark.needs("megatron-core"), pytest.mark.filterwarnings("ignore")]  # Megatron warns as it is imported


@pytest.mark.parametrize(
    ("ranks", "chunks", "microbatches", "group"), [(2, 2, 4, 2), (2, 3, 6, 3), (4, 2, 8, 4), (4, 2, 12, 8), (3, 2, 3, 3)]
)
def test_the_interleaved_order_is_that_of_megatron(ranks: int, chunks: int, microbatches: int, group: int) -> None:
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

    table = get_schedule_table(microbatches, chunks, group)
    options = {"config": {"transformer": {"microbatch_group_size_per_vp_stage": group}}}
    order = MegatronStepModel.action_order(options, chunks * ranks, ranks, microbatches)
    for rank, row in order.items():
        place: Any = SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank)
        sender: Any = SimpleNamespace(pp_group=place, virtual_pipeline_model_parallel_size=chunks)
        *_, warmup, _ = get_pp_rank_microbatches(microbatches, chunks, group, p2p_communicator=sender)
        forwards = [("F", chunk * ranks + rank, number) for number, chunk in table]
        backwards = [("B", (chunks - 1 - chunk) * ranks + rank, number) for number, chunk in table]
        assert [each for each in row if each.kind == "F"] == forwards
        assert [each for each in row if each.kind == "B"] == backwards
        assert row[:warmup] == forwards[:warmup]
        assert row[warmup : warmup + 2] == [*forwards[warmup : warmup + 1], *backwards][:2]


def test_micro_batches_that_leave_a_small_group_are_refused() -> None:
    with pytest.raises(BuildError, match="use a multiple of 4"):
        MegatronStepModel.action_order({}, 8, 4, 6)
