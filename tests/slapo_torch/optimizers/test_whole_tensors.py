"""Optimizers that step a tensor as a whole are right where ranks hold parts, by what a probe finds and not by their names."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_sharding.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, build, create_schedule
from slapo_testing import run_distributed
from slapo_training.optimizers.probe import update_probe
from slapo_training.optimizers.probe.update_probe import probe
from slapo_weights import made_of
from tests.slapo_torch.layouts import mesh_of
from tests.strange_optimizers import BY_SHAPE, COUPLED, ELEMENTWISE, EVERY, WHOLE, KellerMuon, Lars, Plain
from tests.whole_steps import batches, engine_of, errors, model_of, part_of, resumed, saved

FSDP = {"data_parallel": "fsdp"}
Facts = dict[str, float | str]


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    found = [nn.Parameter(torch.randn(24, 16)) for _ in range(3)]
    found += [nn.Parameter(torch.zeros(16)), nn.Parameter(torch.ones(16))]  # as biases and norms start
    found[0].lr_scale = 0.5  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("name", EVERY)
def test_the_probe_finds_what_an_update_depends_on(name: str) -> None:
    held = parameters()
    optimizer = EVERY[name](held)
    before = [each.detach().clone() for each in held]
    state, other = torch.get_rng_state(), random.getstate()
    found = probe(optimizer)
    assert bool(found.why_unknown) == (name == "by place")  # its list has the shapes of the model
    assert found.coupled == (name in COUPLED)
    assert name in COUPLED or found.shape == (name in WHOLE)
    assert name in COUPLED or found.flat == (name in {**WHOLE, **BY_SHAPE})
    assert all(torch.equal(each, old) and each.grad is None for each, old in zip(held, before, strict=True))
    assert torch.equal(state, torch.get_rng_state())
    assert random.getstate() == other
    assert not any(optimizer.state.get(each) for each in held if name not in ("adagrad", "rprop", "marked muon"))


TORCHS = ["Adadelta", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "SparseAdam"]


@pytest.mark.parametrize("name", EVERY)
def test_a_step_of_pointwise_operators_tells_what_steps_of_parts_tell(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    large = [*parameters(), nn.Parameter(torch.zeros(2048, 512)), nn.Parameter(torch.zeros(2048))]
    found = probe(EVERY[name](large))
    monkeypatch.setattr(update_probe, "_known", {})
    monkeypatch.setattr(update_probe, "is_pointwise", lambda operators: False)
    assert probe(EVERY[name](large)) == found


@pytest.mark.parametrize("name", TORCHS)
def test_torchs_that_step_each_element_alone(name: str) -> None:
    found = probe(getattr(torch.optim, name)(parameters()))
    assert found == type(found)()


class Delayed(Plain):
    """It steps whole tensors late, and large ones alone."""

    def update(self, p: nn.Parameter, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        state["step"] = state.get("step", 0) + 1
        if group.get("delay", 0) >= state["step"] or p.numel() < group.get("least", 0):
            return g
        if group.get("decays"):
            return g + p
        return g / (g.norm() + 1e-8)


LATE = [{"delay": 5}, {"delay": 500}, {"delay": 20_000}, {"least": 1000}, {"least": 100_000}, {"lr": 0.0}]


@pytest.mark.parametrize("options", [*LATE, {"least": 1000, "decays": True}, {"least": 100_000, "decays": True}], ids=str)
def test_what_shows_late_or_on_large_tensors_alone_is_found(options: dict[str, Any]) -> None:
    assert probe(Delayed([*parameters(), nn.Parameter(torch.zeros(2048, 512))], **options)).shape


def test_an_optimizer_that_knows_parameters_by_their_place_steps_all_together() -> None:
    optimizer = Lars(parameters())
    optimizer.rates = [0.1, 0.2, 0.3, 0.4, 0.5]  # type: ignore[attr-defined]
    assert probe(optimizer).coupled


def worst(found: list[Facts], limit: float = 1e-3) -> None:
    for facts in found:
        assert facts
        assert all(isinstance(error, float) and error < limit for error in facts.values()), facts


SOME = ["muon", "marked muon", "wrapper", "composite", "lamb", "adafactor", "lookahead"]
KEPT = ["muon", "marked muon", "listed muon", "composite", "adafactor"]


@pytest.mark.sampled(1)
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("kind", "layout", "names", "options"),
    [
        ("one", {"tp": 2}, ["marked muon", "wrapper", "composite", "adafactor", "lookahead", "prodigy", "own noise"], {}),
        ("gqa", {"dp": 2}, ["muon", "lamb", "prodigy"], FSDP),
        pytest.param("one", {"tp": 2}, SOME, {}, marks=pytest.mark.slow),
        pytest.param("gqa", {"tp": 2}, list(EVERY), {}, marks=pytest.mark.slow),
        pytest.param("gqa", {"dp": 2}, list({**WHOLE, **BY_SHAPE, **COUPLED}), FSDP, marks=pytest.mark.slow),
        pytest.param("one", {"dp": 2, "tp": 2}, SOME, FSDP, marks=pytest.mark.slow),
        pytest.param("gqa", {"dp": 2, "tp": 2}, ["muon", "noise"], {}, marks=pytest.mark.slow),
        pytest.param("gpt2", {"pp": 2, "tp": 2}, ["muon", "lamb", "adafactor"], {"microbatches": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_layout_steps_as_one_process_does(
    kind: str, layout: dict[str, int], names: list[str], options: dict[str, Any]
) -> None:
    size = layout.get("pp", 1) * layout.get("dp", 1) * layout.get("tp", 1)
    worst(run_distributed(errors, size, "torch", kind, layout, names, options, timeout=200))


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("names", "before", "after"),
    [
        (["listed muon", "composite", "adafactor"], {"tp": 2}, {}),
        pytest.param(KEPT, {"tp": 2}, {}, marks=pytest.mark.slow),
        pytest.param(KEPT, {"tp": 2}, {"tp": 2}, marks=pytest.mark.slow),
        pytest.param(KEPT, {"dp": 2, **FSDP}, {"tp": 2}, marks=pytest.mark.slow),
        pytest.param(KEPT, {}, {"dp": 2, **FSDP}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_states_go_to_other_layouts(names: list[str], before: dict[str, Any], after: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for work, given in ((saved, before), (resumed, after)):
        layout = {axis: size for axis, size in given.items() if axis != "data_parallel"}
        options = {key: value for key, value in given.items() if key == "data_parallel"}
        found = run_distributed(work, sum(layout.values()) or 1, "torch", "gqa", layout, names, options, str(tmp_path))
    worst(found)


def _details(rank: int) -> dict[str, Any]:
    """Return further facts of a whole-tensor optimizer at tp 2."""
    mesh, found = mesh_of(tp=2), dict[str, Any]()
    engine, _ = engine_of("torch", "gqa", "lamb", mesh, lr_scheduler=lambda made: torch.optim.lr_scheduler.StepLR(made, 1, 0.1))
    batch = part_of(batches(1)[0], mesh)
    engine.train_batch(**batch)
    inner = engine.optimizer.inner
    found["rates"] = [group["lr"] for group in inner.param_groups], [group["lr"] for group in engine.optimizer.param_groups]
    engine.train_batch(**batch)
    found["used"] = [round(group["lr"], 6) for group in inner.param_groups]
    stand_ins = [each for own in engine.optimizer.stand_ins for each in own.parameters]
    found["memory"] = max(each.untyped_storage().nbytes() for each in stand_ins)
    found["owned"] = sum(each.numel() for own in engine.optimizer.stand_ins for each in own.owned_parameters())
    found["all"] = sum(each.numel() for each in stand_ins)
    found["marks"] = {getattr(each, "lr_scale", 1.0) for each in stand_ins}
    return found


@pytest.mark.multiproc
def test_groups_are_shared_and_memory_is_freed() -> None:
    both = run_distributed(_details, 2)
    for found in both:
        inner, outer = found["rates"]
        assert outer == pytest.approx([0.001, 0.002])
        assert inner == [0.01, 0.02]  # taken over with the next step
        assert found["used"] == [0.001, 0.002]
        assert found["memory"] == 4
        assert found["marks"] == {0.5, 1.0}
    assert sum(found["owned"] for found in both) == both[0]["all"]
    assert abs(both[0]["owned"] / both[0]["all"] - 0.5) < 0.1


def _unfrozen(rank: int) -> float:
    """The largest difference from one process where a layer is unfrozen after some steps."""
    mesh, data = mesh_of(tp=2), batches(1)

    def steps(model: nn.Module, step: Any, add: Any) -> dict[str, torch.Tensor]:
        for number, batch in enumerate(data):
            if number == 1:
                model.model.layers[0].requires_grad_(True)  # type: ignore[union-attr,index]
                add(list(model.model.layers[0].parameters()))  # type: ignore[union-attr,index]
            step(batch)
        return model.state_dict()

    plain = model_of("gqa")
    plain.model.layers[0].requires_grad_(False)  # type: ignore[union-attr,index]
    optimizer = Lars([each for each in plain.parameters() if each.requires_grad])

    def one(batch: Any) -> None:
        plain(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    expected = steps(plain, one, lambda added: optimizer.add_param_group({"params": added}))
    model = model_of("gqa")
    model.model.layers[0].requires_grad_(False)  # type: ignore[union-attr,index]
    plugins = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_sharding.plugin, slapo_torch.plugin])
    schedule = create_schedule(model, mesh=mesh, example_inputs=data[0], plugins=plugins)
    schedule.tensor_parallel()
    engine: Any = build(schedule, "torch", optimizer=Lars)
    steps(
        schedule.mod,
        lambda batch: engine.train_batch(**batch),
        lambda added: engine.optimizer.add_param_group({"params": added}),
    )
    found = schedule.full_state()
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


def _few_rows(rank: int) -> float:
    """The largest difference from one process where a rank has all rows of a matrix, and the other none."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    plain, own, mesh = model(), model(), mesh_of(dp=2)
    x, y = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)), torch.ones(4, 1)
    optimizer = KellerMuon.of(plain.parameters())
    F.mse_loss(plain(x), y).backward()
    optimizer.step()
    schedule = create_schedule(
        own,
        mesh=mesh,
        plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_sharding.plugin, slapo_torch.plugin]),
    )
    engine: Any = build(schedule, "torch", optimizer=KellerMuon.of, loss_fn=F.mse_loss, **FSDP)
    engine.train_batch(input=x.chunk(2)[rank], labels=y.chunk(2)[rank])
    found = schedule.full_state()
    return max(float((found[name] - value).abs().max()) for name, value in plain.state_dict().items())


@pytest.mark.multiproc
def test_a_rank_may_have_no_rows() -> None:
    assert all(difference < 1e-5 for difference in run_distributed(_few_rows, 2))


@pytest.mark.multiproc
def test_unfrozen_parameters_are_added() -> None:
    assert all(difference < 1e-5 for difference in run_distributed(_unfrozen, 2))


@pytest.mark.multiproc
def test_what_depends_on_all_parameters_is_refused_in_a_pipeline() -> None:
    names = ["prodigy", "clips itself"]
    for found in run_distributed(errors, 2, "torch", "gpt2", {"pp": 2}, names, {"microbatches": 2}):
        for name, kind in zip(names, ("Prodigy", "ClipsItself"), strict=True):
            assert str(found[name]).startswith(f"BuildError: {kind} makes the step of one parameter depend on the others")


# ---- fused parameters


class Separate(nn.Module):
    """Three projections, or one for all of them."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        if fused:
            self.qkv = nn.Linear(8, 24)
        else:
            self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1) if hasattr(self, "qkv") else (self.q(x), self.k(x), self.v(x))
        return F.scaled_dot_product_attention(q, k, v)


class Holder(nn.Module):
    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.attention = Separate(fused)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x)  # type: ignore[no-any-return]


def holders() -> tuple[Holder, Holder]:
    """Three projections, and the same numbers in one."""
    torch.manual_seed(0)
    separate, fused = Holder(), Holder(fused=True)
    with torch.no_grad():
        for name, parameter in fused.attention.qkv.named_parameters():
            parameter.copy_(torch.cat([getattr(getattr(separate.attention, each), name) for each in "qkv"]))
    return separate, fused


def trained(model: nn.Module, step: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        step(torch.randn(4, 3, 8, generator=generator), torch.randn(4, 3, 8, generator=generator))
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def by_itself(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights after some steps of Muon in plain torch."""
    optimizer = KellerMuon.of(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    return trained(model, step)


def by_engine(model: nn.Module, fuse: bool = False, **options: Any) -> dict[str, torch.Tensor]:
    """Weights after the same steps of an engine, with the three projections fused by the schedule or not."""
    schedule = create_schedule(
        model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_sharding.plugin, slapo_torch.plugin])
    )
    if fuse:
        new = copy.deepcopy(holders()[1].attention)
        for name, parameter in new.qkv.named_parameters():
            made_of(parameter, [getattr(getattr(model.attention, each), name) for each in "qkv"])  # type: ignore[union-attr]
        schedule["attention"].replace(new)
    engine: Any = build(schedule, "torch", optimizer=KellerMuon.of, loss_fn=F.mse_loss, **options)
    return trained(schedule.mod, lambda x, y: engine.train_batch(x=x, labels=y))


def joined(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([state[f"attention.{each}.weight"] for each in "qkv"])


def test_what_a_schedule_fused_is_stepped_as_the_unmodified_model_is() -> None:
    expected = joined(by_itself(holders()[0]))
    found = by_engine(holders()[0], fuse=True)["attention.qkv.weight"]
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize("blocks", [3, (8, 8, 8)], ids=str)
def test_a_fused_parameter_of_the_model_is_one_matrix_unless_blocks_are_named(blocks: Any) -> None:
    separate, fused = by_itself(holders()[0]), by_itself(holders()[1])
    one = by_engine(holders()[1])["attention.qkv.weight"]
    assert (one - fused["attention.qkv.weight"]).abs().max() < 1e-5
    assert (one - joined(separate)).abs().max() > 1e-3
    three = by_engine(holders()[1], optimizer_blocks={"*.qkv.weight": (0, blocks)})["attention.qkv.weight"]
    assert (three - joined(separate)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ({"*.qkv.weight": (0, 5)}, "of shape \\(24, 8\\) cannot be cut so"),
        ({"*.qkv.weight": (2, 3)}, "cannot be cut so"),
        ({"*.qvk.weight": (0, 3)}, "which matches no parameter of the model"),
        ({"*": 3}, "give globs of names of parameters"),
        (3, "give globs of names of parameters"),
    ],
    ids=str,
)
def test_blocks_that_make_no_sense(blocks: Any, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        by_engine(holders()[1], optimizer_blocks=blocks)


def test_an_optimizer_of_elements_is_left_alone() -> None:
    for name in ELEMENTWISE:
        schedule = create_schedule(
            holders()[0],
            plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_sharding.plugin, slapo_torch.plugin]),
        )
        engine: Any = build(schedule, "torch", optimizer=EVERY[name], loss_fn=F.mse_loss)
        assert type(engine.optimizer) is type(EVERY[name](parameters()))
        engine.close()
