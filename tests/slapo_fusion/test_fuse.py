"""``sch.fuse(match)``: the numbers stay, the names stay, and what cannot be one call is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import profile

import slapo_fusion.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Schedule, ScheduleError, create_schedule, hookimpl, load_schedule
from slapo_testing import isolated_plugins
from slapo_tracing.matching.patterns import call_module
from slapo_verify.comparison import assert_equivalent

# of inputs that are not leaves: torch's compiler asks, and tells nobody but where warnings are errors
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(autouse=True)
def only_fusion() -> Iterator[None]:
    with isolated_plugins(slapo_tracing.plugin, slapo_training.plugin, slapo_fusion.plugin):
        yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.up, self.down = (nn.Linear(8, 8) for _ in range(4))
        self.bias, self.act, self.drop = nn.Parameter(torch.randn(8)), nn.ReLU(), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = torch.sigmoid(self.q(x)) * self.k(x)
        return x + self.drop(self.act(self.down(F.gelu(self.up(mixed) + self.bias))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


X = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))


def traced() -> tuple[Model, Schedule]:
    before = Model()
    sch = create_schedule(copy.deepcopy(before), example_inputs=(X,))
    return before, sch.trace(flatten=True, leaf_modules=["Linear", "Dropout", "ReLU"])


def bias_gelu(x: Any, bias: Any) -> Any:
    return F.gelu(x + bias)


def side_by_side(x: Any) -> Any:
    return call_module(r"layers\.\d\.q", x), call_module(r"layers\.\d\.k", x)


def vertical(x: Any) -> Any:
    return call_module(r"layers\.\d\.act", call_module(r"layers\.\d\.down", x))


def tail(x: Any) -> Any:
    return call_module(r"layers\.\d\.drop", call_module(r"layers\.\d\.act", x))


@pytest.mark.parametrize("compiler", ["inductor", "torchscript", "TorchScript", None])
def test_operations_are_one_call_in_every_layer(compiler: str | None) -> None:
    before, sch = traced()
    names = list(sch.mod.state_dict())
    matches = sch.find(bias_gelu)
    assert len(matches) == 2
    sch.fuse(matches, compiler=compiler, name="bias_gelu")
    assert len(sch.find(r"(.*\.)?bias_gelu.*")) == 2
    assert sch.find(bias_gelu) == []
    assert list(sch.mod.state_dict()) == names
    assert_equivalent(before, sch.mod, X)


@pytest.mark.parametrize(
    ("pattern", "compiler"),
    [
        (side_by_side, None),
        (side_by_side, "one_matmul"),
        (vertical, None),
        pytest.param(side_by_side, "inductor", marks=pytest.mark.slow),
        pytest.param(vertical, "inductor", marks=pytest.mark.slow),
    ],
)
def test_correctness_17_layers_with_weights_keep_their_places_and_are_used_as_they_are(
    pattern: Any, compiler: str | None
) -> None:
    before, sch = traced()
    names = [name for name, _ in sch.mod.named_parameters()]
    sch.fuse(sch.find(pattern), compiler=compiler)
    assert [name for name, _ in sch.mod.named_parameters()] == names
    assert len(sch.find(r"(.*\.)?fused.*")) == 2
    assert_equivalent(before, sch.mod, X)
    for model in (before, sch.mod):  # a layer replaced later is the one that runs
        model.get_submodule("layers.1").register_module("down", nn.Linear(8, 8, bias=False))
        nn.init.constant_(model.get_parameter("layers.1.down.weight"), 0.5)
    assert_equivalent(before, sch.mod, X)


class Crossed(nn.Module):
    """Two branches, each of its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.a(x)) * self.b(y)


@pytest.mark.parametrize("compiler", [pytest.param("inductor", marks=pytest.mark.slow), None])
def test_correctness_17_each_branch_gets_its_own_input(compiler: str | None) -> None:
    before, y = Crossed(), torch.randn(2, 4, 8)
    sch = create_schedule(copy.deepcopy(before), example_inputs=(X, y)).trace()
    sch.fuse(sch.find(lambda x, y: (call_module("a", x), call_module("b", y))), compiler=compiler)
    assert_equivalent(before, sch.mod, X, y)
    sch = create_schedule(copy.deepcopy(before), example_inputs=(X, y)).trace()
    with pytest.raises(ScheduleError, match="'one_matmul' takes Linear layers of one input"):
        sch.fuse(sch.find(lambda x, y: (call_module("a", x), call_module("b", y))), compiler="one_matmul")


def test_projections_of_one_input_are_one_product_until_one_of_them_is_hooked() -> None:
    before, sch = traced()
    sch.fuse(sch.find(side_by_side), compiler="one_matmul")

    def products() -> int:
        with profile() as found:
            sch.mod(X)
        return sum(event.count for event in found.key_averages() if event.key == "aten::addmm")

    assert products() == 2 * 3, "of four layers in each block"
    assert_equivalent(before, sch.mod, X)
    seen: list[torch.Size] = []
    sch.mod.get_submodule("layers.0.k").register_forward_hook(lambda module, args, output: seen.append(output.shape))
    assert products() == 2 * 3 + 1
    assert seen == [X.shape]
    assert_equivalent(before, sch.mod, X)


@pytest.mark.parametrize("compiler", ["inductor", None])
@pytest.mark.parametrize("path", ["layers.0.down", "layers.0.act"])
def test_hooks_put_on_a_fused_layer_after_its_first_call_fire(path: str, compiler: str | None) -> None:
    before, sch = traced()
    sch.fuse(sch.find(vertical), compiler=compiler)
    sch.mod(X)
    seen: list[torch.Size] = []
    layer = before.get_submodule(path)
    hooked = next(each for each in sch.mod.modules() if type(each) is type(layer) and _is_same(each, layer))
    handle = hooked.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    assert_equivalent(before, sch.mod, X)
    assert seen
    assert set(seen) == {X.shape}
    handle.remove()
    seen.clear()
    assert_equivalent(before, sch.mod, X)
    assert not seen


def _is_same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("compiler", [pytest.param("inductor", marks=pytest.mark.slow), "torchscript", None])
def test_dropout_in_it_draws_the_same_mask(compiler: str | None) -> None:
    before, sch = traced()
    sch.fuse(sch.find(tail), compiler=compiler)
    assert_equivalent(before, sch.mod, X)
    assert not torch.equal(sch.mod(X), sch.mod(X))


def test_a_chain_of_modules_that_nobody_compiles_is_a_sequential() -> None:
    before, sch = traced()
    sch.fuse(sch.find(tail), compiler=None, name="tail")
    made = [module for name, module in sch.mod.named_modules() if name.endswith(("tail", "tail_1"))]
    assert [[type(child) for child in of.children()] for of in made] == [[nn.ReLU, nn.Dropout]] * 2
    assert all(isinstance(of, nn.Sequential) for of in made)
    assert_equivalent(before, sch.mod, X)


def test_equal_matches_are_compiled_once() -> None:
    compiled = []

    def counting(region: Any) -> Any:
        compiled.append(region)
        return region

    third = SimpleNamespace(slapo_compilers=hookimpl(lambda: {"counting": counting}))
    with isolated_plugins(slapo_tracing.plugin, slapo_training.plugin, slapo_fusion.plugin, third):
        before, sch = traced()
        sch.fuse(sch.find(bias_gelu), compiler="counting")
        assert len(compiled) == 1
        copied = copy.deepcopy(sch.mod)
        assert_equivalent(before, copied, X)
        assert len(compiled) == 2
        sch.fuse(sch.find(tail), compiler="counting")  # of dropouts each has its own
        assert len(compiled) == 4


def test_undo_gives_the_graph_and_the_modules_back() -> None:
    before, sch = traced()
    code, modules = str(sch.mod.graph), [name for name, _ in sch.mod.named_modules()]
    sch.fuse(sch.find(side_by_side))
    sch.fuse(sch.find(tail))
    sch.undo()
    sch.undo()
    assert str(sch.mod.graph) == code
    assert sorted(name for name, _ in sch.mod.named_modules()) == sorted(modules)
    assert_equivalent(before, sch.mod, X)


@pytest.mark.parametrize("ending", ["json", "py"])
def test_a_saved_schedule_does_the_same_to_another_model(ending: str, tmp_path: Path) -> None:
    before, sch = traced()
    sch.fuse(sch.find(bias_gelu), compiler=None, name="bias_gelu")
    sch.fuse(sch.find(side_by_side), compiler=None)
    sch.save(tmp_path / f"fused.{ending}")
    again = load_schedule(copy.deepcopy(before), tmp_path / f"fused.{ending}", example_inputs=(X,))
    assert str(again.mod.graph) == str(sch.mod.graph)
    assert_equivalent(before, again.mod, X)


def hooked(sch: Schedule) -> None:
    sch.mod.get_submodule("layers.1.down").register_forward_hook(lambda module, args, output: None)


@pytest.mark.parametrize(
    ("pattern", "options", "before", "message"),
    [
        (bias_gelu, {"compiler": "inducter"}, None, r"no compiler 'inducter'; did you mean 'inductor'\?; available: "),
        (bias_gelu, {"name": "a.b"}, None, "name is 'a.b'; give a name a submodule can have"),
        (vertical, {"compiler": "torchscript"}, None, "TorchScript takes no layers with weights, as 'layers.0.down'"),
        (vertical, {"compiler": "one_matmul"}, None, "'one_matmul' takes Linear layers of one input, side by side"),
        (bias_gelu, {"compiler": "one_matmul"}, None, "'one_matmul' takes Linear layers of one input, side by side"),
        (vertical, {}, hooked, "'layers.1.down' in the subgraph is sharded, hooked or wrapped"),
        (lambda x: F.relu(x), {}, None, "the subgraph is empty"),
        (lambda x: torch.sigmoid(call_module(r"layers\.\d\.q", x)), {"twice": True}, None, "is in two of the subgraphs"),
    ],
)
def test_what_cannot_be_fused_is_refused_and_nothing_changes(
    pattern: Any, options: dict[str, Any], before: Any, message: str
) -> None:
    _, sch = traced()
    if before is not None:
        before(sch)
    code = str(sch.mod.graph)
    found = sch.find(pattern) * (2 if options.pop("twice", False) else 1)
    with pytest.raises(ScheduleError, match=message):
        sch.fuse(found, **options)
    assert str(sch.mod.graph) == code


@pytest.mark.parametrize("subgraph", [3, ["x"], [3], ("", 3), [("a", "b")], None, True], ids=str)
def test_what_is_no_match_is_refused(subgraph: object) -> None:
    _, sch = traced()
    with pytest.raises(ScheduleError, match=r"fuse\(''\): .* is not a subgraph; give what sch.find\(\) returned"):
        sch.fuse(subgraph)


def test_an_empty_list_of_matches_is_refused() -> None:
    _, sch = traced()
    with pytest.raises(ScheduleError, match=r"fuse\(''\): the subgraph is empty"):
        sch.fuse([])


def test_correctness_18_a_value_that_is_used_outside_is_refused() -> None:
    _, sch = traced()
    x = sch.find(lambda x, y: torch.sigmoid(x) * y)[0]
    inner = [(path, node.args[0]) for path, node in x if node.name.startswith("sigmoid")]
    sch.mod.graph.output_node().args = ((sch.mod.graph.output_node().args[0], inner[0][1]),)
    with pytest.raises(ScheduleError, match="is also used outside"):
        sch.fuse([*x, *inner][:2] if len(x) < 2 else sch.find(lambda x, y: torch.sigmoid(call_module(r"layers\.\d\.q", x)) * y))
