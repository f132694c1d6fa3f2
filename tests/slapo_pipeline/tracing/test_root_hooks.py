"""Hooks of the whole model, where the model is cut."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import slapo
from slapo.pipeline import build_pipeline_model, generate_pipeline_partition
from slapo_core import BuildError, ScheduleError, build_program
from slapo_testing import run_distributed

from ..stage_comparison import assert_same, cut

WIDTH = 4
X, Y = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """Reads one argument at the beginning, and one at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor, flag: bool = False) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x))) * y


def hooked(seen: list[str]) -> Model:
    """Two hooks of each kind, some of which change what they see."""
    torch.manual_seed(1)
    model = Model()

    def note(what: str) -> Callable[..., None]:
        def hook(module: nn.Module, *_: Any) -> None:
            assert isinstance(module, Model)
            seen.append(what)

        return hook

    model.register_forward_pre_hook(note("before"))
    model.register_forward_pre_hook(lambda _, args: (args[0] * 2, *args[1:]))
    model.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs), with_kwargs=True)
    model.register_forward_hook(lambda _, args, output: output + 1)
    model.register_forward_hook(note("after"), with_kwargs=False)
    model.register_full_backward_pre_hook(note("backward begins"))
    model.register_full_backward_hook(note("backward"))
    return model


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("staged", [False, True])
def test_they_run_once_and_in_order_on_the_first_and_last_stage(staged: bool) -> None:
    seen: list[str] = []
    model = hooked(seen)
    plain = copy.deepcopy(model)
    schedule = cut(model, (X, Y), "a")
    runs: Any = generate_pipeline_partition(schedule).mod if staged else build_program(schedule)
    seen.clear()
    found = runs(X, y=Y)
    assert seen == ["before", "after"]
    found.sum().backward()
    assert seen[2:] == ["backward begins", "backward"]
    expected = plain(X, Y)
    expected.sum().backward()
    assert_same(found, expected, "outputs")
    for name, parameter in plain.named_parameters():
        assert_same(model.get_parameter(name).grad, parameter.grad, name)


def test_all_ways_to_cut_leave_them_on() -> None:
    model = hooked([])
    schedule = cut(model, (X, Y)).pipeline(2)
    assert len(model._forward_pre_hooks) == 3
    assert_same(build_program(schedule)(X, Y), model(X, Y), "outputs")


def test_a_hook_that_changes_what_another_stage_reads() -> None:
    model = Model()
    model.register_forward_pre_hook(lambda _, args, kwargs: (args, {**kwargs, "y": X}), with_kwargs=True)
    program = build_program(cut(model, (X, Y), "a"))
    with pytest.raises(
        BuildError, match="hook of the whole model changes 'y', but stage 1 reads it from the batch; change it in"
    ):
        program(X, y=Y)


def test_a_hook_of_the_old_kind() -> None:
    model = Model()
    model.register_backward_hook(lambda *_: None)
    with pytest.raises(
        BuildError,
        match="the Model has a backward hook that is not a full backward hook, which no stage can run; use register_full",
    ):
        build_program(cut(model, (X, Y), "a"))


def test_a_wrapped_model_is_refused_all_the_same() -> None:
    model = Model()
    model.forward = partial(Model.forward, model)  # type: ignore[method-assign]
    with pytest.raises(ScheduleError, match="it lies inside 'the whole model', which is wrapped and runs as one piece"):
        cut(model, (X, Y), "a")


def trained(rank: int) -> tuple[float, list[str], dict[str, torch.Tensor | None]]:
    """Loss, hooks that ran here and weights of one step of two stages and two micro-batches."""
    seen: list[str] = []
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    sch = slapo.create_schedule(hooked(seen), mesh=mesh, example_inputs=(X[:2], Y[:2]))
    sch["a"].cut_pipeline_stage()
    staged = generate_pipeline_partition(sch)
    seen.clear()
    options: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=1.0), "loss_fn": F.mse_loss, "microbatches": 2}
    options["check"] = False  # its runs would be seen as well
    engine = build_pipeline_model(staged, "torch", **options)
    assert type(engine) is slapo.get_dialect_cls("pipeline_engine", "torch")
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that no input has a gradient
        loss = engine.train_batch(X, Y, labels=Y).item()
    result = loss, seen, staged.full_state("param")
    engine.close()
    return result


@pytest.mark.multiproc
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_an_engine_runs_them_in_its_processes() -> None:
    plain = hooked([])
    loss = F.mse_loss(plain(X, Y), Y)
    loss.backward()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    for rank, (found, seen, weights) in enumerate(run_distributed(trained, 2)):
        assert found == pytest.approx(loss.item(), abs=1e-6)
        counted = {what: seen.count(what) for what in seen}
        assert counted == ({"after": 2} if rank else {"before": 2, "backward begins": 2, "backward": 2})
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach())
