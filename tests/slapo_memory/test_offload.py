"""``sch.offload()``: what autograd keeps waits elsewhere, and the numbers are bit-equal."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import slapo_fusion.plugin
import slapo_memory.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Schedule, ScheduleError, create_schedule, load_schedule
from slapo_memory.forward_wrappers.cpu_offload import _CpuCopy
from slapo_testing import isolated_plugins
from slapo_verify.comparison import assert_equivalent


@pytest.fixture(autouse=True)
def only_memory_and_fusion() -> Iterator[None]:
    with isolated_plugins(slapo_tracing.plugin, slapo_training.plugin, slapo_memory.plugin, slapo_fusion.plugin):
        yield


class Block(nn.Module):
    """Attention whose three inputs are views of one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(8, 24), nn.Linear(8, 8), nn.Dropout(0.3)
        self.register_buffer("scale", torch.rand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        attended = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        return x + self.drop(self.out(attended) * self.scale).sin()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


X = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(5))


def make_schedule() -> tuple[nn.Module, Schedule]:
    before = Model()
    return before, create_schedule(copy.deepcopy(before), example_inputs=(X,))


def copies() -> list[_CpuCopy]:
    """Return the copies that are on the CPU, or are back and in use."""
    return [value for value in gc.get_objects() if type(value) is _CpuCopy]


def moved_bytes() -> list[int]:
    return [copy.on_cpu.nbytes for copy in copies() if copy.on_cpu is not None]


@pytest.mark.parametrize("needs_grad", [False, True])
def test_outputs_and_gradients_are_bit_equal(needs_grad: bool) -> None:
    before, sch = make_schedule()
    sch["layers"].offload(min_bytes=0)
    x = X.clone().requires_grad_(needs_grad)
    assert_equivalent(before, sch.mod, x, atol=0, rtol=0)
    for model in (before, sch.mod):
        torch.manual_seed(1)
        model.zero_grad()
        model(x).square().sum().backward()
    for one, other in zip(before.parameters(), sch.mod.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_views_of_one_memory_are_moved_once_and_weights_and_buffers_stay() -> None:
    module = Block()
    create_schedule(module).offload(min_bytes=0)
    x = X.clone()
    out = module(x)
    sizes = moved_bytes()
    assert sizes.count(3 * X.nbytes) == 1  # q, k and v
    own = {tensor.nbytes for tensor in [*module.parameters(), *module.buffers()]}
    assert own.isdisjoint(sizes)
    assert sizes.count(X.nbytes) == 4  # x, what is attended, the dropout's mask and its result
    out.sum().backward()
    assert copies() == []


@pytest.mark.parametrize("offload", [False, True])
def test_what_is_moved_is_free_where_it_was(offload: bool) -> None:
    module = Block()
    if offload:
        create_schedule(module).offload(min_bytes=0)
    where: list[StorageWeakRef] = []
    module.qkv.register_forward_hook(lambda _, args, out: where.append(StorageWeakRef(out.untyped_storage())))
    out = module(X)
    assert out.requires_grad
    assert where[0].expired() is offload


def test_small_memory_stays() -> None:
    module = Block()
    create_schedule(module).offload(min_bytes=2 * X.nbytes)
    out = module(X)
    assert out.requires_grad
    assert sorted(moved_bytes()) == [2 * X.nbytes, 3 * X.nbytes]  # the softmax, and q, k and v


def test_a_mebibyte_is_the_least_that_is_moved_unless_told() -> None:
    module = nn.Sequential(nn.Sigmoid())
    create_schedule(module).offload()
    few, many = module(torch.ones(2**18 - 1, requires_grad=True)), module(torch.ones(2**18, requires_grad=True))
    assert moved_bytes() == [2**20]
    assert few.requires_grad
    assert many.requires_grad


class Changing(nn.Module):
    """Autograd keeps one memory twice, with other numbers the second time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        first = y * torch.full_like(y, 2).requires_grad_()
        y.add_(1)
        return first + y * torch.full_like(y, 3).requires_grad_()


def test_memory_written_to_in_between_is_moved_twice() -> None:
    module = Changing()
    create_schedule(module).offload(min_bytes=0)
    kept: list[Any] = []
    out = module(torch.ones(4, requires_grad=True))
    for entry in copies():
        assert entry.on_cpu is not None
        kept.append(entry.on_cpu.view(torch.float32)[0].item())
    assert {1.0, 2.0, 3.0} <= set(kept)
    out.sum().backward()


def test_the_backward_of_a_module_brings_back_what_the_one_before_moved() -> None:
    _, sch = make_schedule()
    sch["layers"].offload(min_bytes=0)
    order: list[set[int]] = []
    values: list[torch.Tensor] = []
    for index in range(3):
        sch[f"layers.{index}"].mod.register_forward_hook(lambda module, args, out: values.append(out))
    out = sch.mod(X)
    calls = {id(each.call): each.call for each in copies()}
    first, second, third = (  # in the order of the forward
        sorted(calls.values(), key=lambda call: sum(1 for other in calls.values() if _comes_before(other, call)))
    )
    home = lambda call: all(each().back is not None for each in call.copies if each() is not None)  # noqa: E731
    values[1].register_hook(lambda grad: order.append({number for number, call in ((0, first), (1, second)) if home(call)}))
    assert not any(map(home, (first, second, third)))
    out.sum().backward()
    assert order == [{1}]


def _comes_before(one: Any, other: Any) -> bool:
    while (other := other.before()) is not None:
        if other is one:
            return True
    return False


def with_compile(sch: Schedule) -> None:
    sch["layers"].compile(backend="eager")


CHECKPOINTS = {
    "plain": lambda sch: sch["layers"].checkpoint(),
    "matmuls": lambda sch: sch["layers"].checkpoint(policy="matmuls"),
    "budget": lambda sch: sch["layers"].checkpoint(budget=0.5),
}


def offloaded(sch: Schedule) -> None:
    sch["layers"].offload(min_bytes=0)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS.values(), ids=[*CHECKPOINTS])
@pytest.mark.parametrize("offload_first", [True, False])
def test_with_a_checkpoint_in_either_order_the_inputs_are_moved(checkpoint: Callable[..., Any], offload_first: bool) -> None:
    before, sch = make_schedule()
    for step in (offloaded, checkpoint) if offload_first else (checkpoint, offloaded):
        step(sch)
    where: list[StorageWeakRef] = []
    sch["layers.0"].mod.register_forward_hook(lambda _, args, out: where.append(StorageWeakRef(out.untyped_storage())))
    out = sch.mod(X)
    assert where[0].expired()
    assert moved_bytes() == [X.nbytes] * 3
    out.sum().backward()
    sch.mod.zero_grad()
    assert_equivalent(before, sch.mod, X, atol=0, rtol=0)


def test_an_offloaded_module_in_a_checkpoint_and_checkpoints_in_an_offloaded_one() -> None:
    before, sch = make_schedule()
    sch["layers.0.qkv"].offload(min_bytes=0)
    sch["layers"].checkpoint()
    sch.offload(min_bytes=0)
    out = sch.mod(X)
    assert moved_bytes() == [X.nbytes] * 3
    out.sum().backward()
    sch.mod.zero_grad()
    assert_equivalent(before, sch.mod, X, atol=0, rtol=0)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("steps", [(offloaded, with_compile), (with_compile, offloaded)], ids=["first", "last"])
def test_with_compiled_layers(steps: tuple[Callable[..., Any], ...]) -> None:
    torch.compiler.reset()
    before, sch = make_schedule()
    for step in steps:
        step(sch)
    out = sch.mod(X)
    assert len(moved_bytes()) >= 3 * 4
    out.sum().backward()
    sch.mod.zero_grad()
    assert_equivalent(before, sch.mod, X)


def test_autocast_and_no_gradients() -> None:
    before, sch = make_schedule()
    sch["layers"].offload(min_bytes=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert_equivalent(before, sch.mod, X, atol=0, rtol=0)
    with torch.no_grad():
        sch.mod(X)
    assert copies() == []


def test_a_second_backward_and_gradients_of_gradients() -> None:
    before, sch = make_schedule()
    sch["layers"].offload(min_bytes=0)
    found = []
    for model in (before.eval(), sch.mod.eval()):
        x = X.clone().requires_grad_()
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        grad.square().sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_micro_batches_in_flight() -> None:
    before, sch = make_schedule()
    sch["layers"].offload(min_bytes=0)
    for model in (before, sch.mod):
        torch.manual_seed(4)
        losses = [model(X * scale).square().sum() for scale in (1, 2, 3)]
        for index in (1, 0, 2):
            losses[index].backward()
    for one, other in zip(before.parameters(), sch.mod.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_copies_pickles_replays_and_undo(tmp_path: Any) -> None:
    before, sch = make_schedule()
    sch["layers"].offload(min_bytes=64)
    sch.save(tmp_path / "schedule.py")
    again = load_schedule(copy.deepcopy(before), tmp_path / "schedule.py")
    for model in (copy.deepcopy(sch.mod), pickle.loads(pickle.dumps(sch.mod)), again.mod):  # noqa: S301  our own
        out = model(X)
        assert moved_bytes()
        out.sum().backward()
        assert list(model.state_dict()) == list(before.state_dict())
    sch.undo()
    out = sch.mod(X)
    assert out.requires_grad
    assert moved_bytes() == []


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("layers.1", {}, r"offload\('layers.1'\): is offloaded already; once is enough"),
        ("layers", {}, r"offload\('layers.1'\): is offloaded already"),
        ("layers.0", {"min_bytes": -1}, "min_bytes is -1; give a number of bytes"),
        ("layers.0", {"min_bytes": True}, "min_bytes is True; give"),
        ("empty", {}, "the list is empty; there is nothing to offload"),
        ("box", {}, "a Module has no forward of its own; offload the modules in it"),
    ],
)
def test_what_is_refused(path: str, options: dict[str, Any], message: str) -> None:
    model = Model()
    model.empty, model.box = nn.ModuleList(), nn.Module()
    sch = create_schedule(model)
    sch["layers.1"].offload()
    with pytest.raises(ScheduleError, match=message):
        sch[path].offload(**options)
    assert ["forward" in vars(layer) for layer in sch["layers"].mod] == [False, True, False]


@pytest.mark.gpu
def test_on_a_gpu_the_copies_are_pinned_and_less_is_held() -> None:
    held, gradients = [], []
    for offload in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8))).cuda()
        if offload:
            for each in create_schedule(model).select("*"):
                each.offload()
        before = torch.cuda.memory_allocated()
        loss = model(torch.ones(4096, 1024, device="cuda")).square().mean()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated() - before)
        assert all(each.on_cpu is not None and each.on_cpu.is_pinned() for each in copies())
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert held[1] < held[0] / 4
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
