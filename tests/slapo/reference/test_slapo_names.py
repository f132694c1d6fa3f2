"""Every name of the reference's page ``slapo``; the other pages, and the tuner's names, are beside this."""

from __future__ import annotations

import copy
import logging
import types
from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import slapo
from slapo_testing import isolated_plugins
from tests.slapo.reference_pages import MLP, Page, Stack, X, each_name, same, scheduled

SLAPO = Page(slapo)


def of_ones(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.ones_(parameter)


# ---- classes


@SLAPO.row("FunctionType")
def _() -> None:
    assert slapo.FunctionType is types.FunctionType
    assert isinstance(of_ones, slapo.FunctionType)


@SLAPO.row("ModulePattern", "name")
def _() -> None:
    class Wanted(slapo.Pattern):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.act = slapo.ModulePattern("fc1"), slapo.ModulePattern(r"act|gelu")

        def forward(self, x: Any) -> Any:
            return self.act(self.layer(x))

    sch = scheduled(MLP())
    sch.trace()
    assert [[node.target for _, node in match] for match in sch.find(Wanted())] == [["fc1", "act"]]


@SLAPO.row("ModulePattern.forward", "self, *args")
def _() -> None:
    sch = scheduled(MLP())
    sch.trace()
    pattern = slapo.ModulePattern("fc2")
    assert [node.target for match in sch.find(lambda x: pattern.forward(x) + 1) for _, node in match][0] == "fc2"


@SLAPO.row("Pattern", "*args, **kwargs")
def _() -> None:
    class Wanted(slapo.Pattern):
        def forward(self, x: Any) -> Any:
            return F.gelu(x + 1)

    sch = scheduled(MLP())
    sch.trace()
    ((first, second),) = sch.find(Wanted())
    assert second[1].target is F.gelu
    assert first[1] in second[1].all_input_nodes


@SLAPO.row("Pattern.forward", "self, *args")
def _() -> None:
    with pytest.raises(NotImplementedError, match="defines in forward"):
        slapo.Pattern().forward(X)


@SLAPO.row("OrderedDict", "*args, **kwargs")
def _() -> None:
    assert slapo.OrderedDict is OrderedDict
    assert list(slapo.OrderedDict(b=1, a=2)) == ["b", "a"]


@SLAPO.row("OrderedDict.clear", "self")
def _() -> None:
    found = slapo.OrderedDict(a=1)
    assert found.clear() is None
    assert not found


@SLAPO.row("OrderedDict.popitem", "self, last=True")
def _() -> None:
    found = slapo.OrderedDict(a=1, b=2, c=3)
    assert [found.popitem(), found.popitem(last=False)] == [("c", 3), ("a", 1)]


@SLAPO.row("OrderedDict.move_to_end", "self, key, last=True")
def _() -> None:
    found = slapo.OrderedDict(a=1, b=2, c=3)
    found.move_to_end("a")
    found.move_to_end("c", last=False)
    assert list(found) == ["c", "b", "a"]
    with pytest.raises(KeyError):
        found.move_to_end("d")


@SLAPO.row("OrderedDict.update", "self, *args, **kwargs")
def _() -> None:
    found = slapo.OrderedDict(a=1)
    found.update({"b": 2}, c=3)
    found.update([("d", 4)])
    assert list(found.values()) == [1, 2, 3, 4]


@SLAPO.row("OrderedDict.keys", "self")
def _() -> None:
    assert slapo.OrderedDict(a=1).keys() & {"a", "b"} == {"a"}


@SLAPO.row("OrderedDict.items", "self")
def _() -> None:
    assert slapo.OrderedDict(a=1).items() & {("a", 1)} == {("a", 1)}


@SLAPO.row("OrderedDict.values", "self")
def _() -> None:
    assert list(slapo.OrderedDict(a=1).values()) == [1]


@SLAPO.row("OrderedDict.pop", "self, key, default=...")
def _() -> None:
    found = slapo.OrderedDict(a=1)
    assert (found.pop("a"), found.pop("a", 5)) == (1, 5)
    with pytest.raises(KeyError):
        found.pop("a")


@SLAPO.row("OrderedDict.setdefault", "self, key, default=None")
def _() -> None:
    found = slapo.OrderedDict(a=1)
    assert (found.setdefault("a", 2), found.setdefault("b"), found["b"]) == (1, None, None)


@SLAPO.row("OrderedDict.copy", "self")
def _() -> None:
    found = slapo.OrderedDict(a=[])
    assert found.copy()["a"] is found["a"]
    assert found.copy() is not found


@SLAPO.row("OrderedDict.fromkeys", "iterable, value=None")
def _() -> None:
    assert slapo.OrderedDict.fromkeys("ab", 1) == {"a": 1, "b": 1}


@SLAPO.row("ScheduleMetadata", "tie_weights=..., param_tags=..., primitives=...")
def _() -> None:
    metadata = slapo.ScheduleMetadata()
    assert (metadata.tie_weights, metadata.param_tags, metadata.primitives) == ({}, set(), {})
    model = Stack()
    sch = scheduled(model)
    assert list(sch.metadata.tie_weights) == [model.layers[0].fc1.weight]
    model.layers[0].fc2.weight.expert = 3
    handle = sch["layers.0.fc2"]
    handle.metadata.param_tags.add("expert")
    handle.replace(nn.Linear(8, 4))
    assert model.layers[0].fc2.weight.expert == 3  # what takes a parameter's place takes its tags
    assert handle.metadata.param_tags == set()  # metadata of a replaced module is not transferred
    sch["layers.1"].checkpoint()
    assert "checkpoint" in sch["layers.1"].metadata.primitives


@SLAPO.row("partial", "func, *args, **keywords")
def _() -> None:
    assert slapo.partial is partial
    assert slapo.partial(int, base=2)("101") == 5


@SLAPO.row("partial.args")
def _() -> None:
    assert slapo.partial(int, "3").args == ("3",)


@SLAPO.row("partial.func")
def _() -> None:
    assert slapo.partial(int, "3").func is int


@SLAPO.row("partial.keywords")
def _() -> None:
    assert slapo.partial(int, base=2).keywords == {"base": 2}


@SLAPO.row("Verify", "sch, example_inputs, device='cuda', eval_mode=True, enable=True")
def _() -> None:
    for model in (MLP(), MLP().to("meta")):
        sch = slapo.create_schedule(model)
        with slapo.Verify(sch, [X]):
            sch["act"].replace(nn.ReLU())
        with pytest.raises(slapo.VerifyError, match="step to blame"), slapo.Verify(sch, example_inputs=[X], eval_mode=False):
            sch["act"].replace(nn.Tanh())
        with slapo.Verify(sch, [X], device="cuda", eval_mode=True, enable=False):
            sch["act"].replace(nn.Sigmoid())


# ---- functions


@SLAPO.row("init_empty_weights", "enable=True, include_buffers=False")
def _() -> None:
    with slapo.init_empty_weights():
        norm = nn.BatchNorm1d(2)
    assert norm.weight.is_meta
    assert not norm.running_mean.is_meta
    with slapo.init_empty_weights(include_buffers=True):
        assert nn.BatchNorm1d(2).running_mean.is_meta
    with slapo.init_empty_weights(False):
        assert not nn.BatchNorm1d(2).weight.is_meta


@SLAPO.row("get_logger", "name='Slapo', level=20")
def _() -> None:
    logger = slapo.get_logger("Slapo.test", 30)
    assert (logger.name, logger.level) == ("Slapo.test", 30)
    assert slapo.get_logger().isEnabledFor(logging.INFO)


@SLAPO.row("register_primitive", "")
def _() -> None:
    with isolated_plugins():

        @slapo.register_primitive()
        class Freeze(slapo.Primitive):
            @staticmethod
            def name() -> str:
                return "freeze"

            @staticmethod
            def apply(sch: slapo.Schedule) -> None:
                sch.mod.requires_grad_(False)

        sch = slapo.create_schedule(MLP())
        sch["fc1"].freeze()
        assert not sch["fc1"].mod.weight.requires_grad
        assert "freeze" in slapo.list_primitives()


@SLAPO.row("set_random_seed", "seed=2013, dp_rank=None, pp_rank=None, tp_rank=None, always_enable_tp_seed=False")
def _() -> None:
    before = torch.get_rng_state()
    try:
        assert slapo.set_random_seed() == 2013
        seeds = {slapo.set_random_seed(1, dp_rank, pp_rank) for dp_rank in (0, 1) for pp_rank in (0, 1)}
        assert len(seeds) == 4
        assert slapo.set_random_seed(1, 0, 0, tp_rank=0) == slapo.set_random_seed(1, 0, 0, tp_rank=1)
        assert slapo.set_random_seed(1, 0, 0, 0, True) != slapo.set_random_seed(1, 0, 0, 1, always_enable_tp_seed=True)
    finally:
        torch.set_rng_state(before)


@SLAPO.row("analyze_tie_weights", "top_mod, is_pipeline_partitioned")
def _() -> None:
    model = Stack()
    tied = slapo.analyze_tie_weights(model, False)
    assert tied == {model.layers[0].fc1.weight: {("layers.0.fc1.weight", 0), ("layers.1.fc1.weight", 0)}}
    assert slapo.analyze_tie_weights(MLP(), is_pipeline_partitioned=False) == {}


@SLAPO.row("consolidate_model", "sch, target, param_init_fn=None, **kwargs")
def _() -> None:
    for target, options in ((None, {}), ("torch", {"microbatches": 2})):
        with slapo.init_empty_weights():
            sch = scheduled(Stack())
        slapo.consolidate_model(sch, target, of_ones, **options)
        assert all(bool((parameter == 1).all()) for parameter in sch.mod.parameters())
        assert sch.mod.layers[1].fc1.weight is sch.mod.layers[0].fc1.weight


@SLAPO.row("create_schedule", "root, name='', path='', parent=None, group=None, **kwargs")
def _() -> None:
    model = Stack()
    sch = slapo.create_schedule(model, "top")
    assert (sch.name, sch.mod, sch.parent, sch.world_size) == ("top", model, None, 1)
    inner = slapo.create_schedule(model.layers, "layers", "layers", sch)
    assert inner == sch["layers"]
    assert [name for name, _ in sch["layers.0"].child.items()] == ["fc1", "act", "fc2"]


@SLAPO.row(
    "dataclass",
    "cls=None, /, *, init=True, repr=True, eq=True, order=False, unsafe_hash=False, frozen=False",
)
def _() -> None:
    @slapo.dataclass(order=True)
    class Point:
        x: int
        y: int = 0

    assert Point(1) == Point(1, 0) < Point(1, 1)


@SLAPO.row("field", "*, default=..., default_factory=..., init=True, repr=True, hash=None, compare=True, metadata=None")
def _() -> None:
    @slapo.dataclass
    class Bag:
        items: list[int] = slapo.field(default_factory=list)

    assert Bag().items is not Bag().items
    with pytest.raises(ValueError, match="cannot specify both default and default_factory"):
        slapo.field(default=1, default_factory=list)


@SLAPO.row("get_cuda_rng_tracker", "")
def _() -> None:
    before = torch.get_rng_state()
    try:
        slapo.set_random_seed(5, tp_rank=1)
        outside = torch.get_rng_state()
        with slapo.get_cuda_rng_tracker().fork():
            torch.rand(2)
        assert torch.equal(torch.get_rng_state(), outside)
    finally:
        torch.set_rng_state(before)


@SLAPO.row("get_dialect_cls", "cls_type, target, allow_none=False")
def _() -> None:
    for kind in ("pipeline_stage", "pipeline_engine", "runtime_engine", "log_parser"):
        assert isinstance(slapo.get_dialect_cls(kind, "torch"), type)
    plain = slapo.get_dialect_cls("runtime_engine", "nobody", allow_none=True)
    assert plain is type(slapo.build(scheduled()))
    with pytest.raises(slapo.UnknownNameError, match="no dialect 'nobody'"):
        slapo.get_dialect_cls("runtime_engine", "nobody")


@SLAPO.row("init_target_engine", "sch, target, **kwargs")
def _() -> None:
    reference, model = MLP(), MLP()
    model.load_state_dict(reference.state_dict())
    module, optimizer = slapo.init_target_engine(scheduled(model), None)
    assert (module, optimizer) == (model, None)
    step = partial(torch.optim.SGD, lr=0.1)
    engine = slapo.init_target_engine(scheduled(model), "torch", optimizer=step, loss_fn=F.mse_loss)
    try:
        loss = engine.train_batch(x=X, labels=X)
        expected = F.mse_loss(reference(X), X)
        expected.backward()
        step(reference.parameters()).step()
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(model.fc1.weight, reference.fc1.weight)
    finally:
        engine.close()


@SLAPO.row("is_module_list", "module, name='', parent=None")
def _() -> None:
    model = Stack()
    assert slapo.is_module_list(model.layers, "layers", model)
    assert not slapo.is_module_list(model)
    sch = scheduled(model)
    sch.trace()
    assert slapo.is_module_list(sch["layers"].mod)


@SLAPO.row("list_primitives", "name_only=True")
def _() -> None:
    names = slapo.list_primitives()
    assert {"shard", "sync", "replace", "checkpoint", "fuse", "decompose", "cut_pipeline_stage", "trace_until"} <= set(names)
    classes = slapo.list_primitives(name_only=False)
    assert list(classes) == names
    assert all(issubclass(each, slapo.Primitive) for each in classes.values())


@SLAPO.row("trace", "model, **kwargs")
def _() -> None:
    model = MLP()
    traced = slapo.trace(model, example_inputs=(X,))
    assert isinstance(traced, fx.GraphModule)
    assert [node.target for node in traced.graph.find_nodes(op="call_module")] == ["fc1", "act", "fc2"]
    same(model, traced)


@SLAPO.row("trace_module", "model, **kwargs")
def _() -> None:
    model = MLP()
    traced = slapo.trace_module(model, (X,), leaf=lambda path, module: isinstance(module, nn.Linear | nn.ReLU))
    assert isinstance(traced, fx.GraphModule)
    same(model, traced)


@SLAPO.row("is_random_seed_set", "")
def _() -> None:
    slapo.set_random_seed(3)
    assert slapo.is_random_seed_set()


@SLAPO.row("checkpoint", "function, *args, use_reentrant=True, **kwargs")
def _() -> None:
    slapo.set_random_seed(3, tp_rank=1)
    model, reference = MLP(), None
    reference = copy.deepcopy(model)

    def dropped(module: nn.Module, x: torch.Tensor, scale: float) -> torch.Tensor:
        with slapo.get_cuda_rng_tracker().fork():
            return F.dropout(module(x), 0.5) * scale

    grads = []
    for use_reentrant in (True, False):
        slapo.set_random_seed(3, tp_rank=1)
        out = slapo.checkpoint(dropped, model, X.clone().requires_grad_(), 2.0, use_reentrant=use_reentrant)
        slapo.set_random_seed(3, tp_rank=1)
        expected = dropped(reference, X.clone().requires_grad_(), scale=2.0)
        torch.testing.assert_close(out, expected)
        for each, module in ((out, model), (expected, reference)):
            module.zero_grad()
            each.square().sum().backward()
        grads.append(model.fc1.weight.grad)
        torch.testing.assert_close(model.fc1.weight.grad, reference.fc1.weight.grad)  # the same mask both times
    torch.testing.assert_close(*grads)


CLASSES = ["FunctionType", "ModulePattern", "OrderedDict", "Pattern", "ScheduleMetadata", "partial", "Verify"]
METHODS = "clear popitem move_to_end update keys items values pop setdefault copy fromkeys".split()
FUNCTIONS = """
init_empty_weights get_logger register_primitive set_random_seed analyze_tie_weights consolidate_model create_schedule
dataclass field get_cuda_rng_tracker get_dialect_cls init_target_engine is_module_list list_primitives trace trace_module
is_random_seed_set checkpoint
""".split()
MEMBERS = ["ModulePattern.forward", "Pattern.forward", "partial.args", "partial.func", "partial.keywords"]


def test_no_name_of_the_page_is_waived() -> None:
    assert SLAPO.calls.keys() == {*CLASSES, *FUNCTIONS, *MEMBERS, *(f"OrderedDict.{name}" for name in METHODS)}


@each_name(SLAPO)
def test_the_documented_arguments_are_taken(name: str) -> None:
    SLAPO.check_arguments(name)


@each_name(SLAPO)
def test_what_the_page_says_is_so(name: str) -> None:
    SLAPO.show(name)
