"""Parameters sharded over replicas: every layout trains as the unmodified model does, and each rank holds its rows only."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import slapo_sharding.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, Schedule, build, create_schedule, get_logger, init_empty_weights
from slapo_sharding import load_full_state
from slapo_testing import run_distributed
from slapo_training.checkpoint import SavedTensors

from ..layouts import adamw, gpt2, losses, mesh_of, message_of, my_part, scheduled, tokens, train_beside_reference

pytestmark = pytest.mark.multiproc

FSDP = {"data_parallel": "fsdp"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layout", "per_rank", "config"),
    [
        ({"dp": 2}, 1, {"microbatches": 2, "clip": 0.1}),
        pytest.param({"dp": 2, "tp": 2}, 1, {"microbatches": 2, "clip": 0.1}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp": 2}, 1, {"microbatches": 2, "clip": 0.1}, marks=pytest.mark.slow),
        ({"pp": 2, "dp": 2}, 2, {"microbatches": 4, "clip": 0.1, "pipeline_schedule": "interleaved"}),
        pytest.param({"dp": 3}, 1, {"microbatches": 1}, marks=pytest.mark.slow),
        pytest.param({"dp": 2}, 1, {"fsdp_units": []}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp": 2}, 1, {"microbatches": 4, "pipeline_schedule": "gpipe"}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp": 2}, 2, {"microbatches": 4, "pipeline_schedule": "zbv"}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp": 2}, 2, {"microbatches": 4, "pipeline_schedule": "zero_bubble"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_layout_trains_as_one_process_does(layout: dict[str, int], per_rank: int, config: dict[str, Any]) -> None:
    size = layout.get("pp", 1) * layout["dp"] * layout.get("tp", 1)
    for worst in run_distributed(train_beside_reference, size, layout, {**FSDP, **config}, per_rank, timeout=110):
        assert all(difference < 1e-5 for difference in worst.values()), worst


def _bytes_held(module: nn.Module) -> int:
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters()}
    return sum(storages.values())


def _sizes(rank: int) -> dict[str, int]:
    mesh = mesh_of(dp=2)
    model, batch = gpt2(), my_part(tokens(2)[0], mesh)
    whole = _bytes_held(model)
    engine: Any = build(scheduled(model, mesh, batch), "torch", optimizer=adamw, **FSDP)
    engine.train_batch(**batch)
    engine.eval_batch(**batch)
    gathered = sum(each.whole.untyped_storage().nbytes() for each in engine._shards.members)
    states = [state for each in engine.optimizer.state.values() for state in each.values() if state.dim()]
    gradients = sum(p.grad.nbytes for p in model.parameters())
    moments = sum(state.nbytes for state in states) // 2
    return {"whole": whole, "weights": _bytes_held(model), "gradients": gradients, "moments": moments, "gathered": gathered}


def test_a_replica_holds_half_of_everything_between_steps() -> None:
    for sizes in run_distributed(_sizes, 2):
        half = sizes["whole"] / 2
        assert sizes["gathered"] == 0
        for what in ("weights", "gradients", "moments"):
            assert half <= sizes[what] < 1.02 * half, sizes


class Mixed(nn.Module):
    """Parameters of all kinds: a number, fewer rows than replicas, two types, frozen ones, recurrent ones, a layer by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.scale, self.one = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1, 6))
        self.rnn = nn.LSTM(6, 6, batch_first=True)
        self.precise = nn.Linear(6, 1).double()
        self.transposed = nn.Parameter(torch.randn(6, 5).t())
        self.layers[1].requires_grad_(False)
        self.layers[2].weight.requires_grad_(False)
        self.layers[2].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = self.rnn(x * self.scale + self.one)[0]
        return self.precise(x.double()) + (x @ self.transposed.t()).sum(-1, keepdim=True)


def _engine(model: nn.Module, dp: int, **config: Any) -> tuple[Schedule, Any]:
    plugins = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_sharding.plugin, slapo_torch.plugin])
    schedule = create_schedule(model, mesh=mesh_of(dp=dp), plugins=plugins)
    return schedule, build(schedule, "torch", **{"loss_fn": F.mse_loss, "optimizer": adamw, **config})


def _beside_ddp(rank: int, config: dict[str, Any]) -> list[float]:
    """Differences of losses, gradients and weights over four steps of both kinds of replicas."""
    torch.manual_seed(0)
    model = Mixed()
    pairs = [_engine(copy.deepcopy(model), 2, data_parallel=kind, **config) for kind in ("ddp", "fsdp")]
    generator, found = torch.Generator().manual_seed(rank), []
    for _ in range(4):
        batch = {"x": torch.randn(4, 3, 6, generator=generator), "labels": torch.randn(4, 3, 1, generator=generator).double()}
        one, other = (engine.train_batch(**batch).item() for _, engine in pairs)
        found.append(abs(one - other))
        for kind in ("grad", "param"):
            first, second = (schedule.full_state(kind) for schedule, _ in pairs)
            assert {name for name, value in first.items() if value is None} == {n for n, v in second.items() if v is None}
            found += [float((first[n] - second[n]).abs().max()) for n in first if first[n] is not None]
        found.append(abs((pairs[0][1].grad_norm or 0.0) - (pairs[1][1].grad_norm or 0.0)))
    return found


def test_parameters_of_all_kinds_train_as_with_ddp() -> None:
    for found in run_distributed(_beside_ddp, 2, {"microbatches": 2, "clip": 0.1}):
        assert max(found) < 1e-5


def _trained(rank: int, layout: dict[str, int], path: str) -> list[Any]:
    """Losses of steps 3 and 4: as they went on, and as engines of both kinds go on from what either saved."""
    mesh, config = mesh_of(**layout), {"microbatches": layout.get("pp", 1)}
    data = tokens(2, 4)
    data[1::2] = [batch[:, :12] for batch in data[1::2]]  # a pipeline is planned anew
    found: dict[str, list[float]] = {}
    for kind in ("ddp", "fsdp"):
        schedule = scheduled(gpt2(0.1), mesh, my_part(data[0], mesh))
        engine: Any = build(schedule, "torch", optimizer=adamw, data_parallel=kind, **config)
        losses(engine, mesh, data[:2])
        engine.save(f"{path}/{kind}")
        found[kind] = losses(engine, mesh, data[2:])
    for saved in ("ddp", "fsdp"):
        for kind in ("ddp", "fsdp"):
            schedule = scheduled(gpt2(0.1), mesh, my_part(data[0], mesh))
            loaded: Any = build(schedule, "torch", optimizer=adamw, data_parallel=kind, **config)
            loaded.load(f"{path}/{saved}")
            found[f"{saved} {kind}"] = losses(loaded, mesh, data[2:])
    names = []
    for kind in ("ddp", "fsdp"):
        (data,) = Path(path, kind).glob("data-*")
        names.append({name: shape for name, (shape, _) in SavedTensors(data).facts().items()})
    return [found, names]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"dp": 2}, pytest.param({"pp": 2, "dp": 2}, marks=pytest.mark.slow)], ids=str)
def test_what_one_kind_of_replicas_saved_the_other_loads(layout: dict[str, int], tmp_path: Path) -> None:
    size = layout.get("pp", 1) * layout["dp"]
    for found, (ddp, fsdp) in run_distributed(_trained, size, layout, str(tmp_path), timeout=110):
        assert ddp == fsdp
        assert ddp["model.transformer.wte.weight"] == ddp["optimizer.exp_avg.transformer.wte.weight"] == (64, 32)
        for key, values in found.items():
            assert values == pytest.approx(found[key.split()[0]], abs=1e-5), key


def _on_meta(rank: int) -> list[float]:
    data, found = tokens(2, 2), []
    for kind in ("ddp", "fsdp"):
        mesh = mesh_of(dp=2)
        with init_empty_weights():
            model = gpt2()
        engine = build(scheduled(model, mesh, my_part(data[0], mesh)), "torch", optimizer=adamw, data_parallel=kind)
        found.append(losses(engine, mesh, data))
    return [abs(one - other) for one, other in zip(*found, strict=True)]


@pytest.mark.slow
def test_weights_on_meta_are_the_same_numbers() -> None:
    for differences in run_distributed(_on_meta, 2):
        assert max(differences) < 1e-5


def _given_objects(rank: int) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1))
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.5}], lr=0.1)
    rate = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    _, engine = _engine(model, 2, optimizer=optimizer, lr_scheduler=rate, **FSDP)
    x, labels = torch.randn(8, 4), torch.randn(8, 1)
    own = torch.optim.SGD([{"params": reference[0].parameters()}, {"params": reference[1].parameters(), "lr": 0.5}], lr=0.1)
    follows, found = torch.optim.lr_scheduler.StepLR(own, 1, gamma=0.5), []
    for _ in range(3):
        loss = engine.train_batch(input=x.chunk(2)[rank], labels=labels.chunk(2)[rank])
        own.zero_grad()
        expected = F.mse_loss(reference(x), labels)
        expected.backward()
        own.step()
        follows.step()
        found.append(abs(loss.item() - expected.item()))
    return [engine.optimizer is optimizer, max(found)]


def test_an_optimizer_of_the_unsharded_parameters_goes_on_with_the_shards() -> None:
    for same, difference in run_distributed(_given_objects, 2):
        assert same
        assert difference < 1e-5


class Block(nn.Module):
    """A layer that computes its activations again in the backward, and looks at how much is gathered meanwhile.

    As in T5, the first one also makes a bias for all, and each passes it on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.bias = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)
        self.look: Callable[[], None] = int

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        bias = self.bias(x) if bias is None else bias
        return x + bias + checkpoint(self._inside, x, use_reentrant=False), bias

    def _inside(self, x: torch.Tensor) -> torch.Tensor:
        self.look()
        return self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Layers in a list, run in an order that can be changed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(8, 1)
        self.order, self.reads = [0, 1, 2, 3], False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None
        for index in self.order:
            x, bias = self.layers[index](x, bias=bias)
        if self.reads:
            x = x * self.layers[0].bias.weight.sum()
        return self.head(x)


def _stack_batch(rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return {"x": torch.randn(4, 8, generator=generator), "labels": torch.randn(4, 1, generator=generator)}


def _gathered_in_step(rank: int) -> tuple[int, int, set[int], float]:
    """Elements of a layer and of the head; those that were gathered at a time, while layers ran; how far ddp is."""
    models = [Stack() for _ in range(2)]
    (_, plain), (schedule, engine) = (_engine(m, 2, data_parallel=k) for m, k in zip(models, ("ddp", "fsdp"), strict=True))
    found: set[int] = set()

    def look() -> None:
        wholes = [each.whole for each in engine._shards.members if each.whole is not None]
        found.add(sum(whole.numel() for whole in wholes if whole.untyped_storage().nbytes()))

    for block in models[1].layers:
        block.look = look
    differences = [abs(plain.train_batch(**_stack_batch(rank)).item() - engine.train_batch(**_stack_batch(rank)).item())]
    differences.append(abs(plain.eval_batch(**_stack_batch(rank)).item() - engine.eval_batch(**_stack_batch(rank)).item()))
    state = schedule.full_state()
    differences += [float((state[name] - parameter).abs().max()) for name, parameter in models[0].named_parameters()]
    load_full_state(models[1], {name: value + 1 for name, value in state.items()})
    differences += [float((value - state[name] - 1).abs().max()) for name, value in schedule.full_state().items()]
    return sum(parameter.numel() for parameter in Block().parameters()), 9, found, max(differences)


def test_a_model_in_one_piece_has_one_layer_at_a_time_gathered() -> None:
    for layer, head, found, difference in run_distributed(_gathered_in_step, 2):
        assert found == {layer + head}
        assert difference < 1e-6


def _orders(rank: int) -> list[str]:
    """Return messages for layers that run in another order, twice, not on one replica, and alone."""
    model = Stack()
    _, engine = _engine(model, 2, **FSDP, fsdp_units=["layers.*"])
    messages = []
    for order in ([0, 2, 1, 3], [0, 1, 1, 2, 3], [0, 1, 3] if rank else [1, 2], [0, 1, 2, 3]):
        model.order = order
        messages.append(message_of(lambda: engine.train_batch(**_stack_batch(rank))))
    messages.append(message_of(lambda: model(_stack_batch(rank)["x"])))
    model.reads = True
    messages.append(message_of(lambda: engine.train_batch(**_stack_batch(rank))))
    again = Stack()
    again.order = [3, 0, 0]
    _, engine = _engine(again, 2, **FSDP, fsdp_units=[])
    messages.append(message_of(lambda: engine.train_batch(**_stack_batch(rank))))
    return [*messages, message_of(lambda: again(_stack_batch(rank)["x"]))]


def _in_no_order(rank: int, order: list[int]) -> tuple[float, int]:
    """Return how far from ddp units that nobody has named bring a model that runs layers again, and the warnings."""
    models, told = [Stack() for _ in range(2)], []
    for model in models:
        model.order = order if rank else [0, 1, 2, 3]
        # what a first try draws is drawn again
        model.layers[0].register_forward_hook(lambda module, args, output: (F.dropout(output[0], 0.5), output[1]))
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    get_logger().addHandler(handler)
    worst = 0.0
    engines = [_engine(model, 2, data_parallel=kind)[1] for model, kind in zip(models, ("ddp", "fsdp"), strict=True)]
    for _ in range(2):
        losses = []
        for engine in engines:
            torch.manual_seed(rank)
            losses.append(engine.train_batch(**_stack_batch(rank)).item())
        worst = max(worst, abs(losses[0] - losses[1]))
    get_logger().removeHandler(handler)
    return worst, sum("gathers all parameters for the whole step: " in each for each in told)


@pytest.mark.parametrize("order", [[0, 1, 1, 2, 3], [0, 2, 1, 3]], ids=str)
def test_units_that_nobody_named_give_way(order: list[int]) -> None:
    for worst, count in run_distributed(_in_no_order, 2, order):
        assert worst < 1e-6
        assert count == 1


def test_units_run_at_most_once_and_in_order() -> None:
    for order, twice, skipped, sound, alone, read, without, at_all in run_distributed(_orders, 2):
        assert "the unit 'layers.1' runs again, or behind one that follows it in the model; give fsdp_units=[]" in order
        assert "the unit 'layers.1' runs again" in twice
        assert (skipped, sound, without) == ("no error",) * 3
        assert "a parameter of a unit is read where that unit does not run; give fsdp_units=[]" in read
        for message in (alone, at_all):
            assert "the model's parameters are sharded over replicas; run it by train_batch or eval_batch" in message


def _failed_build(rank: int) -> tuple[list[str], bool, float]:
    """Errors of an optimizer; then what the model gives, and a second engine's loss beside that."""
    model, batch = Stack(), _stack_batch(rank)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    given = [lambda parameters: 1 / 0, stranger, torch.optim.LBFGS(model.parameters())]
    messages = [message_of(partial(_engine, model, 2, optimizer=each, **FSDP)) for each in given]
    same = all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    loss = F.mse_loss(model(batch["x"]), batch["labels"])
    loss.backward()
    _, engine = _engine(model, 2, **FSDP)
    other = copy.deepcopy(loss.detach())
    torch.distributed.all_reduce(other)
    return messages, same, abs(engine.train_batch(**batch).item() - other.item() / 2)


def test_after_a_build_that_failed_the_model_is_whole() -> None:
    for (factory, stranger, whole), same, difference in run_distributed(_failed_build, 2):
        assert "division by zero" in factory
        assert "the optimizer has a parameter of shape (2, 2) that is not a parameter of the scheduled model" in stranger
        assert "LBFGS computes the loss several times in a step" in whole
        assert same
        assert difference < 1e-6


def _in_precision(rank: int, precision: str, dtype: torch.dtype) -> float:
    """Return the largest difference of losses from those of ddp over four steps."""
    engines = [
        _engine(Stack().to(dtype), 2, data_parallel=kind, precision=precision, clip=0.5, microbatches=2)[1]
        for kind in ("ddp", "fsdp")
    ]
    batch = {name: value.to(dtype) for name, value in _stack_batch(rank).items()}
    return max(abs(engines[0].train_batch(**batch).item() - engines[1].train_batch(**batch).item()) for _ in range(4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "dtype", "near"),
    [
        ("bf16", torch.float32, 1e-4),
        ("fp16", torch.float32, 1e-4),
        ("fp32", torch.float64, 1e-9),
        ("fp32", torch.bfloat16, 2e-2),
    ],
    ids=str,
)
def test_precisions_are_those_of_ddp(precision: str, dtype: torch.dtype, near: float) -> None:
    assert max(run_distributed(_in_precision, 2, precision, dtype)) < near


def _hooked(rank: int) -> list[Any]:
    """Per step: calls of hooks of both kinds, that come and go between steps, with ddp and with fsdp; and gradients' sums."""
    found = []
    for kind in ("ddp", "fsdp"):
        _, engine = _engine(nn.Sequential(model := nn.Linear(8, 2), nn.Linear(2, 1)), 2, data_parallel=kind)
        calls: list[str] = []
        kept = model.bias.register_hook(lambda gradient, calls=calls: calls.append("before"))
        for step in range(4):
            calls.append(str(step))
            if step == 1:
                last = model.bias.register_post_accumulate_grad_hook(lambda parameter, calls=calls: calls.append("behind"))
                model.weight.register_hook(lambda gradient: gradient * 0)
            if step == 2:
                kept.remove()
            if step == 3:
                last.remove()
            batch = _stack_batch(rank)
            engine.train_batch(input=batch["x"], labels=batch["labels"])
            assert model.weight.grad is not None
            calls.append(str(bool(model.weight.grad.any())))
        found.append(calls)
    return found


def test_hooks_that_come_and_go_between_steps() -> None:
    for ddp, fsdp in run_distributed(_hooked, 2):
        assert fsdp == "0 before True 1 before behind False 2 behind False 3 False".split()
        assert ddp == fsdp


class Scaled(nn.Module):
    """A whole weight meets values that are sharded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.scale, self.down = nn.Linear(8, 8), nn.Parameter(torch.ones(3)), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x) * self.scale.sum())


def _parts_of_a_gradient(rank: int) -> list[Any]:
    plugins, mesh = (
        Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_sharding.plugin, slapo_torch.plugin]),
        mesh_of(dp=2, tp=2),
    )
    schedule = create_schedule(model := Scaled(), mesh=mesh, plugins=plugins)
    schedule.tensor_parallel({"up": "colwise", "down": "rowwise"})
    engine: Any = build(schedule, "torch", optimizer=adamw, loss_fn=F.mse_loss, check=False, **FSDP)
    before = copy.deepcopy(model.state_dict())
    messages = [message_of(lambda: engine.train_batch(**_stack_batch(mesh["dp"].get_local_rank()))) for _ in range(2)]
    return [*messages, all(torch.equal(value, before[name]) for name, value in model.state_dict().items())]


@pytest.mark.slow
def test_parts_of_a_gradient_are_refused_before_the_step() -> None:
    for *messages, same in run_distributed(_parts_of_a_gradient, 4):
        assert all(
            "the gradient of 'scale', which is whole, differs between tensor-parallel ranks" in text for text in messages
        )
        assert same


def _refusals(rank: int) -> list[str]:
    def layers() -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 1))

    given: list[dict[str, Any]] = [
        {"data_parallel": "zero"},
        {**FSDP, "fsdp_units": ["2"]},
        {**FSDP, "fsdp_units": "0.*"},
        {**FSDP, "fsdp_units": ["0", "0.1"]},
        {"fsdp_units": ["0.*"]},
        {**FSDP, "optimizer": torch.optim.LBFGS},
    ]
    messages = [message_of(partial(_engine, layers(), 2, **config)) for config in given]
    kinds = [{"data_parallel": "fsdp" if rank else "ddp"}, {**FSDP, "fsdp_units": [str(rank)]}]
    return messages + [message_of(partial(_engine, layers(), 2, **config)) for config in kinds]


def test_what_cannot_be_sharded_is_refused_on_all_ranks() -> None:
    first, second = run_distributed(_refusals, 2)
    assert [message.split(": ", 1)[1] for message in first] == [message.split(": ", 1)[1] for message in second]
    for message, part in zip(
        first,
        [
            "no data_parallel 'zero'",
            "no module for fsdp_units '2'",
            "fsdp_units is '0.*'; give a list of globs, e.g. ['0.*']",
            "'0.1' is inside of the unit '0'",
            "fsdp_units are for data_parallel='fsdp'",
            "LBFGS computes the loss several times in a step",
            "the ranks have different schedules: ",
            "the ranks have different schedules: ",
        ],
        strict=True,
    ):
        assert part in message
