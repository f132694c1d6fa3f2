"""Refusals of unsupported or contradictory options: one sentence, the same on all ranks, before anything is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from slapo_core import BuildError, build, create_schedule
from slapo_megatron.configuration.options import MegatronOptions
from slapo_megatron.dialect import MegatronDialect
from slapo_testing import run_distributed
from tests.engines import PLUGINS
from tests.slapo_torch.layouts import adamw, mesh_of, message_of

LIMITS = Path(__file__).parents[2] / "docs" / "limits.md"


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distributed_optimiser": True}, "did you mean 'distributed_optimizer'"),
        ({"distributed_optimizer": 1}, "distributed_optimizer is 1; give True or False"),
        ({"timeout_minutes": 0}, "timeout_minutes is 0; give a whole number from 1 on"),
        ({"precision": "int8"}, "precision is 'int8'"),
        ({"config": 3}, "config is a int; give a dict"),
        ({"config": {"dpp": {}}}, "did you mean 'ddp'"),
        ({"config": {"ddp": 3}}, r"config\['ddp'\] is 3; give keyword arguments"),
        ({"config": {"ddp": {"overlap_grad_reduce": "yes"}}}, r"\['overlap_grad_reduce'\] is 'yes'; give True or False"),
        ({"config": {"ddp": {"bucket_size": -5}}}, r"config\['ddp'\]\['bucket_size'\] is -5; give a whole number from 1 on"),
        ({"config": {"transformer": {"microbatch_group_size_per_vp_stage": "x"}}}, "is 'x'; give a whole number from 1 on"),
        ({"config": {"optimizer": {"optimizer": "adam", "lr": -1}}}, r"\['lr'\] is -1; give a number from 0 on"),
        ({"microbatches": True}, "microbatches is True; give a whole number from 1 on"),
        ({"config": {"optimizer": {"clip_grad": 1.0}}}, "no key 'clip_grad' of config\\['optimizer'\\] of target 'megatron'"),
        ({"config": {"transformer": {"calculate_per_token_loss": True}}}, "the schedule and the other options say all else"),
        ({"config": {"ddp": {"overlap_gradient_reduce": True}}}, "did you mean 'overlap_grad_reduce'"),
        ({"optimizer": adamw, "config": {"optimizer": {"lr": 1.0}}}, "are two optimizers; give one of them"),
        ({"config": {"optimizer": {"lr": 1.0}}}, r"config\['optimizer'\] is not an optimizer of Megatron's"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        MegatronOptions.of(options)


def test_the_table_of_limits_is_what_is_declared() -> None:
    page = LIMITS.read_text().partition("\n## Megatron-Core\n")[2]
    table = page.partition("| asked | instead |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in table.splitlines()]
    assert rows == [(limit.asked, limit.instead) for limit in MegatronDialect.limits]


def asked(rank: int) -> dict[str, str]:
    """The messages of what cannot be built, each of a new schedule, and how many process groups were made."""
    mesh, flat, example = mesh_of(pp=2), mesh_of(dp=2), {"input": torch.zeros(2, 4)}

    def attempt(stages: int, made: Any = mesh, **options: Any) -> str:
        schedule = create_schedule(model(), mesh=made, example_inputs=example, plugins=PLUGINS)
        for layer in range(stages - 1):
            schedule[str(layer)].cut_pipeline_stage()
        given = {"loss_fn": nn.functional.mse_loss, "optimizer": adamw, **options}
        return message_of(lambda: build(schedule, "megatron", **given))

    frozen = model()
    frozen[:2].requires_grad_(False)
    schedule = create_schedule(frozen, mesh=mesh, example_inputs={"input": torch.zeros(2, 4)}, plugins=PLUGINS)
    schedule["1"].cut_pipeline_stage()
    its_sgd = {"optimizer": {"optimizer": "sgd", "lr": 0.1}}
    sgd = torch.optim.SGD(model().parameters(), lr=0.1)
    turned = DeviceMesh("cpu", [1, 0], mesh_dim_names=("dp",))
    batched = {"transformer": {"batch_p2p_comm": True, "overlap_p2p_comm": False}}
    before = dist.new_group([0, 1]).group_name
    found = {
        "fp16": attempt(1, flat, precision="fp16"),
        "one rank": attempt(2, flat),
        "no cuts": attempt(1),
        "idle": message_of(lambda: build(schedule, "megatron", loss_fn=nn.functional.mse_loss, optimizer=adamw)),
        "overlap": attempt(2, config={"transformer": {"overlap_p2p_comm": True}}),
        "batched": attempt(4, microbatches=2, config=batched),
        "micro-batches": attempt(4, microbatches=3),
        "no optimizer": attempt(1, flat, optimizer=None, distributed_optimizer=True),
        "megatron's": attempt(1, flat, optimizer=None, distributed_optimizer=True, config=its_sgd),
        "type": message_of(lambda: build(create_schedule(model().double(), mesh=flat, plugins=PLUGINS), "megatron")),
        "another optimizer": attempt(1, flat, distributed_optimizer=True, optimizer=sgd),
        "turned": attempt(1, turned),
        "plateau": attempt(1, flat, optimizer=sgd, lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(sgd)),
        "no mesh": attempt(3, None),
        "sum": attempt(1, flat, loss_fn=nn.MSELoss(reduction="sum")),
    }
    assert int(dist.new_group([0, 1]).group_name) == int(before) + 1, "groups are numbered"
    return found


def asked_as_it_is_built(rank: int) -> list[str]:
    """Messages of refusals during the build, by Megatron or on one rank only; a later build works."""
    flat = mesh_of(dp=2)

    def attempt(**options: Any) -> str:
        schedule = create_schedule(model(), mesh=flat, plugins=PLUGINS)
        given = {"loss_fn": nn.functional.mse_loss, "optimizer": adamw, **options}
        return message_of(lambda: build(schedule, "megatron", **given).close())

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    def of_a_part(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(parameters)[1:], lr=0.1)

    def lbfgs(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters)

    return [
        attempt(config={"ddp": {"bucket_size": 1, "overlap_grad_reduce": True, "average_in_collective": True}}),
        attempt(config={"transformer": {"microbatch_group_size_per_vp_stage": 2, "deallocate_pipeline_outputs": True}}),
        attempt(optimizer=sgd, distributed_optimizer=True),
        attempt(),
        attempt(optimizer=of_a_part, clip=1.0),
        attempt(optimizer=of_a_part),
        attempt(optimizer=lbfgs),
    ]


@pytest.mark.multiproc
def test_what_megatron_cannot_do_is_refused_before_any_group_is_made() -> None:
    first, second = run_distributed(asked, 2)
    assert first == second
    limits = {limit.asked for limit in MegatronDialect.limits}
    expected = {
        "fp16": "fp16",
        "one rank": "several stages on one rank along pp",
        "no cuts": "a number of stages that is not a multiple of pp (1 stage with pp=2)",
        "idle": "a rank with nothing to train",
        "overlap": "overlap_p2p_comm without interleaved stages",
        "batched": "interleaved stages with batched messages",
        "micro-batches": "interleaved stages with a number of micro-batches that the ranks along pp do not divide",
        "no optimizer": "the distributed optimizer without an optimizer",
        "another optimizer": "the distributed optimizer with another optimizer than Adam or AdamW",
        "megatron's": "the distributed optimizer with another optimizer than Adam or AdamW",
        "type": "parameters of another type than float32, or with bf16 bfloat16 (0.weight is torch.float64)",
        "turned": "a mesh that leaves out ranks, or has them in another order than row-major over pp, dp, tp",
        "no mesh": "several ranks without a mesh that do not fit the stages or the group (2 ranks)",
        "plateau": "ReduceLROnPlateau, as it steps a learning rate's schedule without the loss",
        "sum": "loss_fn has reduction='sum'",
    }
    for what, words in expected.items():
        is_limit = any(words.startswith(limit) for limit in limits)
        sentence = f"target 'megatron' cannot do {words}; " if is_limit else words
        assert sentence in first[what], first[what]
        assert first[what].startswith("BuildError: ")


@pytest.mark.multiproc
def test_what_shows_as_it_is_built_leaves_nothing_behind() -> None:
    first, second = run_distributed(asked_as_it_is_built, 2)
    assert first == second
    assert first[:2] == ["no error", "no error"], "Megatron takes these"
    assert "cannot do the distributed optimizer with another optimizer than Adam or AdamW" in first[2]
    assert first[3] == first[5] == "no error"
    assert first[4].startswith("BuildError: the optimizer leaves out '0.weight', whose gradient Megatron would not count")
    assert first[6].startswith("BuildError: LBFGS computes the loss several times in a step")
