"""Units of parameters, and the rows of a rank."""

from __future__ import annotations

import copy
import logging
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from slapo_core import BuildError, ShardSpec, build, create_schedule, get_logger
from slapo_testing import run_distributed
from slapo_torch.fsdp.replica_spec import ReplicaSpec
from slapo_torch.fsdp.wrap_policy import assign_parameters, unit_paths

from ..layouts import gpt2


class Two(nn.Module):
    """Two lists of layers, one with lists inside; a list of different things; a weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.head = nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2))
        self.up[1].bias = self.up[0].bias


class Named(nn.Module):
    """A model as nanoGPT and x-transformers write theirs: parts by name, layers that are lists, a head that reads the table."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.ModuleList(nn.ModuleList([nn.LayerNorm(8), nn.Linear(8, 8)]) for _ in range(2))
        self.parts = nn.ModuleDict({"tokens": nn.Embedding(6, 8), "positions": nn.Embedding(4, 8), "layers": layers})

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.parts["tokens"](ids) + self.parts["positions"](torch.arange(ids.shape[1]))
        for norm, linear in self.parts["layers"]:
            x = x + F.gelu(linear(norm(x)))
        return F.cross_entropy((x @ self.parts["tokens"].weight.T).flatten(0, 1), targets.flatten())


class Penalised(Named):
    """Reads the numbers of all layers behind them, as AdaLoRA does, by operations that would do with rows alone."""

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        size = sum(parameter.square().sum().item() for parameter in self.parameters())
        return super().forward(ids, targets) + sum((p @ p.T).norm() for p in self.parameters() if p.dim() > 1) / size


def _train(rank: int, kind: type[nn.Module]) -> tuple[float, list[str]]:
    """Return how far from the unmodified model's a loss and the weights behind a step are, and the warnings."""
    torch.manual_seed(0)
    model, told = kind(), []
    plain, (ids, targets) = copy.deepcopy(model), torch.randint(6, (2, 4, 4))
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    get_logger().addHandler(handler)
    schedule = create_schedule(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    sgd = partial(torch.optim.SGD, lr=0.1)
    engine = build(schedule, "torch", optimizer=sgd, data_parallel="fsdp", microbatches=2, check=False)
    loss = engine.train_batch(*(each.chunk(2)[rank] for each in (ids, targets)))
    expected, optimizer = plain(ids, targets), sgd(plain.parameters())
    expected.backward()
    optimizer.step()
    state = schedule.full_state()
    far = [float((state[name] - parameter).abs().max()) for name, parameter in plain.named_parameters()]
    return max(abs(float(loss - expected)), *far), told


def test_lists_that_never_run_are_no_units() -> None:
    layers = [f"parts.layers.{layer}.{part}" for layer in range(2) for part in range(2)]
    assert unit_paths(Named(), None) == layers
    tables = nn.ModuleDict({"a": nn.Embedding(2, 2), "b": nn.Embedding(2, 2)})
    assert unit_paths(tables, None) == ["a", "b"]
    for difference, warnings in run_distributed(_train, 2, Named):
        assert difference < 1e-6
        assert not warnings


def test_parameters_that_are_read_outside_of_their_units_are_whole() -> None:
    for difference, warnings in run_distributed(_train, 2, Penalised):
        assert difference < 1e-6
        assert "a parameter of a unit is read where that unit does not run" in warnings[0]


def test_units_are_the_layers_of_the_outermost_lists() -> None:
    assert unit_paths(Two(), None) == ["down.0", "down.1", "up.0", "up.1"]
    assert unit_paths(gpt2(), None) == [f"transformer.h.{index}" for index in range(4)]
    assert unit_paths(nn.Linear(2, 2), None) == []


def test_units_may_be_given() -> None:
    assert unit_paths(Two(), ["up.*", "head"]) == ["up.0", "up.1", "head"]
    with pytest.raises(BuildError, match="no module for fsdp_units 'upp'"):
        unit_paths(Two(), ["upp"])
    with pytest.raises(BuildError, match=r"'down.0.1' is inside of the unit 'down.0'"):
        unit_paths(Two(), ["down.0", "**.1"])


def test_what_several_units_use_belongs_to_none() -> None:
    model = Two()
    held = {id(parameter) for parameter in model.parameters()} - {id(model.head[0].weight)}
    dealt = assign_parameters(model, unit_paths(model, None), held)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {path: [names[id(parameter)] for parameter in parameters] for path, parameters in dealt.items()}
    assert found["up.0"] == ["up.0.weight"]
    assert found["up.1"] == ["up.1.weight"]
    assert found["down.1"] == ["down.1.0.weight", "down.1.0.bias", "down.1.1.weight", "down.1.1.bias"]
    assert found[""] == ["up.0.bias", "head.0.bias", "head.1.weight", "head.1.bias"]


def _specs(inner: ShardSpec | None, full: torch.Size, replicas: int) -> list[ReplicaSpec]:
    """The specs of all ranks; what ``ReplicaSpec.of`` makes on each."""
    parts = inner.num_shards if inner is not None else 1
    ranks = replicas * parts
    inners = [None if inner is None else ShardSpec(**{**vars(inner), "rank": rank % parts}) for rank in range(ranks)]
    return [ReplicaSpec(0, tuple(full), rank, ranks, (full[0],), None, "dp", None, inners[rank]) for rank in range(ranks)]


@st.composite
def cuts(draw: st.DrawFn) -> tuple[ShardSpec | None, torch.Size]:
    """A tensor of two dimensions, whole, or in equal parts, in parts of blocks, or dealt out unevenly with copies."""
    rows, columns, parts = draw(st.integers(1, 9)), draw(st.integers(1, 3)), draw(st.integers(2, 3))
    kind = draw(st.sampled_from(["whole", "rows", "columns", "blocks", "dealt"]))
    shape = [rows, columns]
    if kind == "whole":
        return None, torch.Size(shape)
    dim = 1 if kind == "columns" else 0
    shape[dim] *= parts
    blocks = (shape[dim],)
    dealt = None
    if kind == "blocks":
        blocks = (shape[0], parts)
        shape[0] += parts
    if kind == "dealt":
        ends = [draw(st.integers(1, shape[0])) for _ in range(parts)]
        dealt = tuple(((0, end),) for end in [*ends[:-1], shape[0]])
    return ShardSpec(dim, tuple(shape), 0, parts, blocks, None, "tp", dealt), torch.Size(shape)


@given(cut=cuts(), replicas=st.integers(1, 4))
def test_rows_come_together_again_and_each_counts_once(cut: tuple[ShardSpec | None, torch.Size], replicas: int) -> None:
    inner, shape = cut
    full = torch.arange(1.0, shape.numel() + 1).view(shape)
    specs = _specs(inner, shape, replicas)
    shards = [spec.local(full) for spec in specs]
    assert [len(shard) for shard in shards] == list(specs[0].sizes)
    longest = max(specs[0].sizes)
    padded = [torch.cat([shard, shard.new_full((longest - len(shard), *shard.shape[1:]), -1)]) for shard in shards]
    for spec in specs:
        assert torch.equal(spec.assemble(padded), full)
    assert sum(float(spec.without_copies(shard).sum()) for spec, shard in zip(specs, shards, strict=True)) == float(full.sum())


@given(rows=st.integers(0, 9), replicas=st.integers(1, 5))
def test_rows_are_dealt_out_as_chunk_does(rows: int, replicas: int) -> None:
    specs = _specs(None, torch.Size([rows]), replicas)
    expected = [len(chunk) for chunk in torch.arange(rows).chunk(replicas)] if rows else []
    assert [stop - start for start, stop in map(ReplicaSpec.rows, specs)] == expected + [0] * (replicas - len(expected))
    assert [spec.ranges() for spec in specs] == [[spec.rows()] for spec in specs]
