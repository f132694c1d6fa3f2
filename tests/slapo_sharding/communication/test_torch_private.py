"""Private names of torch in ``slapo_sharding``; a test fails when torch moves or changes one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode

from slapo_sharding.communication._torch_autograd import is_batched, no_functions, saved_tensor_hook, swap_sequence_numbers
from slapo_sharding.communication._torch_private import NO_BACKWARD, backward_pass, fake_mesh, global_state, no_redistribution
from slapo_testing import run_distributed

pytestmark = pytest.mark.multiproc


def _rules(rank: int) -> None:
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    part = DTensor.from_local(torch.empty(2, 3, 8, device="meta"), mesh, [Shard(2)], run_check=False)
    with torch.no_grad(), no_redistribution():
        heads = part.view(2, 3, 4, 4).transpose(1, 2)
        assert heads.placements == (Shard(1),)
        attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
        assert attended.placements == (Shard(1),)
        assert (part * torch.empty(1, device="meta")).placements == (Shard(2),), "a plain tensor counts as replicated"
        for moves in (lambda: part.softmax(-1), lambda: part.chunk(2, -1), lambda: part + torch.empty(2, 3, 16, device="meta")):
            with pytest.raises(RuntimeError, match="redistribution"):
                moves()
        assert torch.nn.functional.dropout(part, 0.5).placements == (Shard(2),), "without a warning"


def test_operations_keep_layouts_or_fail() -> None:
    run_distributed(_rules, 2)


def test_a_fake_mesh_needs_no_ranks() -> None:
    with torch.no_grad(), no_redistribution():
        part = DTensor.from_local(torch.empty(2, 8, device="meta"), fake_mesh(3), [Shard(1)], run_check=False)
        heads = part.unflatten(-1, (6, 4)).transpose(0, 1)
        assert (tuple(heads.shape), heads.placements) == ((6, 2, 4), (Shard(0),))
        with pytest.raises(RuntimeError, match="redistribution"):
            part.softmax(-1)


def test_backward_passes_have_numbers() -> None:
    x, numbers = torch.ones(1, requires_grad=True), []
    x.register_hook(lambda grad: numbers.append(backward_pass()))
    for _ in range(2):
        assert backward_pass() == NO_BACKWARD
        (x * 2).backward()
    assert len({NO_BACKWARD, *numbers}) == 3


def _kernels(rank: int) -> None:
    with torch.no_grad(), no_redistribution():
        part = DTensor.from_local(torch.empty(2, 1, 8, device="meta"), fake_mesh(2), [Shard(2)], run_check=False)
        with pytest.raises(RuntimeError, match="redistribution"):
            torch.nn.functional.conv1d(part, torch.empty(1, 1, 3, device="meta"), padding=1)
        rows = DTensor.from_local(torch.empty(2, 1, 8, device="meta"), fake_mesh(2), [Shard(0)], run_check=False)
        assert torch.nn.functional.conv1d(rows, torch.empty(1, 1, 3, device="meta")).placements == (Shard(0),)


def test_convolutions_along_a_sharded_dimension_are_refused() -> None:
    run_distributed(_kernels, 2)


class Sees(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_function__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))  # type: ignore[operator]


def test_no_mode_sees_functions() -> None:
    with Sees() as sees:
        with no_functions():
            torch.ones(1).add(1)
        assert not sees.seen
        torch.ones(1).add(1)
        assert sees.seen


def test_global_state_is_all_that_a_function_depends_on() -> None:
    cpu, found = torch.device("cpu"), []
    contexts = [
        nullcontext(),
        torch.autocast("cpu", torch.bfloat16),
        torch.autocast("cpu", torch.float16),
        torch.inference_mode(),
    ]
    for context in contexts:
        with context:
            found.append(global_state(cpu))
    assert len({*found}) == len(contexts)
    with FakeTensorMode():
        assert global_state(cpu) is None
    torch.vmap(lambda x: found.append(global_state(cpu)) or x)(torch.ones(2))
    assert found[-1] is None
    assert global_state(cpu) == found[0]


class _Turn(torch.autograd.Function):
    """Records its turn in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, turns: list[str]) -> torch.Tensor:
        ctx.name, ctx.turns = name, turns
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.turns.append(ctx.name)
        return grad, None, None


def test_sequence_numbers_of_a_backward_can_be_swapped() -> None:
    for exchanged in (False, True):
        turns: list[str] = []
        x, weight = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        start = _Turn.apply(_Turn.apply(x, "wait", turns), "start", turns)
        weights = _Turn.apply(weight, "weights", turns)
        if exchanged:
            swap_sequence_numbers(start.grad_fn, weights.grad_fn)
        (start + weights).sum().backward()
        assert turns == (["start", "weights", "wait"] if exchanged else ["weights", "start", "wait"])


def test_the_saved_tensor_hook_is_found() -> None:
    assert saved_tensor_hook() is None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        outer = saved_tensor_hook()
        assert outer is saved_tensor_hook()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            assert saved_tensor_hook() not in (None, outer)
    assert saved_tensor_hook() is None


def test_batches_of_vmap_are_recognised() -> None:
    seen: list[bool] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(is_batched(x))
        return x

    torch.vmap(note)(torch.ones(2, 3))
    x = torch.ones(3, requires_grad=True)
    x.register_hook(note)
    torch.autograd.grad(x * 2, x, torch.eye(3), is_grads_batched=True)
    assert seen == [True, True]
    assert not is_batched(x)
