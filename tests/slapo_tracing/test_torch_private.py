"""Fails when torch moves or changes one of the private things that tracing uses."""

from __future__ import annotations

import ast
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import slapo_tracing
from slapo_plan import fake_ranks
from slapo_tracing.nodes import _torch_private as private


def test_private_names_stay_in_one_module() -> None:
    for file in Path(slapo_tracing.__file__).parent.rglob("*.py"):
        names = [
            node.attr
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        ]
        modules = [node.module or "" for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
        assert file.name == "_torch_private.py" or not [name for name in modules if name.startswith("torch._")], file
        assert "_C" not in names or file.name == "_torch_private.py", file


def test_fakes_claim_a_device_and_take_no_memory() -> None:
    real = nn.Parameter(torch.empty(3, 2, device="meta").t())
    real.mark = 1  # type: ignore[attr-defined]
    fake = private.as_parameter(private.fake_like(private.FakeMode(), real, torch.device("cpu")), real)
    assert isinstance(fake, nn.Parameter)
    assert isinstance(fake, private.FakeTensor)
    assert (fake.device.type, fake.shape, fake.stride(), fake.requires_grad, fake.is_leaf, fake.mark) == (
        "cpu",
        (2, 3),
        (1, 2),
        True,
        True,
        1,
    )
    assert private.fake_like(private.FakeMode(), torch.eye(2).to_sparse()).shape == (2, 2)


def test_real_and_fake_tensors_mix() -> None:
    mode = private.FakeMode(allow_non_fake_inputs=True)
    with mode:
        assert isinstance(torch.ones(2) + private.fake_like(mode, torch.ones(2)), private.FakeTensor)


@pytest.mark.parametrize("fake", [True, False])
def test_views_share_memory_and_results_do_not(fake: bool) -> None:
    mode = private.FakeMode()
    with mode if fake else nullcontext():
        for _ in range(2):  # the second time from the cache
            x = torch.ones(2, 4)
            others = [
                x.view(-1),
                x[1],
                x.split(1)[1],
                x.detach(),
                nn.Flatten()(x),
                x.add_(1),
                x * 1,
                x.reshape(4, 2).t().reshape(-1),
            ]
            assert [private.memory(other) == private.memory(x) for other in others] == [True] * 6 + [False] * 2
    assert private.memory(torch.eye(2).to_sparse()) != private.memory(torch.eye(2))


@pytest.mark.parametrize("mode", [private.Watch, private.FakeMode])
def test_random_draws_are_counted(mode: Any) -> None:
    alpha = torch.ones(1)
    with mode(allow_non_fake_inputs=True) if mode is private.FakeMode else mode() as watch:
        for count in (1, 2):
            torch._standard_gamma(alpha)
            torch.nn.functional.dropout(alpha + 1, 0.5, training=False)
            assert watch.drawn == count


def test_fakes_take_the_key_of_ours_and_tell_apart_what_torch_does() -> None:
    a = torch.ones(2, 4)
    calls = [
        lambda x: x * 1,
        lambda x: x * 1.0,
        lambda x: x * True,
        lambda x: x.sum([0, 1]),
        lambda x: x.sum([0], True),
        lambda x: x.to(torch.int32),
        lambda x: torch.stack([x, x], 1),
        lambda x: torch.cat([x[:1].t(), x.t()], 1),
    ]
    inputs = [a, a.t(), a.int(), a.long()[0], a[:, 1:], torch.ones(4, 2)[::2], nn.Parameter(a), a.to(torch.complex64).conj()]

    def fake_of(mode: Any, x: torch.Tensor) -> torch.Tensor:
        if isinstance(mode, private.FakeMode):
            return private.fake_like(mode, x)
        empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return FakeTensor(mode, empty, x.device).requires_grad_(x.requires_grad)

    def results(mode: Any) -> list[Any]:
        found = []
        for _ in range(2):  # the second time from memory
            for x in inputs:
                for call in calls if x.dim() == 2 else calls[:3]:
                    with mode:
                        y = call(fake_of(mode, x))
                    found.append((y.shape, y.stride(), y.dtype, y.device, y.requires_grad, y.is_conj(), vars(y).keys()))
        return found

    plain = FakeTensorMode()
    assert results(private.FakeMode()) == results(plain)
    assert len([key for key in plain.cache if isinstance(key, tuple) and key[0] is torch.ops.aten.mul.Tensor]) >= 3


def test_the_observer_of_fakes_runs_each_operator_once() -> None:
    mode, found = private.FakeMode(), []

    def observe(call: Any, func: Any, args: Any, kwargs: Any) -> Any:
        found.append(func.overloadpacket.__name__)
        return call(args, kwargs)

    for _ in range(2):  # the second time from memory
        with mode:
            x = private.fake_like(mode, torch.ones(2, 4))
            mode.observer = observe
            x.mul(2).view(8).add_(1)
            torch.nn.functional.silu(x)  # torch computes its fake by other operators
            mode.observer = None
    assert found == ["mul", "view", "add_", "silu"] * 2


def test_torch_asks_a_mode_whether_its_compiler_is_kept_out() -> None:
    assert TorchDispatchMode._should_skip_dynamo()
    assert not private.FakeMode._should_skip_dynamo()


def test_fakes_remember_functional_collectives() -> None:
    with fake_ranks(tp=4) as mesh:
        mode, group = private.FakeMode(), mesh.get_group("tp").group_name
        for _ in range(2):  # the second time from memory
            with mode:
                x = private.fake_like(mode, torch.ones(8, 2))
                gathered = torch.ops._c10d_functional.all_gather_into_tensor(x, 4, group)
                scattered = torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", 4, group)
                reduced = torch.ops._c10d_functional.all_reduce(x, "sum", group)
            assert [tuple(each.shape) for each in (gathered, scattered, reduced)] == [(32, 2), (2, 2), (8, 2)]
            assert len({private.memory(each) for each in (x, gathered, scattered, reduced)}) == 4
        keys = [key for key in mode.cache if isinstance(key, tuple)]
        assert any(key[0] is torch.ops._c10d_functional.all_gather_into_tensor.default for key in keys)


def test_version_counts_changes() -> None:
    tensor = torch.zeros(2)
    before = private.version(tensor)
    tensor.add_(1)
    assert private.version(tensor) == before + 1
    with torch.inference_mode():
        assert private.version(torch.zeros(2)) == 0


def test_unrecorded_hides_calls_and_recorded_shows_them_again() -> None:
    seen: list[object] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode(), private.unrecorded():
        torch.zeros(1)
        with private.recorded():
            torch.ones(1)
    assert seen == [torch.ones]


def test_calls_are_intercepted_and_then_no_more() -> None:
    calls: list[str] = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x * 2

    def module_call(call, module, *args):  # type: ignore[no-untyped-def]
        calls.append(type(module).__name__)
        return call(module, *args)

    def apply(call, *args):  # type: ignore[no-untyped-def]
        calls.append(call.__self__.__name__)
        return call(*args)

    model, x = nn.Sequential(nn.Identity()), torch.ones(1)
    reads: list[tuple[object, str]] = []
    modes: list[tuple[str, bool]] = []
    plain = torch.is_grad_enabled

    def ask_mode(name, answer):  # type: ignore[no-untyped-def]
        modes.append((name, answer()))
        return answer()

    def read(module, name, value):  # type: ignore[no-untyped-def]
        reads.append((module, name))
        return 7 if name == "number" else value

    model.number = 6
    writes: list[tuple[object, str]] = []
    with private.intercept(module_call, apply, read, ask_mode, lambda *named: writes.append(named)):
        model.number = 6
        assert model.number == 7
        assert torch.is_grad_enabled()
        asked = modes[-1]
        assert Twice.apply(model(x)) == 2
        assert torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=True) == x.sin()
        assert model[0].training
        assert not hasattr(model, "absent")
    assert calls == ["Sequential", "Identity", "Twice"]
    assert (model[0], "training") in reads
    assert writes == [(model, "number")]
    assert asked == ("is_grad_enabled", True)
    assert torch.is_grad_enabled is plain
    Twice.apply(model(x))
    assert len(calls) == 3
    assert "__getattribute__" not in vars(nn.Module)


def test_fake_tensors_log_to_a_known_logger() -> None:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    with private.without_fake_tensor_logs():
        assert not logger.isEnabledFor(logging.ERROR)
    assert logger.level == before


def test_who_compiles_a_graph() -> None:
    class Inner(fx.GraphModule):
        def recompile(self) -> Any:
            seen.append(private.is_recompiled_with_parent())
            return super().recompile()

    seen: list[bool] = []
    graph = fx.symbolic_trace(nn.Identity()).graph
    inner = Inner({}, graph)
    inner.recompile()
    assert seen == [False, False]
    holder = nn.Module()
    holder.inner = inner
    calls = fx.Graph()
    calls.output(calls.call_module("inner", (calls.placeholder("x"),)))
    fx.GraphModule(holder, calls)
    assert seen == [False, False, True]


def test_pytree_paths() -> None:
    assert private.leaf_paths(((1, [2]), {"a": {"b": 3}})) == [(0, 0), (0, 1, 0), (1, "a", "b")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fake_product_in_groups_is_like_the_real_one(dtype: torch.dtype) -> None:
    x, weights, ends = torch.ones(6, 8, dtype=dtype), torch.ones(2, 16, 8, dtype=dtype), torch.tensor([2, 6], dtype=torch.int32)
    real = nn.functional.grouped_mm(x, weights.transpose(1, 2), offs=ends)
    mode = private.FakeMode()
    with mode:
        fakes = [private.fake_like(mode, tensor) for tensor in (x, weights, ends)]
        fake = nn.functional.grouped_mm(fakes[0], fakes[1].transpose(1, 2), offs=fakes[2])
    assert isinstance(fake, private.FakeTensor)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), dtype)


@pytest.mark.parametrize("grad", [True, False])
def test_a_fake_linear_layer_is_like_the_real_one_and_remembered(grad: bool) -> None:
    """torch never remembers the view at its end, which is of a tensor nobody else has."""
    x, weight = torch.ones(2, 3, 8), torch.ones(4, 8, requires_grad=grad)
    real = nn.functional.linear(x, weight)
    mode = private.FakeMode()
    before = dict(mode.cache_info().bypasses)  # of all modes so far
    with mode:
        fakes = [private.fake_like(mode, tensor) for tensor in (x, weight)]
        fake = [nn.functional.linear(*fakes) for _ in range(2)][1]
        fake.add_(1)  # not a view to autograd
    facts = [(y.shape, y.stride(), y.dtype, y.requires_grad, y._is_view()) for y in (fake, real)]
    assert facts[0] == facts[1]
    assert mode.cache_info().bypasses == before


def test_functions_of_vmap_are_intercepted_and_then_no_more() -> None:
    seen = []

    def handler(call: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(function)
        return call(function, *args, **kwargs)

    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    many = torch.vmap(double)
    with private.intercept_vmap(handler):
        assert torch.equal(many(torch.ones(3)), torch.full((3,), 2.0))
    many(torch.ones(3))
    assert seen == [double]


def test_a_transform_is_seen_inside_of_it_alone() -> None:
    seen: list[bool] = []
    torch.func.vmap(lambda x: seen.append(private.in_function_transform()) or x)(torch.ones(2))
    assert (seen, private.in_function_transform()) == ([True], False)
