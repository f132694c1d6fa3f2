"""A traced module as a module: names, copies, pickles, edits, devices."""

from __future__ import annotations

import copy
import io
import pickle
import traceback
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from slapo_tracing import trace_module
from slapo_tracing.graphs import TracedModule
from tests.slapo_tracing.comparison import assert_same
from tests.slapo_tracing.tracers.test_value_tracer import Cube, Forward
from tests.zoo.families import FAMILIES

X = torch.randn(2, 4)


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)])
        self.self = nn.Linear(4, 4)
        self._1_relu = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)
        self.register_buffer("hidden", torch.ones(4), persistent=False)
        self.note = {"kept": True}

    def forward(self, x: torch.Tensor, input: Any = None) -> torch.Tensor:
        x = self._1_relu(F.relu(self.self(x)))
        for layer in self.layers:
            x = layer(x) + self.hidden
        with torch.no_grad():
            y = x.sin()[..., None, 1:]
        return Cube.apply(x, 2) + torch.tensor(2.0) + y.sum()


def traced() -> tuple[Module, TracedModule]:
    model = Module()
    return model, trace_module(model, (X,), leaf=lambda path, module: isinstance(module, nn.Linear))


def test_names_and_attributes_are_the_originals() -> None:
    model, gm = traced()
    assert list(gm.state_dict()) == list(model.state_dict())
    assert [name for name, _ in gm.named_buffers()] == [name for name, _ in model.named_buffers()]
    assert gm.unused is model.unused
    assert gm.layers[0] is model.layers[0]
    assert gm.note is model.note
    assert_same(model, gm, {"x": X})


def test_edits_do_not_reach_the_original() -> None:
    model, gm = traced()
    gm.layers._modules["0"] = nn.Identity()
    assert isinstance(model.layers[0], nn.Linear)


def test_node_meta() -> None:
    _, gm = traced()
    relu = next(node for node in gm.graph.nodes if node.target is F.relu)
    val = relu.meta["val"]
    assert (tuple(val.shape), val.dtype, val.requires_grad, val.grad_fn) == ((2, 4), torch.float32, True, None)
    assert relu.meta["source"].startswith(__file__)


def test_an_edit_is_compiled_at_the_next_call() -> None:
    gm = trace_module(Forward(lambda self, x: x.sin()), (X,))
    torch.testing.assert_close(gm(X), X.sin())
    (node,) = gm.graph.find_nodes(op="call_method", target="sin")
    node.target = "cos"
    gm.recompile()
    torch.testing.assert_close(gm(X), X.cos())
    assert "cos()" in gm.code


def _roundtrip(module: TracedModule) -> TracedModule:
    return pickle.loads(pickle.dumps(module))  # noqa: S301


def _saved(module: TracedModule) -> TracedModule:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: TracedModule = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("make", [copy.deepcopy, _roundtrip, _saved])
def test_copies(make: Any) -> None:
    _, gm = traced()
    copied = make(gm)
    assert str(copied.graph) == str(gm.graph)
    torch.testing.assert_close(copied(X), gm(X))
    assert not {id(p) for p in copied.parameters()} & {id(p) for p in gm.parameters()}
    assert [n.meta["val"].shape for n in copied.graph.nodes if "val" in n.meta] == [
        n.meta["val"].shape for n in gm.graph.nodes if "val" in n.meta
    ]
    copied.graph.erase_node(copied.graph.output_node())
    assert gm.graph.output_node() is not None


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_copies_of_transformers(name: str) -> None:
    model, batch = FAMILIES[name].model(), FAMILIES[name].batch()
    gm = trace_module(model, batch)
    for copied in (copy.deepcopy(gm), _roundtrip(gm)):
        torch.testing.assert_close(copied(**batch).loss, gm(**batch).loss)


def test_errors_show_the_line_of_the_graph() -> None:
    gm = trace_module(Forward(lambda self, x: x.sin()), (X,))
    gm.graph.find_nodes(op="call_method", target="sin")[0].target = "nonsense"
    gm.recompile()
    with pytest.raises(AttributeError) as info:
        gm(X)
    assert "sin = x.nonsense()" in "".join(traceback.format_exception(info.value))


def test_values_are_freed_after_their_last_use() -> None:
    gm = trace_module(Forward(lambda self, x: x.sin().cos().tan()), (X,))
    gm(X)
    assert "sin = None" in gm.code
    assert "cos = None" in gm.code


def test_a_graph_without_guard() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y", default_value=2)
    graph.output(graph.call_method("mul", (x, y)))
    gm = TracedModule(nn.Module(), graph)
    torch.testing.assert_close(gm(X), X * 2)
    torch.testing.assert_close(gm(x=X, y=3), X * 3)


def test_inputs_on_another_device_move_the_graphs_constants() -> None:
    model = Forward(lambda self, x: self.fc(x) + torch.arange(4, device=x.device) + torch.ones(4, device=self.table.device))
    gm = trace_module(model, (X,)).to("meta")
    assert gm(X.to("meta")).device.type == "meta"
    gm.fc.to_empty(device="cpu"), gm.register_buffer("table", torch.ones(4))
    assert gm(X).device.type == "cpu"


def test_fx_with_any_number_of_arguments() -> None:
    class Several(nn.Module):
        def forward(self, *several: torch.Tensor) -> torch.Tensor:
            return several[0] + several[1]

    traced = trace_module(Several(), (torch.ones(2), torch.ones(2)), tracer="fx")
    torch.testing.assert_close(traced(torch.ones(2), torch.ones(2)), torch.full((2,), 2.0))


class Keeps(nn.Module):
    """Has more in its state dict than its tensors."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.seen, self.loaded = nn.Linear(4, 4), 1, None
        self.register_state_dict_post_hook(Keeps.mark)

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}own"] = torch.ones(1) * self.seen

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.loaded = state_dict.pop(f"{prefix}own") + state_dict.pop(f"{prefix}mark"), metadata["version"]
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)

    def mark(self, state_dict: Any, prefix: str, *_: Any) -> None:
        state_dict[f"{prefix}mark"] = torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


@pytest.mark.parametrize("make", [lambda module: module, copy.deepcopy, _roundtrip, lambda module: trace_module(module, (X,))])
def test_the_state_dict_is_that_of_the_class(make: Any) -> None:
    model, outer = Keeps(), nn.Sequential(Keeps())
    gm = make(trace_module(model, (X,)))
    outer[0] = gm
    assert list(gm.state_dict()) == list(model.state_dict())
    gm.seen = 5
    saved = outer.state_dict()
    assert saved["0._extra_state"] == {"seen": 5}
    assert saved["0.own"] == 5
    gm.seen = 0
    outer.load_state_dict(saved)
    assert (gm.seen, gm.loaded) == (5, (5, 3))
    assert (model.seen, model.loaded) == (1, None)
