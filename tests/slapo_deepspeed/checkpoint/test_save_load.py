"""Checkpoints at another number of replicas, those that cannot be loaded, and weights while ZeRO has them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import slapo_deepspeed.plugin
import slapo_sharding.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, build, create_schedule
from slapo_testing import run_distributed
from tests.engines import check_own_buffers, own_buffers, reseal
from tests.slapo_torch.layouts import adamw, mesh_of, message_of

from ..parameter_numbers import count_again

pytestmark = pytest.mark.multiproc
PLUGINS = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_deepspeed.plugin, slapo_sharding.plugin])
X = torch.linspace(-1, 1, 8 * 4 * 8).view(8, 4, 8)
"""Batches of all replicas together."""


class Counts(nn.Module):
    """Counts its steps, one layer frozen or not; no two are alike."""

    def __init__(self, seed: int, is_frozen: bool = False, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.middle, self.down = nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, 8)
        self.middle.requires_grad_(not is_frozen)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
        return self.down(self.middle(self.up(x).relu())) * (1 + 0.1 * self.steps)


def grouped(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    first = {"params": [each for each in parameters if each.dim() > 1], "weight_decay": 0.5}
    second = {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0, "lr": 5e-2}
    return torch.optim.AdamW([first, second], lr=1e-2, eps=1e-3)


def falling(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)


@pytest.fixture(scope="module", autouse=True)
def _counters() -> Iterator[None]:
    """The processes go on to tests of other files."""
    yield
    run_distributed(count_again, 2)


def engine_of(model: nn.Module, zero: int, optimizer: Any = grouped, precision: str = "fp32", **config: Any) -> Any:
    """On as many replicas as there are ranks; with stage 3 of ZeRO no parameter stays whole."""
    count_again(dist.get_rank())
    options = {"stage": zero, "stage3_param_persistence_threshold": 1}
    return build(
        create_schedule(model, mesh=mesh_of(dp=dist.get_world_size()), plugins=PLUGINS),
        "deepspeed",
        optimizer=optimizer,
        lr_scheduler=falling if optimizer is grouped else None,
        loss_fn=F.mse_loss,
        precision=precision,
        config={"zero_optimization": options, **config},
    )


def losses(engine: Any, steps: range) -> list[float]:
    rank, dp = dist.get_rank(), dist.get_world_size()
    parts = [X[step].chunk(dp)[rank] for step in steps]
    return [engine.train_batch(x=part, labels=part.flip(-1)).item() for part in parts]


def saved(rank: int, zeros: list[int], folder: str, precision: str) -> list[list[float]]:
    """Losses of the steps after the one that was saved behind."""
    found = []
    for zero in zeros:
        engine = engine_of(Counts(0, is_frozen=0 < zero < 3), zero, precision=precision)
        losses(engine, range(3))
        engine.save(f"{folder}/{zero}")
        found.append(losses(engine, range(3, 8)))
        engine.close()
    return found


def resumed(rank: int, zeros: list[int], folder: str, precision: str) -> list[list[float]]:
    """Those of an engine that began with other weights and loaded it."""
    found = []
    for zero in zeros:
        engine = engine_of(Counts(1, is_frozen=0 < zero < 3), zero, precision=precision)
        losses(engine, range(1))
        engine.load(f"{folder}/{zero}")
        found.append(losses(engine, range(3, 8)))
        engine.close()
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("ranks", "precision", "tolerance"),
    [
        ((2, 1), "fp32", 2e-5),
        ((1, 2), "fp32", 2e-5),
        pytest.param((2, 1), "bf16", 2e-2, marks=pytest.mark.slow),
        pytest.param((1, 2), "bf16", 2e-2, marks=pytest.mark.slow),
    ],
)
def test_another_number_of_replicas_goes_on(ranks: tuple[int, int], precision: str, tolerance: float, tmp_path: Path) -> None:
    zeros = [0, 1, 2, 3] if precision == "fp32" else [1, 2, 3]
    expected = run_distributed(saved, ranks[0], zeros, str(tmp_path), precision)[0]
    for found in run_distributed(resumed, ranks[1], zeros, str(tmp_path), precision):
        for zero, one, other in zip(zeros, found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=tolerance, rtol=0, msg=lambda text, zero=zero: f"ZeRO {zero}: {text}")


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def factored(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.1)


def write(rank: int, folder: str) -> None:
    """Checkpoints of one replica that two cannot load."""
    for name, zero, optimizer in [
        ("factored", 0, factored),
        ("torn", 2, adamw),
        ("damaged", 2, adamw),
        ("missing", 2, adamw),
        ("class", 2, momentum),
        ("number", 2, grouped),
        ("rate", 0, grouped),
    ]:
        engine = engine_of(Counts(0), zero, optimizer)
        losses(engine, range(1))
        engine.save(f"{folder}/{name}")
        engine.close()
    for name in ("torn", "damaged"):
        for file in Path(folder, name).rglob("*_model_states.pt"):
            file.write_bytes(file.read_bytes()[:1000])
    for file in Path(folder, "missing").rglob("*_optim_states.pt"):
        file.unlink()
    reseal(Path(folder, "torn"))


def unscheduled(parameters: Any) -> torch.optim.Optimizer:
    return grouped(parameters)


def refused(rank: int, folder: str) -> dict[str, tuple[str, bool, str]]:
    """Message of each load, True if the weights are unchanged, and the message of training afterwards."""
    found = {}
    for name, zero, optimizer, is_frozen, width in [
        ("factored", 1, factored, False, 16),
        ("torn", 2, adamw, False, 16),
        ("damaged", 2, adamw, False, 16),
        ("missing", 3, adamw, False, 16),
        ("torn", 2, adamw, False, 24),
        ("torn", 1, adamw, False, 16),
        ("number", 2, grouped, True, 16),
        ("nowhere", 2, adamw, False, 16),
        ("class", 2, adamw, False, 16),
        ("number", 2, adamw, False, 16),
        ("rate", 0, unscheduled, False, 16),
    ]:
        engine = engine_of(Counts(1, is_frozen, width), zero, optimizer)
        with engine.whole_parameters():
            before = [each.detach().clone() for each in engine.module.parameters()]
        message = message_of(lambda name=name, engine=engine: engine.load(Path(folder, name)))
        with engine.whole_parameters():
            same = all(map(torch.equal, before, engine.module.parameters()))
        after = message_of(lambda engine=engine: losses(engine, range(1)))
        found[f"{name} {zero} {width}{' frozen' * is_frozen}"] = message, same, after
        engine.close()
    return found


def test_what_cannot_be_loaded_changes_nothing(tmp_path: Path) -> None:
    run_distributed(write, 1, str(tmp_path))
    first, second = run_distributed(refused, 2, str(tmp_path))
    expected = {
        "factored 1 16": "BuildError: Adafactor steps whole tensors here, and the checkpoint was saved where ranks had all",
        "damaged 2 16": "_model_states.pt' has 1000 bytes and not ",
        "missing 3 16": "_optim_states.pt' is missing",
        "torn 2 16": "; nothing has changed, load another one",
        "torn 2 24": "is of a model with other parameters; build an engine of the model that was saved",
        "torn 1 16": "; nothing has changed, load another one",
        "number 2 16 frozen": "'middle.bias' is in a group of the checkpoint's, not this engine's optimizer; build with",
        "class 2 16": "BuildError: saved with 'SGD' for the optimizer, but this engine has 'AdamW'; build with the same",
        "number 2 16": "BuildError: saved with 2 for the number of the optimizer's groups, but this engine has 1; build with",
        "rate 0 16": "BuildError: saved with 'LambdaLR' for the learning rate's schedule, but this engine has None; build with",
        "nowhere 2 16": "is not a checkpoint of target 'deepspeed': there is no such folder",
    }
    for found in (first, second):
        assert set(found) == set(expected)
        for name, (message, same, after) in found.items():
            assert expected[name] in message
            assert same, name
            assert after == "no error"


def half_read(rank: int, folder: str) -> list[str]:
    """Messages of an engine that loads a checkpoint with one truncated file, and of later calls."""
    engine = engine_of(Counts(0), 2, adamw)
    for name in ("whole", "torn"):
        engine.save(f"{folder}/{name}")
    dist.barrier()
    if rank == 1:
        (file,) = Path(folder, "torn").rglob("zero_pp_rank_1_*optim_states.pt")
        file.write_bytes(file.read_bytes()[:1000])
        reseal(Path(folder, "torn"))
    dist.barrier()
    x = X[0].chunk(2)[rank]
    actions = [
        lambda: engine.load(f"{folder}/torn"),
        lambda: engine.train_batch(x=x, labels=x),
        lambda: engine.eval_batch(x=x, labels=x),
        lambda: engine.save(f"{folder}/again"),
        lambda: engine.load(f"{folder}/whole"),
        lambda: engine.train_batch(x=x, labels=x),
    ]
    messages = [message_of(action) for action in actions]
    engine.close()
    return messages


def test_an_engine_that_read_half_a_checkpoint_waits_for_another(tmp_path: Path) -> None:
    for first, *later, loaded, trained in run_distributed(half_read, 2, str(tmp_path)):
        assert "cannot be read: " in first
        assert "the weights of this engine may have changed, load another checkpoint before it trains" in first
        assert (
            later
            == ["BuildError: loading a checkpoint failed halfway, and this engine's weights may have changed; load another"] * 3
        )
        assert loaded == trained == "no error"


def evaluated(rank: int, folder: str) -> tuple[float, float]:
    """The loss of an engine that has trained, and of one without optimizer that has its weights."""
    engine, x = engine_of(Counts(0), 0), X[0]
    losses(engine, range(2))
    engine.save(folder)
    expected = engine.eval_batch(x=x, labels=x).item()
    engine.close()
    engine = engine_of(Counts(1), 0, None)
    engine.load(folder)
    found = engine.eval_batch(x=x, labels=x).item()
    engine.close()
    return found, expected


def test_an_engine_that_only_evaluates_takes_the_weights(tmp_path: Path) -> None:
    ((found, expected),) = run_distributed(evaluated, 1, str(tmp_path))
    assert found == expected


def clipped(rank: int, folder: str) -> list[float]:
    """How far a step moves weights at most, in engines that clip and read a checkpoint of one that does not."""
    found = []
    for zero in (0, 1, 2, 3):
        engine = engine_of(Counts(0), zero, sgd)
        engine.save(f"{folder}/{zero}")
        engine.close()
        engine = engine_of(Counts(0), zero, sgd, gradient_clipping=1e-3)
        engine.load(f"{folder}/{zero}")
        with engine.whole_parameters():
            before = [each.detach().clone() for each in engine.module.parameters()]
        losses(engine, range(1))
        with engine.whole_parameters():
            moved = [(one - other).norm() for one, other in zip(before, engine.module.parameters(), strict=True)]
        found.append(torch.stack(moved).norm().item())
        engine.close()
    return found


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def test_an_engine_clips_as_it_was_built_to_and_not_as_the_checkpoint_was(tmp_path: Path) -> None:
    (found,) = run_distributed(clipped, 1, str(tmp_path))
    assert found == pytest.approx([1e-3] * 4, rel=1e-2)


def whole(rank: int, layout: dict[str, int]) -> float:
    """How far weights of stage 3 of ZeRO are from those of one process, as a schedule gives them whole."""
    count_again(rank)
    mesh = mesh_of(**layout)
    model, reference = Counts(0), Counts(0)
    schedule = create_schedule(model, mesh=mesh, plugins=PLUGINS)
    if layout.get("tp", 1) > 1:
        schedule.tensor_parallel({"up": "colwise", "middle": "rowwise"})
    options = {"stage": 3, "stage3_param_persistence_threshold": 1}
    engine: Any = build(schedule, "deepspeed", optimizer=adamw, loss_fn=F.mse_loss, config={"zero_optimization": options})
    part = X[0].chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
    engine.train_batch(x=part, labels=part)
    assert not any(parameter.numel() for parameter in model.parameters())
    assert "a parameter has become empty, as in ZeRO-3" in message_of(schedule.full_state)
    with engine.whole_parameters():
        weights = schedule.full_state()
    engine.close()
    optimizer = adamw(reference.parameters())
    F.mse_loss(reference(X[0]), X[0]).backward()
    optimizer.step()
    return max(float((weights[name] - value).abs().max()) for name, value in reference.named_parameters())


@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2}], ids=str)
def test_weights_are_whole_where_they_are_asked_for(layout: dict[str, int]) -> None:
    for difference in run_distributed(whole, 2, layout):
        assert difference < 2e-5


def unchanged(rank: int, case: str) -> tuple[str, bool]:
    """Message of ``build``, and True if the given optimizer is unchanged."""
    mesh = mesh_of(pp=2)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 8, bias=False), nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    )
    parameters = [*model.parameters()] if case != "one stage" else [*model[:2].parameters()]
    optimizer = grouped(parameters)
    rate: Any = falling(optimizer) if case == "rate" else None
    if case == "other rate":
        rate = partial(lambda other, _: other, falling(grouped(model.parameters())))
    if case == "plateau":
        rate = torch.optim.lr_scheduler.ReduceLROnPlateau
    before = [(group, dict(group)) for group in optimizer.param_groups]
    import slapo_pipeline.plugin

    plugins = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_deepspeed.plugin, slapo_pipeline.plugin])
    schedule = create_schedule(model, mesh=mesh, example_inputs={"input": X[0]}, plugins=plugins)
    schedule["1"].cut_pipeline_stage()
    message = message_of(lambda: build(schedule, "deepspeed", optimizer=optimizer, lr_scheduler=rate, loss_fn=F.mse_loss))
    same = len(before) == len(optimizer.param_groups) and all(
        group is own and set(group) == set(facts) and all(group[key] is facts[key] for key in facts)
        for own, (group, facts) in zip(optimizer.param_groups, before, strict=True)
    )
    return message, same


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("rate", "a rank's stage has no parameter of one of the optimizer's groups, which lr_scheduler= was made for"),
        ("other rate", "lr_scheduler= is a schedule of another optimizer"),
        ("plateau", "lr_scheduler= gave a ReduceLROnPlateau, which is stepped without the loss here; give another"),
        ("one stage", "optimizer= has no parameter of a rank's stage"),
    ],
)
def test_an_optimizer_that_is_refused_is_unchanged(case: str, expected: str) -> None:
    for message, same in run_distributed(unchanged, 2, case):
        assert expected in message
        assert same


def placed(rank: int, folder: str) -> list[Any]:
    """Message of a failed save, the position in the checkpoint that is left, and True if training resumes equally from it."""
    engine = engine_of(Counts(0), 2)
    losses(engine, range(2))
    engine.save(folder, extra=[2])
    expected = losses(engine, range(2, 4))
    kept, torch.save = torch.save, _fail if rank == 1 else torch.save
    message = message_of(lambda: engine.save(folder, extra=[4]))
    torch.save = kept
    found = engine.load(folder), engine.steps
    again = losses(engine, range(engine.steps, 4))
    engine.close()
    return [message, found, again == expected, len([*Path(folder).glob("data-*")])]


def _fail(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    for message, found, same, folders in run_distributed(placed, 2, str(tmp_path)):
        assert "No space left on device" in message
        assert found == ([2], 2)
        assert same
        assert folders == 1


class Keeps(nn.Module):
    """Has a state of its own beside its tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.seen = nn.Linear(8, 8), 0

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, state: int) -> None:
        self.seen = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.layer(x)


def kept_apart(rank: int, folder: str, zero: int, saves: bool) -> list[Any]:
    """Message of a load, the extra state that a module got, and the message of building with Adagrad."""
    model = Keeps()
    engine = engine_of(model, zero, adamw)
    losses(engine, range(1 + 4 * saves))
    if saves:
        engine.save(folder)
        losses(engine, range(1))
    message = message_of(lambda: engine.load(folder))
    engine.close()
    return [message, model.seen, message_of(lambda: engine_of(Counts(0), 2, adagrad, zero_allow_untested_optimizer=True))]


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    return torch.optim.Adagrad([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 1e-3}])


def test_a_state_that_is_no_tensor_stays_on_its_layout(tmp_path: Path) -> None:
    ((message, seen, refused),) = run_distributed(kept_apart, 1, str(tmp_path), 2, True)
    assert message == "no error"
    assert seen == 5
    assert "BuildError: for ZeRO DeepSpeed makes another Adagrad, which has no groups of parameters" in refused
    for message, seen, _ in run_distributed(kept_apart, 2, str(tmp_path), 2, False):
        assert "an engine of modules with an extra state takes its own layout alone; load it on the layout and with" in message
        assert seen == 1


@pytest.mark.multiproc
def test_every_replica_gets_its_own_buffers_back(tmp_path: Path) -> None:
    check_own_buffers(
        *run_distributed(own_buffers, 2, "deepspeed", str(tmp_path), {"config": {"zero_optimization": {"stage": 1}}})
    )
