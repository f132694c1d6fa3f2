"""``sch.compile()``: equal numbers, one compilation for identical layers, hooks and names as they were."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import slapo_fusion.plugin
import slapo_memory.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import ScheduleError, create_schedule
from slapo_fusion._torch_private import mode_options
from slapo_memory.forward_wrappers import checkpoint
from slapo_testing import isolated_plugins
from slapo_verify.comparison import assert_equivalent

# of inputs that are not leaves: torch's compiler asks, and tells nobody but where warnings are errors
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(autouse=True)
def plugins() -> Iterator[None]:
    torch.compiler.reset()
    with isolated_plugins(slapo_tracing.plugin, slapo_training.plugin, slapo_fusion.plugin, slapo_memory.plugin):
        yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x


X = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))


class Counting:
    """A backend of ``torch.compile`` that counts what it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph


def test_every_layer_of_a_list_is_compiled_and_identical_ones_once() -> None:
    before, count = Model(), Counting()
    sch = create_schedule(copy.deepcopy(before))
    names = list(sch.mod.state_dict())
    sch["layers"].compile(backend=count, fullgraph=True)
    assert_equivalent(before, sch.mod, X)
    assert count.graphs == 1
    assert list(sch.mod.state_dict()) == names


@pytest.mark.slow
def test_the_default_compiler_gives_the_same_numbers_and_masks() -> None:
    before = Model(2)
    sch = create_schedule(copy.deepcopy(before))
    sch["layers"].compile(dynamic=False)
    assert_equivalent(before, sch.mod, X)
    assert_equivalent(before, copy.deepcopy(sch.mod), X)


@pytest.mark.parametrize("first", ["compile", "checkpoint"])
def test_with_checkpoints_in_either_order(first: str) -> None:
    before, count = Model(3), Counting()
    sch = create_schedule(copy.deepcopy(before))
    if first == "compile":
        sch["layers"].compile(backend=count)
    for layer in sch["layers"].child.values():
        layer.checkpoint()
    if first != "compile":
        sch["layers"].compile(backend=count)
    assert_equivalent(before, sch.mod, X)
    assert count.graphs


@pytest.mark.sampled(2)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("policy", [None, "matmuls"])
def test_checkpointed_layers_in_a_compiled_model_run_as_they_are_and_nobody_warns(policy: str | None, offload: bool) -> None:
    """This fails where torch has moved what ``exclude_from_compilation`` writes to."""
    before, count = Model(3), Counting()
    sch = create_schedule(copy.deepcopy(before))
    sch["layers"].checkpoint(policy=policy)
    if offload:
        sch["layers"].offload(min_bytes=0)
    sch.compile(backend=count)
    assert_equivalent(before, sch.mod, X)
    with torch.no_grad():
        assert_equivalent(before.eval(), sch.mod.eval(), X)


class Checkpointing(nn.Module):
    """Calls ``slapo.checkpoint`` by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, scale=0.5, use_reentrant=False).sin()


def test_a_model_that_calls_checkpoint_is_compiled_as_a_whole() -> None:
    before = Checkpointing()
    sch = create_schedule(copy.deepcopy(before))
    sch.compile(backend="aot_eager", fullgraph=True)
    assert_equivalent(before, sch.mod, X)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_forward_that_somebody_has_put_on_a_module(wrapped: bool) -> None:
    before, count = Model(2), Counting()
    for layer in before.layers:
        layer.forward = partial(type(layer).forward, layer)  # as some libraries do
    sch = create_schedule(copy.deepcopy(before))
    if wrapped:
        sch["layers"].checkpoint()
    sch["layers"].compile(backend=count)
    assert_equivalent(before, sch.mod, X)
    assert count.graphs


def test_a_trace_in_between_does_not_keep_it_from_being_compiled() -> None:
    """This fails where torch has moved what ``is_dry_run`` reads."""
    before, count = Model(2), Counting()
    sch = create_schedule(copy.deepcopy(before), example_inputs=(X,))
    sch["layers"].compile(backend=count)
    sch.trace()
    assert count.graphs == 0
    assert_equivalent(before, sch.mod, X)
    assert count.graphs == 1


def test_hooks_stay_outside_and_undo_takes_it_back() -> None:
    before, count = Model(2), Counting()
    sch = create_schedule(copy.deepcopy(before))
    sch["layers.0"].compile(backend=count)
    seen: list[bool] = []
    sch["layers.0"].mod.register_forward_hook(lambda module, args, output: seen.append(torch.compiler.is_compiling()))
    sch.mod(X)
    assert seen == [False]
    assert count.graphs == 1
    sch.undo()
    sch.mod(X)
    assert count.graphs == 1
    assert "forward" not in vars(sch["layers.0"].mod)


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("layers.0", {"mod": "x"}, "torch.compile has no option 'mod'"),
        ("layers.0", {"backend": "nothing"}, "torch.compile does not take these options"),
        ("layers.0", {"mode": "fast"}, "torch.compile does not take these options"),
        ("layers.0", {"backend": 3}, "backend is 3; give the name of one"),
        ("layers.0", {"backend": []}, r"backend is \[\]; give"),
        ("layers.0", {"fullgraph": 3}, "fullgraph is 3; give True or False"),
        ("layers.0", {"dynamic": "x"}, "dynamic is 'x'; give True or False"),
        ("layers.0", {"mode": 3}, "mode is 3; give a name, as 'max-autotune'"),
        ("layers.0", {"options": []}, r"options is \[\]; give a dict"),
        ("layers.0", {"options": {"x": 1}}, "does not take these options: Unexpected optimization option x$"),
        ("layers.1", {}, "'layers.1' is compiled already"),
        ("layers", {}, "'layers.1' is compiled already"),
    ],
)
def test_what_cannot_be_compiled_is_refused(path: str, options: dict[str, Any], message: str) -> None:
    sch = create_schedule(Model(2))
    sch["layers.1"].compile(backend="eager")
    with pytest.raises(ScheduleError, match=message):
        sch[path].compile(**options)
    assert "forward" not in vars(sch["layers.0"].mod)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("checkpoints", [False, True])
def test_traced_layers_are_compiled_each_by_its_graph_and_run_other_shapes(checkpoints: bool) -> None:
    before, count = Model(3), Counting()
    sch = create_schedule(copy.deepcopy(before), example_inputs=(X,))
    for layer in sch.select("layers.*"):
        layer.trace()
    if checkpoints:
        sch["layers"].checkpoint()
    sch["layers"].compile(backend=count, fullgraph=True)
    assert_equivalent(before, sch.mod, X)
    assert count.graphs in (3, 6), "each, and with checkpoints for the recompute"
    assert_equivalent(before, copy.deepcopy(sch.mod), X)
    assert_equivalent(before, sch.mod, X[:, :3])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"mode": "default"}, marks=pytest.mark.slow),
        pytest.param({"mode": "reduce-overhead"}, marks=pytest.mark.slow),
        {"options": {"epilogue_fusion": False}},
    ],
    ids=str,
)
def test_dropout_draws_the_same_whatever_the_mode(options: dict[str, Any]) -> None:
    before = Model(2)
    sch = create_schedule(copy.deepcopy(before))
    sch["layers"].compile(**options)
    assert_equivalent(before, sch.mod, X)
    torch.manual_seed(0)
    before(X)
    drawn = torch.rand(1)
    torch.manual_seed(0)
    sch.mod(X)
    assert torch.equal(torch.rand(1), drawn)


def test_modes_are_options_of_inductor() -> None:
    """The one private name of torch that this goes by."""
    assert mode_options("max-autotune")["max_autotune"] is True
    assert mode_options("default") == mode_options(None) == {}
