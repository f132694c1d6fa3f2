"""Checkpoints at another layout, of every kind of model and optimizer and of ZeRO's ways to keep its states."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from slapo_core import Schedule, build
from slapo_testing import run_distributed
from tests.engine_models import SIZES, batches, halved, my_part, small, two_groups
from tests.engines import cut, scheduled
from tests.slapo_torch.layouts import adamw, mesh_of, message_of, put_together

from ..parameter_numbers import count_again

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def _counters() -> Iterator[None]:
    """The processes go on to tests of other files."""
    yield
    run_distributed(count_again, 4)


class Side(NamedTuple):
    """Engine on one side of a checkpoint, the saving or the loading one.

    Args:
        layout: Sizes of the mesh.
        options: Options of ``build``.
        make: The function of this file that makes the schedule.
    """

    layout: dict[str, int]
    options: dict[str, Any]
    make: Any = None

    @property
    def ranks(self) -> int:
        return math.prod(self.layout.values())


def options(stage: int, zero: dict[str, Any] | None = None, **config: Any) -> dict[str, Any]:
    """Options of ``build`` with a DeepSpeed config."""
    return {"config": {"zero_optimization": {"stage": stage, **(zero or {})}, **config}}


def gpt2(mesh: Any) -> Schedule:
    return scheduled(small("gpt2"), mesh, my_part(batches(2)[0], mesh))


def cut_early(mesh: Any) -> Schedule:
    """Its first stage has one layer of four."""
    return cut(small("gpt2"), mesh, my_part(batches(2)[0], mesh), "transformer.h.0")


def uneven(mesh: Any) -> Schedule:
    """Each rank has a copy of the one key head; the vocabulary and the columns are odd."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 15, "num_hidden_layers": 2, "head_dim": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1}
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(**{**SIZES, **sizes, **heads, "vocab_size": 65}, tie_word_embeddings=True, use_cache=False)
    )
    return scheduled(model, mesh, my_part(batches(2)[0], mesh))


class Normed(nn.Module):
    """Statistics of a BatchNorm that trains, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 16)
        self.embedding = nn.Embedding(64, 16).requires_grad_(False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(self.embedding(input_ids)).flatten(0, 1)).relu()
        return self.last(hidden)


def normed(mesh: Any) -> Schedule:
    paths = ["norm"] if mesh["pp"].size() > 1 else []
    return cut(Normed(), mesh, {"input_ids": batches(2)[0]["input_ids"][:4]}, *paths)


def distance(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output, functional.one_hot(labels.flatten() % 16, 16).float())


def engine_of(side: Side, optimizer: Any) -> tuple[Any, Any]:
    count_again(dist.get_rank())
    mesh = mesh_of(**side.layout)
    common: dict[str, Any] = {"microbatches": 2, "clip": 0.0 if side.make is uneven else 0.1}
    if optimizer is not None:
        # for Adagrad ZeRO makes another one, which no schedule knows
        common |= {"optimizer": optimizer, "lr_scheduler": None if optimizer is adagrad else halved}
    if side.make is normed:
        common["loss_fn"] = distance
    return build((side.make or gpt2)(mesh), "deepspeed", **{**common, **side.options}), mesh


def losses(engine: Any, mesh: Any, steps: range) -> list[float]:
    return [engine.train_batch(**my_part(batches(2)[step], mesh)).item() for step in steps]


def saved(rank: int, side: Side, optimizer: Any, folder: str, steps: int) -> tuple[Weights, list[float], Weights]:
    """The weights behind some steps and a save, losses of those behind it, and the weights then."""
    engine, mesh = engine_of(side, optimizer)
    losses(engine, mesh, range(steps))
    engine.save(folder)
    weights = put_together(engine, mesh)
    found = losses(engine, mesh, range(steps, 5))
    after = put_together(engine, mesh)
    engine.close()
    return weights, found, after


def resumed(rank: int, side: Side, optimizer: Any, folder: str, steps: int) -> tuple[Weights, list[float], Weights]:
    """Those of an engine that trained on something else and then loaded it, saved it again, and loaded that."""
    engine, mesh = engine_of(side, optimizer)
    losses(engine, mesh, range(4, 5))
    engine.load(folder)
    weights = put_together(engine, mesh)
    engine.save(f"{folder}/again")
    losses(engine, mesh, range(steps, 5))
    engine.load(f"{folder}/again")
    found = losses(engine, mesh, range(steps, 5))
    after = put_together(engine, mesh)
    engine.close()
    return weights, found, after


def check(one: Side, other: Side, optimizer: Any, folder: str, steps: int = 2, near: float = 2e-5) -> None:
    weights, expected, after = run_distributed(saved, one.ranks, one, optimizer, folder, steps, timeout=110)[0]
    for loaded, found, own in run_distributed(resumed, other.ranks, other, optimizer, folder, steps, timeout=110):
        assert loaded.keys() == weights.keys()
        assert all(torch.equal(loaded[name], weights[name]) for name in loaded)
        assert found == pytest.approx(expected, abs=near)
        assert max(float((own[name] - after[name]).abs().max()) for name in own) < near


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)


def rmsprop(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=1e-3, centered=True, momentum=0.5)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=1e-2, eps=1e-3)


def amsgrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, amsgrad=True)


def asgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.ASGD(parameters, lr=1e-2)


PAIRS = {
    "0 to 2": (Side({"tp": 2}, options(0)), Side({"dp": 2}, options(2))),
    "3 to 1": (Side({"dp": 2}, options(3)), Side({"pp": 2}, options(1))),
    "0 to 3": (Side({"pp": 2}, options(0)), Side({}, options(3))),
    "1 to 0": (Side({"dp": 2}, options(1)), Side({"tp": 2}, options(0))),
}


@pytest.mark.parametrize("optimizer", [sgd, rmsprop, adagrad, amsgrad, asgd], ids=lambda each: each.__name__)
@pytest.mark.parametrize("pair", PAIRS)
def test_every_optimizer_goes_on(pair: str, optimizer: Any, tmp_path: Path) -> None:
    check(*PAIRS[pair], optimizer, str(tmp_path))


IN_CPU = {"offload_optimizer": {"device": "cpu"}}
FORCED = {"zero_force_ds_cpu_optimizer": False}
KINDS = {
    "offloaded 2 to 0": (Side({"dp": 2}, options(2, IN_CPU, **FORCED)), Side({"tp": 2}, options(0))),
    "0 to offloaded 2": (Side({"tp": 2}, options(0)), Side({"dp": 2}, options(2, IN_CPU, **FORCED))),
    "offloaded 3 to 1": (Side({"dp": 2}, options(3, IN_CPU, **FORCED)), Side({"pp": 2}, options(1))),
    "1 to offloaded 3": (Side({"pp": 2}, options(1)), Side({"dp": 2}, options(3, IN_CPU, **FORCED))),
    "small sub-groups": (Side({"dp": 2}, options(3, {"sub_group_size": 3000})), Side({}, options(3, {"sub_group_size": 900}))),
    "sub-groups to 2": (Side({}, options(3, {"sub_group_size": 900})), Side({"dp": 2}, options(2))),
    "dealt in turns": (Side({"dp": 2}, options(2, {"round_robin_gradients": True})), Side({"tp": 2}, options(1))),
    "to dealt in turns": (Side({"tp": 2}, options(1)), Side({"dp": 2}, options(2, {"round_robin_gradients": True}))),
    "elastic": (Side({"dp": 2}, options(1, {"elastic_checkpoint": True})), Side({"pp": 2}, options(1))),
    "four replicas": (Side({"dp": 4}, options(3)), Side({"dp": 2, "tp": 2}, options(2))),
    "to four replicas": (Side({"dp": 2, "tp": 2}, options(3)), Side({"dp": 4}, options(1))),
    "replicated pipeline": (Side({"pp": 2, "dp": 2}, options(1)), Side({"dp": 2, "tp": 2}, options(3))),
    "to a replicated pipeline": (Side({"dp": 2, "tp": 2}, options(1)), Side({"pp": 2, "dp": 2}, options(0))),
    "now dealt in turns": (Side({"dp": 2}, options(2)), Side({"dp": 2}, options(2, {"round_robin_gradients": True}))),
    "cut elsewhere": (Side({"pp": 2}, options(1)), Side({"pp": 2}, options(1), cut_early)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [2, 0])
def test_every_way_to_keep_states(kind: str, steps: int, tmp_path: Path) -> None:
    check(*KINDS[kind], two_groups, str(tmp_path), steps)


def other_way(parameters: Any) -> torch.optim.Optimizer:
    """Two groups, the other one first."""
    one, other = two_groups(parameters).param_groups
    return torch.optim.AdamW([dict(other), dict(one)])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_groups_in_another_order_are_known_by_names(stage: int, tmp_path: Path) -> None:
    unscheduled = {**options(stage), "lr_scheduler": None}
    check(Side({}, unscheduled), Side({}, {**unscheduled, "optimizer": other_way}), two_groups, str(tmp_path))


def rescheduled(rank: int, folder: str) -> str:
    """Message of loading into an engine whose learning-rate schedule has the groups in another order."""
    engine, _ = engine_of(Side({}, options(1)), other_way)
    message = message_of(lambda: engine.load(folder))
    engine.close()
    return message


def test_a_schedule_of_other_groups_is_refused(tmp_path: Path) -> None:
    run_distributed(saved, 1, Side({}, options(1)), two_groups, str(tmp_path), 2)
    (message,) = run_distributed(rescheduled, 1, str(tmp_path))
    assert "schedule was saved of other groups of parameters than the 2 of this rank's stage; load it on the layout" in message


SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
HALVES = {
    "sums to 2": (Side({"dp": 2}, options(1, **SUMS)), Side({"tp": 2}, options(2))),
    "3 to sums": (Side({"dp": 2}, options(3)), Side({"pp": 2}, options(1, **SUMS))),
}


@pytest.mark.parametrize("kind", HALVES)
def test_gradients_summed_in_fp32_beside_bf16(kind: str, tmp_path: Path) -> None:
    one, other = (side._replace(options={**side.options, "precision": "bf16"}) for side in HALVES[kind])
    check(one, other, two_groups, str(tmp_path), near=2e-2)


MODELS = {
    "uneven 0": (Side({"tp": 2}, options(0), uneven), Side({}, options(1), uneven)),
    "uneven 3": (Side({"dp": 2}, options(3), uneven), Side({"tp": 2}, options(2), uneven)),
    "uneven 1": (Side({"tp": 2, "pp": 2}, options(1), uneven), Side({"dp": 2, "tp": 2}, options(3), uneven)),
    "buffers 0": (Side({"pp": 2}, options(0), normed), Side({}, options(3), normed)),
    "buffers 3": (Side({}, options(3), normed), Side({"pp": 2}, options(1), normed)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_every_model_goes_on(kind: str, tmp_path: Path) -> None:
    check(*MODELS[kind], adamw, str(tmp_path))


class Turned(torch.optim.SGD):
    """Keeps states whose numbers lie in another order in memory."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for state in self.state.values():
            if state["momentum_buffer"].dim() == 2:
                state["momentum_buffer"] = state["momentum_buffer"].t().contiguous().t()


def turned(parameters: Any) -> torch.optim.Optimizer:
    return Turned(parameters, lr=0.1, momentum=0.9)


def test_what_deepspeed_writes_in_another_order_is_written_beside_it(tmp_path: Path) -> None:
    check(Side({}, options(0)), Side({"dp": 2}, options(2)), turned, str(tmp_path))
    assert [file.name for file in tmp_path.glob("data-*/rest-*")] == ["rest-0.pt"]


def test_stages_that_replicas_write_in_turns_go_on(tmp_path: Path) -> None:
    parallel = {"checkpoint": {"parallel_write": {"pipeline_stage": True}}}
    check(Side({"pp": 2, "dp": 2}, options(0, **parallel)), Side({"tp": 2}, options(1)), two_groups, str(tmp_path))


def with_scale(rank: int, side: Side, folder: str, saves: bool) -> tuple[dict[str, Any], list[float]]:
    """The loss scale behind steps that overflowed and a save, or behind a load, and the losses of two steps more.

    On a CPU DeepSpeed refuses fp16, which torch there can do; so do our own limits, which are not asked here.
    """
    from deepspeed.accelerator import get_accelerator

    from slapo_core import build_program
    from slapo_deepspeed.configuration.options import DeepSpeedOptions
    from slapo_deepspeed.engine import DeepSpeedEngine

    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    try:
        count_again(rank)
        mesh = mesh_of(**side.layout)
        fp16 = {"enabled": True, "initial_scale_power": 20, "hysteresis": 1, "loss_scale_window": 3}
        given = {"optimizer": adamw, "precision": "fp16", "microbatches": 2, "config": {**side.options["config"], "fp16": fp16}}
        engine = DeepSpeedEngine(build_program(gpt2(mesh)), DeepSpeedOptions.of(given))
        losses(engine, mesh, range(3 if saves else 1))
        engine.save(folder) if saves else engine.load(folder)
        scale = {**vars(engine.model.optimizer.loss_scaler), "skipped": engine.model.skipped_steps}
        found = losses(engine, mesh, range(3, 5))
        engine.close()
    finally:
        del accelerator.is_fp16_supported
    return scale, found


@pytest.mark.parametrize(("one", "other"), [({"dp": 2}, {"tp": 2}), ({"dp": 2}, {"pp": 2})], ids=str)
def test_the_loss_scale_goes_on(one: dict[str, int], other: dict[str, int], tmp_path: Path) -> None:
    scale, expected = run_distributed(with_scale, 2, Side(one, options(3)), str(tmp_path), True)[0]
    assert scale["cur_scale"] < 2**20
    assert scale["skipped"] > 0
    for found, values in run_distributed(with_scale, 2, Side(other, options(1)), str(tmp_path), False):
        assert found == scale
        assert values == pytest.approx(expected, abs=2e-2)


WARM = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 2e-2, "warmup_num_steps": 4}},
}


def test_what_the_config_names_goes_on(tmp_path: Path) -> None:
    check(Side({"dp": 2}, options(2, **WARM)), Side({"pp": 2}, options(1, **WARM)), None, str(tmp_path))


def evaluated(rank: int, side: Side, folder: str) -> list[str | float]:
    """The loss of an engine without optimizer that has loaded, and what it says of a step, and of a save."""
    engine, mesh = engine_of(side, None)
    engine.load(folder)
    found = engine.eval_batch(**my_part(batches(2)[0], mesh)).item()
    messages = message_of(lambda: losses(engine, mesh, range(1))), message_of(lambda: engine.save(f"{folder}/again"))
    engine.close()
    return [found, *messages]


@pytest.mark.parametrize(("precision", "near"), [("fp32", 2e-5), ("bf16", 2e-2)])
def test_an_engine_that_only_evaluates_takes_the_weights_of_any_layout(precision: str, near: float, tmp_path: Path) -> None:
    trained, own = (Side({"dp": 2}, {**options(stage), "precision": precision}) for stage in (3, 2))
    alone = {**options(0), "precision": precision}
    run_distributed(saved, 2, trained, two_groups, str(tmp_path), 2)
    run_distributed(saved, 2, own, two_groups, f"{tmp_path}/own", 2)
    ((expected, *_),) = run_distributed(evaluated, 1, Side({}, alone), f"{tmp_path}/own")
    for found, step, save in run_distributed(evaluated, 2, Side({"pp": 2}, alone), str(tmp_path)):
        assert found == pytest.approx(expected, abs=near)
        assert "built without an optimizer" in step
        said = (
            "BuildError: DeepSpeed does not save an engine that only evaluates in bf16" if precision == "bf16" else "no error"
        )
        assert save.startswith(said)
