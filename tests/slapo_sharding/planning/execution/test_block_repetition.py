"""Plans of models with many equal blocks: those derived with few blocks are those derived with all."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from slapo_core import Schedule, ScheduleError, TraceError, create_schedule, get_logger, parameter_facts
from slapo_plan import fake_ranks
from slapo_sharding.planning.execution.repeated_blocks import repeated_blocks, without_repeated
from slapo_tracing.nodes import plain_attributes
from slapo_verify import Report, run_as_threads, verify
from tests.slapo_sharding.logged_warnings import warnings_told
from tests.slapo_sharding.split_families import FAST, family
from tests.slapo_torch.layouts import mesh_of

MESSAGE = "the plan is derived for all blocks"


class Split(NamedTuple):
    """Result of ``tensor_parallel``: its steps, tensors, attributes and warnings, or its error; and whether blocks repeated."""

    steps: Counter[str]
    tensors: dict[str, Any]
    attributes: dict[str, Any]
    told: list[str]
    error: str
    repeats: bool


@contextmanager
def debug_messages() -> Iterator[list[str]]:
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, handler = get_logger(), Handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield found
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def split(model: nn.Module, batch: dict[str, Any], sequence_parallel: bool = False) -> Split:
    with fake_ranks(tp=2) as mesh, warnings_told() as told, debug_messages() as said:
        sch = create_schedule(model, mesh=mesh, example_inputs=batch)
        error, repeats = "", bool(repeated_blocks(sch))
        try:
            sch.tensor_parallel(sequence_parallel=sequence_parallel)
        except (ScheduleError, TraceError) as err:
            error = str(err)
        repeats &= not any(MESSAGE in message for message in said)
        steps = Counter(str(child) for step in sch.journal.steps for child in step.children)
        return Split(steps, tensors_of(model), attributes_of(model), sorted(told), error, repeats)


def tensors_of(model: nn.Module) -> dict[str, Any]:
    found = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        spec = parameter_facts(tensor).spec
        parts = None if spec is None else (spec.dim, spec.full_shape, spec.num_shards, spec.sizes)
        hooks = [type(hook).__name__ for hook in (tensor._backward_hooks or {}).values()]
        found[name] = (tuple(tensor.shape), parts, hooks)
    return found


def attributes_of(model: nn.Module) -> dict[str, Any]:
    found = {}
    for path, module in model.named_modules():
        tables = (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks)
        hooks = [[type(hook).__qualname__ for hook in table.values()] for table in tables]
        config = getattr(module, "config", None)
        settings = {} if config is None else plain_attributes(vars(config))
        found[path] = (plain_attributes({**vars(module), "marker_of_block": None}), settings, hooks)
    return found


def marked(model: nn.Module) -> nn.Module:
    """Give each block an attribute of its own, so that no two are equal."""
    for holder in model.modules():
        for number, block in enumerate(holder if isinstance(holder, nn.ModuleList) else ()):
            block.marker_of_block = number
    return model


def check(name: str, sequence_parallel: bool, depth: int = 7) -> bool:
    """Compare the plan of a family with that of unequal blocks; return whether blocks were left out for it."""
    model, batch = family(name, depth)
    found = split(model, batch, sequence_parallel)
    expected = split(marked(family(name, depth)[0]), batch, sequence_parallel)
    assert not expected.repeats
    assert found[:5] == expected[:5]
    return found.repeats


def test_llama_along_the_sequence() -> None:
    assert check("llama", True)


def test_gpt_neox_and_its_attributes() -> None:
    assert check("gpt_neox", False)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", FAST)
def test_families(name: str, sequence_parallel: bool) -> None:
    check(name, sequence_parallel)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Counting(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.blocks[6].up.weight.shape[1]


BATCH = {"x": torch.ones(2, 4, 8)}


class Scaled(Block):
    """Block whose scale of the whole width meets sharded values, so that it runs from a graph."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)) * self.scale)


class Crossing(Block):
    """Block that reads a value which all blocks share, as the decoder of a translation does."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.key = nn.Linear(8, width)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)) * self.key(memory))


class Decoder(Net):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.memory = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.memory(x)
        for block in self.blocks:
            x = block(x, memory)
        return x


def crossing() -> nn.Module:
    return Decoder([Crossing(16) for _ in range(6)])


def scaled() -> nn.Module:
    return Net([Scaled(16) for _ in range(6)])


@pytest.mark.parametrize("make", [crossing, scaled])
def test_blocks_that_share_a_reduction_or_run_from_graphs_repeat(make: Callable[[], nn.Module]) -> None:
    found, expected = split(make(), BATCH), split(marked(make()), BATCH)
    assert found.repeats
    assert not expected.repeats
    assert found[:5] == expected[:5]


def test_one_reduction_serves_the_blocks_left_out() -> None:
    found = split(crossing(), BATCH)
    keys = [f"{index}.key" for index in range(6)]
    assert f"sch['blocks'].sync('bwd_post', 'all_reduce', of={keys})" in found.steps


@pytest.mark.parametrize("make", [crossing, scaled])
def test_blocks_left_out_compute_the_same(make: Callable[[], nn.Module]) -> None:
    def verified() -> Report:
        torch.manual_seed(0)
        reference = make()
        sch = create_schedule(copy.deepcopy(reference), mesh=mesh_of(tp=2), example_inputs=BATCH)
        sch.tensor_parallel()
        return verify(reference, sch, level="step")

    for report in run_as_threads(verified, 2):
        assert report.ok, report
        assert report.compared["gradients"]


def runs_of(model: nn.Module) -> list[tuple[tuple[str, ...], dict[str, str]]]:
    sch: Schedule = create_schedule(model, example_inputs=BATCH)
    return [(run.models, dict(run.left_out)) for run in repeated_blocks(sch)]


def test_blocks_behind_the_third_are_left_out() -> None:
    model = Net([Block(16) for _ in range(6)])
    assert runs_of(model) == [(("1",), {"3": "1", "4": "1", "5": "1"})]
    with without_repeated(repeated_blocks(create_schedule(model))):
        assert [*model.blocks._modules] == ["0", "1", "2"]
    assert [*model.blocks._modules] == ["0", "1", "2", "3", "4", "5"]


def test_groups_of_blocks_repeat_too() -> None:
    model = Net([Block(16 if index % 2 else 32) for index in range(10)])
    assert runs_of(model) == [(("2", "3"), {"6": "2", "7": "3", "8": "2", "9": "3"})]


def test_another_first_block() -> None:
    model = Net([Block(4), *(Block(16) for _ in range(6))])
    assert runs_of(model) == [(("2",), {"4": "2", "5": "2", "6": "2"})]


@pytest.mark.parametrize("number", [1, 4])
def test_few_blocks_all_stay(number: int) -> None:
    assert runs_of(Net([Block(16) for _ in range(number)])) == []


def test_blocks_that_share_weights_all_stay() -> None:
    model = Net([Block(16) for _ in range(8)])
    model.blocks[7].up.weight = model.blocks[6].up.weight
    assert runs_of(model) == []
    assert runs_of(Net([Block(16)] * 8)) == []


def test_a_model_that_asks_for_a_block_left_out_gets_its_plan_from_all() -> None:
    found, expected = (split(make([Block(16) for _ in range(8)]), BATCH) for make in (Counting, Net))
    assert not found.repeats
    assert expected.repeats
    assert found.steps == expected.steps
    assert not found.error


def test_undo_restores_all_blocks() -> None:
    model = Net([Block(16) for _ in range(8)])
    before = {name: (id(each), tuple(each.shape)) for name, each in model.named_parameters()}
    with fake_ranks(tp=2) as mesh:
        sch = create_schedule(model, mesh=mesh, example_inputs=BATCH)
        sch.tensor_parallel()
        assert model.blocks[7].up.weight.shape[0] == 8
        sch.undo()
    assert {name: (id(each), tuple(each.shape)) for name, each in model.named_parameters()} == before
