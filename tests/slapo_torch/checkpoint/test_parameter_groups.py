"""Parameter groups, single numbers and schedules that ranks have different ones of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import slapo_pipeline.plugin
import slapo_sharding.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, build, create_schedule
from slapo_testing import run_distributed

from ..layouts import mesh_of, message_of

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
BATCH = {"input": X, "labels": X.flip(0)}
PP, TP, DP = ({axis: 2} for axis in ("pp", "tp", "dp"))


def engine_of(optimizer: Any, rate: Any = None, cut: str = "1", **layout: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.Linear(4, 4))
    plugins = Registry(
        [slapo_tracing.plugin, slapo_training.plugin, slapo_pipeline.plugin, slapo_sharding.plugin, slapo_torch.plugin]
    )
    mesh = mesh_of(**layout) if layout else None
    sch = create_schedule(model, mesh=mesh, example_inputs={"input": X[:2]}, plugins=plugins)
    if layout.get("tp"):
        sch["0"].shard("weight", axis=0)
        sch["0"].shard("bias", axis=0)
        sch["0"].sync("bwd_post", "all_reduce")
        sch["2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    if layout.get("pp"):
        sch[cut].cut_pipeline_stage()
    loss = nn.functional.mse_loss
    return build(sch, "torch", optimizer=optimizer, lr_scheduler=rate, loss_fn=loss, microbatches=layout.get("pp", 1))


def losses(engine: Any, steps: int = 3) -> list[float]:
    return [engine.train_batch(**BATCH).item() for _ in range(steps)]


RATES = {(8, 4): 0.5, (4, 8): 0.01, (4, 4): 0.2}
"""By the shape of a weight."""


def by_shape(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """As many groups on the first stage as on the second, where they are cut apart in the middle."""
    found: dict[Any, list[nn.Parameter]] = {}
    for each in parameters:
        found.setdefault(RATES.get(tuple(each.shape), 0.05), []).append(each)
    return SGD([{"params": each, "lr": rate} for rate, each in found.items()])


def halves(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Two groups, in which others share one where there are other parameters."""
    middle = len(parameters) // 2
    return SGD([{"params": parameters[:middle], "lr": 0.1}, {"params": parameters[middle:], "lr": 0.01}])


class Norms(SGD):
    """Goes by the norm of what it has of each parameter, a single number, and by one for each group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["largest"] = max([group.get("largest", 0.0), *(each.grad.norm().item() for each in group["params"])])
            for each in group["params"]:
                self.state[each]["norm"] = 0.5 * self.state[each].get("norm", torch.tensor(1.0)) + 0.5 * each.grad.norm()
        super().step()


class Counts(SGD):
    """Keeps a number in its ``state_dict``, and one in a state of no parameter."""

    seen = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.seen += sum(each.grad.norm().item() for group in self.param_groups for each in group["params"])
        self.state["global"] = {"steps": self.state.get("global", {"steps": 0})["steps"] + 1}  # type: ignore[index]
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "seen"})


def facts(engine: Any) -> str:
    state = engine.optimizer.state_dict()
    return str(
        (state["state"], [{**group, "params": len(group["params"])} for group in state["param_groups"]], state.get("seen"))
    )


def went_on(rank: int, folder: str, optimizer: Any, rate: Any, one: dict[str, Any], other: dict[str, Any]) -> Any:
    """Return the message of a load, the losses of the saved engine, and the losses of a loaded engine of another layout."""
    engine = engine_of(optimizer, rate, **one)
    losses(engine)
    engine.save(folder)
    ahead = losses(engine)
    loaded = engine_of(optimizer, rate, **other)
    return message_of(lambda: loaded.load(folder)), ahead, losses(loaded)


@pytest.mark.sampled(1)
@pytest.mark.multiproc
@pytest.mark.parametrize("rate", [None, partial(StepLR, step_size=1, gamma=0.9)], ids=["constant", "falling"])
def test_stages_with_equally_many_groups_keep_their_own_options(rate: Any, tmp_path: Path) -> None:
    for message, ahead, found in run_distributed(went_on, 2, str(tmp_path), by_shape, rate, PP, PP):
        assert message == "no error"
        assert found == ahead


@pytest.mark.multiproc
def test_options_go_with_parameters_to_another_layout(tmp_path: Path) -> None:
    for one, other in ((PP, DP), (DP, PP), (PP, {**PP, "cut": "2"})):
        for message, ahead, found in run_distributed(went_on, 2, str(tmp_path), by_shape, None, one, other):
            assert message == "no error"
            assert found == pytest.approx(ahead, abs=1e-5)


@pytest.mark.multiproc
def test_other_groups_of_another_layout_are_told_as_such(tmp_path: Path) -> None:
    first, second = run_distributed(went_on, 2, str(tmp_path), halves, None, DP, PP)
    for message, *_ in (first, second):
        assert "the checkpoint's optimizer has other parameter groups: '" in message
        assert "build with the same groups, or load it on the same layout" in message


def own_numbers(rank: int, folder: str, kind: Any, one: dict[str, Any], other: dict[str, Any]) -> Any:
    """The optimizer's state as it was saved, as it is loaded, and what a load on another layout says."""
    engine = engine_of(partial(kind, lr=0.1), **one)
    losses(engine)
    engine.save(folder)
    before = facts(engine)
    loaded = engine_of(partial(kind, lr=0.1), **one)
    losses(loaded, 1)
    loaded.load(folder)
    elsewhere = engine_of(partial(kind, lr=0.1), **other)
    return before, facts(loaded), message_of(lambda: elsewhere.load(folder))


@pytest.mark.sampled(2)
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("kind", "layout", "other", "words"),
    [
        (Norms, TP, PP, "had different 'norm' of '0.weight'"),
        (Norms, PP, TP, "in one parameter group, and ranks that saved them had different 'largest' for them"),
        (Counts, PP, DP, "had different 'seen' in the state of Counts; load it on the same layout"),
    ],
    ids=["state", "group", "more"],
)
def test_each_rank_gets_its_own_numbers_and_another_layout_none(
    kind: Any, layout: Any, other: Any, words: str, tmp_path: Path
) -> None:
    results = run_distributed(own_numbers, 2, str(tmp_path), kind, layout, other)
    assert results[0][0] != results[1][0]
    for before, after, message in results:
        assert after == before
        assert words in message


def two(parameters: list[nn.Parameter], is_turned: bool = False) -> torch.optim.Optimizer:
    made = [{"params": parameters[:4], "lr": 0.1}, {"params": parameters[4:], "lr": 0.01}]
    return SGD(made[::-1] if is_turned else made)


def test_groups_in_another_order_are_taken_unless_a_schedule_goes_by_it(tmp_path: Path) -> None:
    turned = partial(two, is_turned=True)
    for rate in (None, partial(LambdaLR, lr_lambda=lambda step: 0.9**step)):
        engine, other = engine_of(two, rate), engine_of(turned, rate)
        losses(engine)
        engine.save(tmp_path)
        if rate is None:
            other.load(tmp_path)
            assert [group["lr"] for group in other.optimizer.param_groups] == [0.01, 0.1]
            assert losses(other) == losses(engine)
        else:
            with pytest.raises(BuildError, match="for these in another order; build with the same groups in the same order"):
                other.load(tmp_path)


def falling(step: int) -> float:
    return 0.9**step


def in_turn(optimizer: Any) -> Any:
    return SequentialLR(optimizer, [LambdaLR(optimizer, falling), LambdaLR(optimizer, falling)], [50])


def restarts(optimizer: Any) -> Any:
    return SequentialLR(optimizer, [CosineAnnealingWarmRestarts(optimizer, 5), StepLR(optimizer, 1)], [50])


def plateau(optimizer: Any) -> Any:
    return ReduceLROnPlateau(optimizer, min_lr=[0.4 * group["lr"] for group in optimizer.param_groups], patience=0)


@pytest.mark.multiproc
@pytest.mark.parametrize("rate", [in_turn, restarts, plateau])
def test_a_schedule_of_other_groups_is_refused_before_a_step(rate: Any, tmp_path: Path) -> None:
    for message, *_ in run_distributed(went_on, 2, str(tmp_path), by_shape, rate, DP, PP):
        assert "the learning-rate schedule was saved for other parameter groups than this rank's" in message


def sequence(length: int, optimizer: Any) -> Any:
    kinds = [LinearLR(optimizer, 0.1, total_iters=2), ConstantLR(optimizer, 1.0), StepLR(optimizer, 3)]
    return SequentialLR(optimizer, kinds[:length], [2, 3][: length - 1])


def chain(length: int, optimizer: Any) -> Any:
    return ChainedScheduler([LinearLR(optimizer, 0.1, total_iters=2), StepLR(optimizer, 2)][:length])


@pytest.mark.parametrize(
    ("make", "one", "other", "words"),
    [
        (
            sequence,
            3,
            2,
            r"is SequentialLR\(LinearLR, ConstantLR, StepLR\), the engine's is SequentialLR\(LinearLR, ConstantLR\)",
        ),
        (
            sequence,
            2,
            3,
            r"is SequentialLR\(LinearLR, ConstantLR\), the engine's is SequentialLR\(LinearLR, ConstantLR, StepLR\)",
        ),
        (chain, 2, 1, r"is ChainedScheduler\(LinearLR, StepLR\), the engine's is ChainedScheduler\(LinearLR\)"),
        (chain, 1, 2, r"is ChainedScheduler\(LinearLR\), the engine's is ChainedScheduler\(LinearLR, StepLR\)"),
    ],
)
def test_a_schedule_of_another_length_changes_nothing(
    make: Callable[..., Any], one: int, other: int, words: str, tmp_path: Path
) -> None:
    engine, loaded = (engine_of(partial(torch.optim.AdamW, lr=0.1), partial(make, length)) for length in (one, other))
    losses(engine)
    engine.save(tmp_path)
    losses(loaded, 1)
    before = facts(loaded), str(loaded.lr_scheduler.state_dict()), loaded.steps
    with pytest.raises(BuildError, match=words):
        loaded.load(tmp_path)
    assert (facts(loaded), str(loaded.lr_scheduler.state_dict()), loaded.steps) == before


class Picky(StepLR):
    """Takes no state that is more than two steps old, when half of it is there."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.last_epoch > 2:
            raise LookupError("too old")


def test_what_refuses_its_state_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    engine, loaded = (engine_of(partial(torch.optim.AdamW, lr=0.1), partial(Picky, step_size=1)) for _ in range(2))
    losses(engine)
    engine.save(tmp_path)
    losses(loaded, 1)
    before = facts(loaded), str(loaded.lr_scheduler.state_dict()), str(loaded.module.state_dict()), loaded.steps
    with pytest.raises(BuildError, match="Picky does not accept its saved state: LookupError: too old"):
        loaded.load(tmp_path)
    assert (facts(loaded), str(loaded.lr_scheduler.state_dict()), str(loaded.module.state_dict()), loaded.steps) == before


def milestones(optimizer: Any) -> Any:
    return MultiStepLR(optimizer, [2, 4])


def late_milestones(optimizer: Any) -> Any:
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=2), milestones(optimizer)], [2])


@pytest.mark.parametrize("rate", [milestones, late_milestones])
def test_a_schedule_that_counts_comes_back(rate: Any, tmp_path: Path) -> None:
    engine, loaded = (engine_of(partial(SGD, lr=0.1), rate) for _ in range(2))
    losses(engine, 1)
    engine.save(tmp_path)
    loaded.load(tmp_path)
    assert losses(loaded, 6) == losses(engine, 6)
    assert str(loaded.lr_scheduler.state_dict()) == str(engine.lr_scheduler.state_dict())


@pytest.mark.parametrize("rate", [None, milestones])
def test_an_engine_that_only_evaluates_takes_the_weights(rate: Any, tmp_path: Path) -> None:
    engine, loaded = engine_of(partial(SGD, lr=0.1), rate), engine_of(None)
    losses(engine)
    engine.save(tmp_path)
    loaded.load(tmp_path)
    assert loaded.eval_batch(**BATCH) == engine.eval_batch(**BATCH)


class Keyed(SGD):
    """Keeps tensors under keys that look alike."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                for number, key in enumerate((1, "1", "avg", "avg.ema", (1, 2), "None", None), 1):
                    self.state[parameter][key] = self.state[parameter].get(key, torch.zeros_like(parameter)) + number
        super().step()


def test_states_under_keys_that_look_alike_are_told_apart(tmp_path: Path) -> None:
    def made() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential()
        model.add_module("l", nn.Linear(4, 4, bias=False))
        model.add_module("ema", nn.Sequential())
        model.ema.add_module("l", nn.Linear(4, 4, bias=False))  # type: ignore[union-attr]
        sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_torch.plugin]))
        return build(sch, "torch", optimizer=partial(Keyed, lr=0.1), loss_fn=nn.functional.mse_loss)

    engine, loaded = made(), made()
    losses(engine)
    engine.save(tmp_path)
    loaded.load(tmp_path)
    assert facts(loaded) == facts(engine)
