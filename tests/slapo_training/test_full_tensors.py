"""Full tensors under original names, on every rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from slapo_core import ScheduleError, ShardSpec, build, create_schedule, successor
from slapo_testing import run_distributed


def gather(rank: int, blocks: tuple[int, ...]) -> tuple[Any, Any, list[bool]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    full = model[0].weight.detach().clone()
    sch = create_schedule(model)
    spec = ShardSpec(0, (8, 4), rank, 2, blocks, dist.group.WORLD)
    model[0].weight = successor(model[0].weight, spec.local(full), spec=spec)
    model[0].weight.grad = model[0].weight.detach() * 2 if rank == 1 else None
    params, grads = sch.full_state("param"), sch.full_state("grad")
    return torch.equal(params["0.weight"], full), grads["0.weight"] / 2 - full, [grads[name] is None for name in grads]


@pytest.mark.multiproc
@pytest.mark.parametrize("blocks", [(8,), (4, 4)])
def test_shards_are_put_together_on_every_rank(blocks: tuple[int, ...]) -> None:
    """A gradient that only one rank has counts as zero on the others, and nobody hangs."""
    (same0, diff0, none0), (same1, diff1, none1) = run_distributed(gather, 2, blocks)
    assert same0
    assert same1
    assert none0 == none1 == [False, True, True, True]
    torch.testing.assert_close(diff0, diff1)
    here = ShardSpec(0, (8, 4), 1, 2, blocks).local(diff0)
    torch.testing.assert_close(here, torch.zeros(4, 4))


def test_a_tied_parameter_stands_under_each_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    sch = create_schedule(model)
    assert set(sch.full_state()) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    model(torch.ones(1, 4)).sum().backward()
    grads = sch.full_state("grad")
    assert torch.equal(grads["0.weight"], grads["1.weight"])
    assert grads["0.weight"] is not model[0].weight.grad


class Scaled(nn.Module):
    """Its own weight stands where that of the layer inside was."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.weight = nn.Parameter(torch.ones_like(inner.weight))


@pytest.mark.parametrize("kind", ["param", "grad"])
def test_two_parameters_of_one_name_are_an_error(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    sch = create_schedule(model)
    sch["0"].replace(Scaled(model[0]))
    with pytest.raises(ScheduleError, match=r"'0.weight' and '0.inner.weight' are both '0.weight' of .*; give the one"):
        sch.full_state(kind)


def test_another_kind_is_an_error() -> None:
    with pytest.raises(ScheduleError, match="kind is 'gradient'; give 'param', 'grad' or 'buffer'"):
        create_schedule(nn.Linear(2, 2)).full_state("gradient")


class Growing(nn.Linear):
    """Keeps the size of each column from its first forward on, as observers for each channel do."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("sizes", torch.zeros(0))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.sizes = self.weight.detach().abs().amax(0)
        return super().forward(input)


def grown(rank: int) -> bool:
    mesh = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("pp", "dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(Growing(), Growing())
    expected = [each.weight.detach().abs().amax(0) for each in model]
    sch = create_schedule(model, mesh=mesh, example_inputs=torch.ones(2, 4))
    sch["0"].cut_pipeline_stage()
    sgd = partial(torch.optim.SGD, lr=0.0)
    engine: Any = build(sch, "torch", optimizer=sgd, microbatches=2, loss_fn=lambda out, labels: out.mean())
    engine.train_batch(torch.ones(2, 4), labels=torch.ones(2))
    found: Any = sch.full_state("buffer")
    engine.close()
    return all(torch.equal(found[f"{number}.sizes"], each) for number, each in enumerate(expected))


@pytest.mark.multiproc
def test_a_buffer_whose_shape_a_stage_has_changed_is_sent_as_it_is() -> None:
    assert run_distributed(grown, 2) == [True, True]
