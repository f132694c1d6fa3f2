"""Differentiable collectives: forward, backward, any dimension, nothing in place."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from slapo_sharding.communication import collectives
from slapo_testing import DistributedError, run_distributed

pytestmark = pytest.mark.multiproc


def _numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _backward(x: torch.Tensor, y: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    y.backward(grad)
    assert x.grad is not None
    return x.grad


def all_reduce_sums_and_passes_the_gradient(rank: int) -> None:
    x = _numbers(2, 3, seed=rank).requires_grad_()
    y = collectives.all_reduce(x, dist.group.WORLD)
    torch.testing.assert_close(y, sum(_numbers(2, 3, seed=other) for other in range(dist.get_world_size())))
    grad = _numbers(2, 3, seed=10)
    assert torch.equal(_backward(x, y, grad), grad)


def all_reduce_grad_passes_and_sums_the_gradient(rank: int) -> None:
    x = _numbers(2, 3, seed=1).requires_grad_()
    y = collectives.all_reduce_grad(x, dist.group.WORLD)
    assert torch.equal(y, x)
    grad = _backward(x, y, _numbers(2, 3, seed=10 + rank))
    torch.testing.assert_close(grad, sum(_numbers(2, 3, seed=10 + other) for other in range(dist.get_world_size())))


def all_gather_joins_any_dimension(rank: int) -> None:
    size = dist.get_world_size()
    for shape in ((3,), (2, 3), (2, 3, 4), (1, 2, 1, 3)):
        for dim in range(-len(shape), len(shape)):
            pieces = [_numbers(*shape, seed=other) for other in range(size)]
            for backward in ("split", "reduce_scatter"):
                x = pieces[rank].clone().requires_grad_()
                y = collectives.all_gather(x, dim, dist.group.WORLD, backward=backward)
                assert torch.equal(y, torch.cat(pieces, dim))
                grads = [_numbers(*y.shape, seed=50 + other * (backward != "split")) for other in range(size)]
                whole = grads[0] if backward == "split" else sum(grads)
                torch.testing.assert_close(_backward(x, y, grads[rank]), whole.chunk(size, dim)[rank])


def reduce_scatter_and_scatter_cut_any_dimension(rank: int) -> None:
    size = dist.get_world_size()
    for shape in ((4,), (4, 8), (4, 4, 8)):
        for dim in range(-len(shape), len(shape)):
            wholes = [_numbers(*shape, seed=other) for other in range(size)]
            grads = [_numbers(*shape, seed=60).chunk(size, dim)[other] for other in range(size)]
            x = wholes[rank].clone().requires_grad_()
            y = collectives.reduce_scatter(x, dim, dist.group.WORLD)
            torch.testing.assert_close(y, sum(wholes).chunk(size, dim)[rank])
            assert torch.equal(_backward(x, y, grads[rank]), torch.cat(grads, dim))
            x = wholes[0].clone().requires_grad_()
            y = collectives.scatter(x, dim, dist.group.WORLD)
            assert torch.equal(y, wholes[0].chunk(size, dim)[rank])
            assert torch.equal(_backward(x, y, grads[rank]), torch.cat(grads, dim))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "case",
    [
        all_reduce_sums_and_passes_the_gradient,
        all_reduce_grad_passes_and_sums_the_gradient,
        all_gather_joins_any_dimension,
        reduce_scatter_and_scatter_cut_any_dimension,
    ],
)
def test_collective(case, ranks):
    run_distributed(case, ranks)


def _leave_inputs_alone(rank: int) -> None:
    x = _numbers(4, 4, seed=rank).requires_grad_()
    middle = x * x  # its backward needs x, the collectives' input shares nothing with their output
    kept = middle.detach().clone()
    for run in (
        lambda: collectives.all_reduce(middle, dist.group.WORLD),
        lambda: collectives.all_reduce_grad(middle, dist.group.WORLD),
        lambda: collectives.all_gather(middle, 1, dist.group.WORLD),
        lambda: collectives.reduce_scatter(middle, 0, dist.group.WORLD),
        lambda: collectives.scatter(middle, 1, dist.group.WORLD),
    ):
        result = run()
        grad = torch.ones_like(result)
        given = grad.clone()
        version = (middle._version, grad._version)
        result.backward(grad, retain_graph=True)
        assert torch.equal(middle, kept)
        assert torch.equal(grad, given)
        assert (middle._version, grad._version) == version


def test_correctness_05_nothing_is_reduced_in_place():
    run_distributed(_leave_inputs_alone, 2)


def test_one_rank_or_no_group_gives_the_input_back():
    x = torch.randn(3, 4, requires_grad=True)
    for function in (collectives.all_gather, collectives.reduce_scatter, collectives.scatter):
        assert function(x, -1, None) is x
    assert collectives.all_reduce(x) is x
    assert collectives.all_reduce_grad(x) is x


def test_unknown_backward_of_all_gather_is_refused():
    with pytest.raises(ValueError, match="backward of all_gather is 'sum'"):
        collectives.all_gather(torch.zeros(2), 0, backward="sum")


def _cut_three_rows(rank: int) -> str:
    with pytest.raises(ValueError, match="not divisible") as caught:
        collectives.scatter(torch.zeros(3, 2), 0, dist.group.WORLD)
    return str(caught.value)


def test_a_size_that_does_not_divide_is_refused():
    assert (
        run_distributed(_cut_three_rows, 2)[1]
        == "dim 0 of a tensor of shape (3, 2) is not divisible by 2 ranks; pad it (a sequence, say)"
    )


def _transform(rank: int, name: str) -> None:
    transform = getattr(torch.func, name)
    transform(lambda x: collectives.all_reduce_grad(x, dist.group.WORLD).sum())(torch.ones(2, 2))


@pytest.mark.parametrize("name", ["grad", "vmap"])
def test_the_transforms_of_torch_func_are_refused(name: str):
    with pytest.raises(DistributedError, match="autograd.Function with functorch transforms"):
        run_distributed(_transform, 2, name)
