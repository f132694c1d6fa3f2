"""Schedules with several stages per rank train as the unmodified model does in one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules

import slapo_pipeline.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, build, create_schedule
from slapo_testing import run_distributed
from slapo_torch.pipelining._torch_pipelining import check_order
from slapo_torch.pipelining.schedules import placement, schedule_for_rows
from tests.slapo_sharding.logged_warnings import warnings_told

from ..layouts import adamw, mesh_of, message_of, train_beside_reference

LONG: list[tuple[str, dict[str, int], int, int]] = [
    ("zbv", {"pp": 2}, 2, 4),
    ("dualpipev", {"pp": 2}, 2, 4),
    ("zero_bubble", {"pp": 2, "tp": 2}, 2, 4),
    ("looped_bfs", {"pp": 2}, 2, 4),
    ("zero_bubble", {"pp": 2}, 2, 4),
    ("interleaved", {"pp": 4}, 2, 8),
    ("zero_bubble", {"pp": 4}, 1, 8),
    ("zbv", {"pp": 4}, 2, 8),
    ("dualpipev", {"pp": 4}, 2, 8),
    ("interleaved", {"pp": 2, "dp": 2}, 2, 4),
    ("zbv", {"pp": 2, "tp": 2}, 2, 4),
]


@pytest.mark.sampled(1)
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("schedule", "layout", "per_rank", "microbatches"),
    [
        ("interleaved", {"pp": 2}, 2, 4),
        ("zbv", {"pp": 2, "dp": 2}, 2, 4),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG),
    ],
    ids=str,
)
def test_a_schedule_trains_as_one_process_does(schedule: str, layout: dict[str, int], per_rank: int, microbatches: int) -> None:
    size = layout.get("pp", 1) * layout.get("dp", 1) * layout.get("tp", 1)
    config: dict[str, Any] = {"pipeline_schedule": schedule, "microbatches": microbatches, "clip": 0.1}
    for worst in run_distributed(train_beside_reference, size, layout, config, per_rank):
        assert all(difference < 1e-5 for difference in worst.values()), worst


@pytest.mark.parametrize(
    ("schedule", "stages", "ranks", "expected"),
    [
        ("1f1b", 4, 4, (0, 1, 2, 3)),
        ("interleaved", 6, 2, (0, 1, 0, 1, 0, 1)),
        ("zbv", 6, 3, (0, 1, 2, 2, 1, 0)),
        ("dualpipev", 4, 2, (0, 1, 1, 0)),
    ],
)
def test_where_stages_are_placed(schedule: str, stages: int, ranks: int, expected: tuple[int, ...]) -> None:
    assert placement(schedule, stages, ranks, 12) == expected


def test_1f1b_of_fewer_micro_batches_than_stages_runs_as_gpipe() -> None:
    with warnings_told() as told:
        assert placement("1f1b", 4, 4, 2) == (0, 1, 2, 3)
    assert ["runs as 'gpipe'" in each for each in told] == [True]
    assert schedule_for_rows("1f1b", 4, 4, 2, 9) == ("gpipe", 3)


@pytest.mark.parametrize(
    ("schedule", "stages", "ranks", "microbatches", "message"),
    [
        ("interleaved", 3, 2, 4, "3 stages on a mesh with pp=2; cut the model into a multiple of 2 stages, with "),
        ("interleaved", 2, 1, 4, "2 stages on a mesh with pp=1; give the mesh's axis pp more ranks, or leave out the cuts"),
        ("1f1b", 4, 2, 4, "schedule '1f1b' has 1 per rank; cut the model into 2 stages, or use 'interleaved' or 'looped_bfs'"),
        ("zbv", 2, 2, 4, "schedule 'zbv' has 2 per rank; cut the model into 4 stages, or use '1f1b'"),
        ("dualpipev", 4, 2, 2, "'dualpipev' needs at least as many micro-batches as stages, got 2 for 4"),
        ("interleaved", 4, 2, 5, "cannot run 5; use a multiple of 2"),
        ("missing.csv", 4, 2, 4, "there is no file 'missing.csv'"),
    ],
)
def test_what_a_schedule_cannot_run(schedule: str, stages: int, ranks: int, microbatches: int, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        placement(schedule, stages, ranks, microbatches)


FILE = "0F0,0F1,3F0,3I0,3W0,3F1,3B1,0B0,0B1\n1F0,2F0,1F1,2F1,2I0,2W0,1B0,2B1,1B1\n"
"""Two ranks, four stages that run down and back up, two micro-batches, some backwards in two parts."""


@pytest.mark.multiproc
def test_a_schedule_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(FILE)
    config: dict[str, Any] = {"pipeline_schedule": str(path), "microbatches": 2}
    for worst in run_distributed(train_beside_reference, 2, {"pp": 2}, config, 2):
        assert all(difference < 1e-5 for difference in worst.values()), worst


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FILE.replace("0F1,", ""), "not a schedule for 4 stages on pp=2 with 2 micro-batches: Rank 0, step 7: Running Full"),
        (FILE.replace("0F1,", "").replace(",0B1", ""), "Got 1 FORWARD microbatches for stage 0, expected 2"),
        (FILE.replace("3W0,", ""), "I and W must have equal counts"),
        (FILE.replace("0B0,0B1", "1F1,0B0"), "Stage 1 is assigned to both rank 1 and rank 0"),
        (FILE.splitlines()[0], "incorrect number of ranks - expected 2, actual 1"),
        (FILE.replace("0F1", "7F1"), "not a schedule for 4 stages"),
        ("nonsense\n\n", "not a schedule for 4 stages"),
    ],
)
def test_files_that_are_no_schedule(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "own.csv"
    path.write_text(text)
    with pytest.raises(BuildError, match=message):
        placement(str(path), 4, 2, 2)


def test_messages_that_would_cross_are_refused() -> None:
    def actions(text: str) -> list[Any]:
        return [schedules._Action.from_str(cell) for cell in text.split()]

    ranks = {0: 0, 1: 1}
    row = actions("0F0 0SEND_F0 0F1 0SEND_F1")
    check_order({0: row, 1: actions("1RECV_F0 1RECV_F1 1F0 1F1")}, ranks)
    with pytest.raises(BuildError, match="rank 1 receives from rank 0 in another order than rank 0 sends"):
        check_order({0: row, 1: actions("1RECV_F1 1RECV_F0 1F0 1F1")}, ranks)


class Added(nn.Module):
    """A block whose result has a part that depends on nothing it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x).tanh(), self.table.exp().expand(len(x), 8)


class Sides(nn.Module):
    """Four blocks; what the third adds meets what it was given in the fourth only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = nn.Linear(8, 8), nn.Linear(8, 8), Added(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, side = self.third(self.second(self.first(x)))
        return self.fourth(value + side)


def _sides(rank: int, kind: str) -> tuple[str, float]:
    mesh = mesh_of(pp=2)
    torch.manual_seed(0)
    model = Sides()
    reference = copy.deepcopy(model)
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    plugins = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_pipeline.plugin, slapo_torch.plugin])
    schedule = create_schedule(model, mesh=mesh, example_inputs={"x": batch[:2]}, plugins=plugins)
    for name in ("first", "second", "third"):
        schedule[name].cut_pipeline_stage()
    options = {"pipeline_schedule": kind, "microbatches": 2, "loss_fn": nn.functional.mse_loss, "optimizer": adamw}
    engine = build(schedule, "torch", **options)
    message = message_of(lambda: engine.train_batch(x=batch, labels=batch))
    nn.functional.mse_loss(reference(batch), batch).backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    found = schedule.full_state("grad")
    differences = [float((found[name] - gradient).abs().max()) for name, gradient in expected.items() if message == "no error"]
    return message, max(differences, default=0.0)


@pytest.mark.sampled(2)
@pytest.mark.multiproc
@pytest.mark.parametrize("kind", ["zbv", "zero_bubble", "interleaved"])
def test_a_parameter_whose_effect_meets_nothing_received_has_its_gradient(kind: str) -> None:
    for message, off in run_distributed(_sides, 2, kind):
        assert message == "no error"
        assert off < 1e-6
