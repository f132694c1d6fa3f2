"""Sizes that do not divide: collectives of uneven shards, uneven layers, vocabularies."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from slapo_core.testing import run_distributed
from slapo_sharding import collectives

pytestmark = pytest.mark.multiproc


def _chunk(x: torch.Tensor, dim: int) -> torch.Tensor:
    """This rank's chunk of ``x``, which torch leaves out where it is empty."""
    ranks, empty = dist.get_world_size(), x.narrow(dim, 0, 0)
    return [*x.chunk(ranks, dim), *[empty] * ranks][dist.get_rank()].clone()


def _joined_and_cut(rank: int, size: int) -> None:
    world = dist.group.WORLD
    for dim in (0, 1, -1):
        shape = [2, 3, 4]
        shape[dim] = size
        torch.manual_seed(0)
        whole, grad, ranks = torch.randn(shape), torch.randn(shape), dist.get_world_size()
        for backward, factor in (("split", 1), ("reduce_scatter", ranks)):
            x = _chunk(whole, dim).requires_grad_()
            y = collectives.all_gather(x, dim, world, size=size, backward=backward)
            assert torch.equal(y, whole)
            y.backward(grad)
            torch.testing.assert_close(x.grad, factor * _chunk(grad, dim))
        x = whole.clone().requires_grad_()
        y = collectives.scatter(x, dim, world, uneven=True)
        assert torch.equal(y, _chunk(whole, dim))
        y.backward(_chunk(grad, dim))
        assert torch.equal(x.grad, grad)


@pytest.mark.parametrize(("ranks", "size"), [(2, 5), (4, 7), (4, 5), (3, 1), (4, 8)])
def test_uneven_shards_are_joined_and_cut(ranks, size):
    run_distributed(_joined_and_cut, ranks, size)


def _refused(rank: int) -> list[str]:
    messages = []
    for call in (
        lambda: collectives.all_gather(torch.zeros(1), 0, dist.group.WORLD, size=5),
        lambda: collectives.scatter(torch.zeros(5), 0, dist.group.WORLD),
        lambda: collectives.reduce_scatter(torch.zeros(5), 0, dist.group.WORLD),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_what_does_not_fit_is_refused():
    first, second = run_distributed(_refused, 2)
    assert first[0] == "dim 0 of a shard of shape (1,) is not rank 0's part of 5"
    assert first[1:] == second[1:] == ["dim 0 of a tensor of shape (5,) is not divisible by 2 ranks"] * 2
