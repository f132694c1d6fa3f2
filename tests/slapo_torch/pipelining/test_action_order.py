"""Order of a schedule's actions without stages or process groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import pipelining

from slapo_core import BuildError
from slapo_torch.dialect import TorchDialect
from slapo_torch.pipelining.schedules import KINDS, action_order
from slapo_torch.step_model import TorchStepModel
from slapo_training import StepModel


def _torch_order(kind: str, stages: int, ranks: int, microbatches: int) -> dict[int, list[tuple[str, int, int]]]:
    """Computations of torch's schedule with its messages, as its runtime runs them."""
    place = SimpleNamespace(num_stages=stages, group_size=ranks, group_rank=0, submod=None)
    runtime = getattr(pipelining, KINDS[kind].runtime)([place] * (stages // ranks), microbatches)
    rows: dict[int, list[tuple[str, int, int]]] = {}
    for rank, row in runtime.pipeline_order_with_comms.items():
        singles: list[Any] = [single for action in row for single in (action.sub_actions or (action,))]
        rows[rank] = [(each.computation_type.value, each.stage_index, each.microbatch_index) for each in singles]
        rows[rank] = [each for each in rows[rank] if each[0] in {"F", "B", "I", "W"}]
    return rows


@pytest.mark.parametrize("kind", ["interleaved", "looped_bfs", "zero_bubble", "zbv", "dualpipev"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (3, 12)])
def test_the_order_is_that_of_torchs_runtime(kind: str, ranks: int, microbatches: int) -> None:
    assert action_order(kind, 2 * ranks, ranks, microbatches) == _torch_order(kind, 2 * ranks, ranks, microbatches)


def test_1f1b_fills_the_pipeline_and_then_alternates() -> None:
    order = action_order("1f1b", 2, 2, 3)
    assert "".join(kind for kind, _, _ in order[0]) == "FFBFBB"
    assert "".join(kind for kind, _, _ in order[1]) == "FBFBFB"


def test_1f1b_of_fewer_micro_batches_than_stages_runs_as_gpipe() -> None:
    assert action_order("1f1b", 4, 4, 2) == action_order("gpipe", 4, 4, 2)
    assert TorchStepModel.message_mode({}, 4, 4, 2) == "on_demand"


def test_a_file_gives_its_order(tmp_path: Any) -> None:
    path = tmp_path / "own.csv"
    path.write_text("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
    assert action_order(str(path), 2, 2, 2)[1] == [("F", 1, 0), ("B", 1, 0), ("F", 1, 1), ("B", 1, 1)]


def test_stages_that_do_not_fit_are_refused() -> None:
    with pytest.raises(BuildError, match="schedule 'zbv' has 2 per rank"):
        action_order("zbv", 4, 4, 4)


def test_the_dialect_publishes_its_step_model() -> None:
    model: Any = TorchDialect.classes["step_model"]
    assert issubclass(model, StepModel)
    assert model.action_order({"pipeline_schedule": "gpipe"}, 1, 1, 2)[0] == [
        ("F", 0, 0),
        ("B", 0, 0),
        ("F", 0, 1),
        ("B", 0, 1),
    ]
    assert model.message_mode({}, 2, 2, 4) == "blocking"
    assert model.overlaps_reduction({}, 2, 2)
    assert not model.overlaps_reduction({"pipeline_schedule": "interleaved"}, 4, 2)
