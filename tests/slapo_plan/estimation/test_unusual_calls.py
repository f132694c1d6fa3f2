"""Models, optimizers and batches that users bring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import ScheduleError, UnknownNameError, create_schedule, get_cuda_rng_tracker
from slapo_plan import estimate, fake_ranks


class Net(nn.Module):
    def __init__(self, width: int = 32, device: str = "cpu") -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(width, width, device=device) for _ in range(2))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.first(x)))).mean()


class ReadsAValue(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return hidden.mean() if hidden.sum().item() > 0 else hidden.sum()


BATCH = {"x": torch.ones(4, 32)}


@pytest.mark.parametrize(
    ("make", "states"),
    [
        (lambda p: torch.optim.SGD(p, lr=1.0), 0.0),
        (lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9), 1.0),
        (torch.optim.AdamW, 2.0),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 3.0),
        (torch.optim.Adagrad, 1.0),  # makes its state before its first step
        (torch.optim.Adafactor, 0.1),  # reads norms of parameters
    ],
)
def test_the_state_of_an_optimizer_is_counted(make: Callable[..., Any], states: float) -> None:
    memory = estimate(create_schedule(Net()), BATCH, optimizer=make).ranks[0].memory
    assert memory.kinds["optimizer"] == pytest.approx(
        states * memory.kinds["parameters"], abs=0.05 * memory.kinds["parameters"]
    )


def test_an_optimizer_of_the_unmodified_model_counts_alike() -> None:
    model = Net()
    given = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    found = estimate(create_schedule(model), BATCH, optimizer=given).ranks[0].memory
    assert found.kinds["optimizer"] == found.kinds["parameters"]


def test_dropout_in_sharded_layers_needs_no_seed_and_leaves_none() -> None:
    before = get_cuda_rng_tracker().get_states()
    with fake_ranks(tp=2) as mesh:
        sch = create_schedule(Net(), mesh=mesh, example_inputs=BATCH)
        sch.tensor_parallel()
        assert estimate(sch, BATCH).peak > 0
    assert get_cuda_rng_tracker().get_states().keys() == before.keys()


def test_a_refused_option_is_a_problem_of_the_estimate() -> None:
    found = estimate(create_schedule(Net()), BATCH, microbatch=2)
    assert found.problems[0].startswith("no option 'microbatch' of target 'torch'; did you mean 'microbatches'")
    assert found.peak == 0
    assert "cannot run: no option" in str(found)


@pytest.mark.parametrize(
    ("model", "batch", "words"),
    [
        (
            Net(),
            {"y": torch.ones(4, 32)},
            "does not run on this batch with fake tensors: .*; give the arguments of its forward",
        ),
        (Net(), torch.ones(4, 32), "the batch is a Tensor; give the arguments of the forward by name"),
        (Net(), {"x": torch.ones(4, 33)}, "does not run on this batch with fake tensors"),
        (
            ReadsAValue(8192, device="meta"),  # too large to run on real tensors
            {"x": torch.ones(4, 8192)},
            r"reads a value that it computed, as x.item\(\) .*; leave that out",
        ),
    ],
)
def test_a_batch_or_model_that_does_not_run_is_one_sentence(model: nn.Module, batch: Any, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        estimate(create_schedule(model), batch)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_that_reads_a_value_runs_on_real_tensors(device: str) -> None:
    model = ReadsAValue(device=device)
    found, plain = (estimate(create_schedule(each), BATCH) for each in (model, Net(device=device)))
    assert found.notes[0].startswith("the model reads values that it computed")
    assert not plain.notes
    kinds, others = found.ranks[0].memory.kinds, plain.ranks[0].memory.kinds
    assert kinds["parameters"] == others["parameters"]
    assert kinds["gradients"] == others["gradients"] / 2  # of the first layer alone
    assert all(each.grad is None and each.is_meta == (device == "meta") for each in model.parameters())


def test_a_batch_on_meta_counts_as_one_with_numbers() -> None:
    real, meta = (estimate(create_schedule(Net()), {"x": torch.ones(4, 32, device=each)}) for each in ("cpu", "meta"))
    assert meta.ranks == real.ranks


def test_an_optimizer_that_fails_is_one_sentence() -> None:
    with pytest.raises(ScheduleError, match="the optimizer fails on these parameters: .*closure.*; give an optimizer"):
        estimate(create_schedule(Net()), BATCH, optimizer=torch.optim.LBFGS)


def test_large_models_that_index_by_masks_of_the_batch_run_without_numbers() -> None:
    class Masked(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x)[x[:, 0] > 0]).mean()

    found = estimate(create_schedule(Masked(8192, device="meta")), {"x": torch.ones(4, 8192)})
    assert not found.notes
    assert found.ranks[0].memory.kinds["gradients"] == 2 * 4 * 8192 * 8193


def test_tensors_in_lists_and_example_inputs_are_counted() -> None:
    one, two = (
        estimate(create_schedule(Net(), example_inputs=example), BATCH).ranks[0].memory.kinds["batch"]
        for example in (None, [torch.ones(8, 32)])
    )
    assert two - one == 8 * 32 * 4


def test_unknown_targets_are_named() -> None:
    with pytest.raises(UnknownNameError, match="no dialect 'jax'"):
        estimate(create_schedule(Net()), BATCH, target="jax")


def test_a_second_world_is_refused() -> None:
    with fake_ranks(dp=2), pytest.raises(ScheduleError, match="a process group of 2 ranks exists already"), fake_ranks(dp=4):
        pass


def test_the_model_is_as_before() -> None:
    model = Net()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    estimate(create_schedule(model), BATCH, microbatches=2)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())
