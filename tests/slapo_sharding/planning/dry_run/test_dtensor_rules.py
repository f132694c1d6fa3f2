"""Layouts that DTensor's rules give for an operation equal those that ranks compute on their shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

from slapo_sharding.communication._torch_private import no_redistribution
from slapo_testing import run_distributed

pytestmark = pytest.mark.multiproc

ALONG = (
    "softmax log_softmax cumsum cumprod logcumsumexp sum mean prod amax amin argmax argmin max min median mode sort argsort "
    "logsumexp std var unbind unsqueeze squeeze cummax cummin all any count_nonzero nansum"
).split()
"""Methods with a dimension as their only argument."""

INDEX = torch.tensor([0, 1])
OF_DIM: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "topk": lambda x, d: x.topk(1, d),
    "norm": lambda x, d: x.norm(dim=d),
    "normalize": lambda x, d: F.normalize(x, dim=d),
    "flip": lambda x, d: x.flip(d),
    "roll": lambda x, d: x.roll(1, d),
    "diff": lambda x, d: x.diff(dim=d),
    "glu": lambda x, d: F.glu(x, d),
    "unfold": lambda x, d: x.unfold(d, 2, 2),
    "chunk": lambda x, d: x.chunk(2, d),
    "split": lambda x, d: x.split(1, d),
    "select": lambda x, d: x.select(d, 0),
    "narrow": lambda x, d: x.narrow(d, 0, 1),
    "index_select": lambda x, d: x.index_select(d, INDEX),
    "gather": lambda x, d: x.gather(d, torch.zeros_like(x, dtype=torch.long)),
    "scatter": lambda x, d: x.scatter(d, torch.zeros_like(x, dtype=torch.long), x),
    "repeat_interleave": lambda x, d: x.repeat_interleave(2, d),
    "stack": lambda x, d: torch.stack([x, x], d),
    "cat": lambda x, d: torch.cat([x, x * 2], d),
    "movedim": lambda x, d: x.movedim(d, 0),
    "vector_norm": lambda x, d: torch.linalg.vector_norm(x, dim=d),
    "fft": lambda x, d: torch.fft.fft(x, dim=d).real,
}
PLAIN: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda x: x.sum(),
    "max": lambda x: x.max(),
    "argmax": lambda x: x.argmax(),
    "mean of two": lambda x: x.mean((0, -1)),
    "tril": lambda x: x.tril(),
    "diagonal": lambda x: x.diagonal(dim1=-2, dim2=-1),
    "flatten": lambda x: x.flatten(1),
    "view": lambda x: x.view(-1),
    "reshape": lambda x: x.transpose(1, 2).reshape(x.shape[0], -1),
    "pairs": lambda x: x.reshape(-1, 2),
    "average": lambda x: F.avg_pool1d(x, 2),
    "pad": lambda x: F.pad(x, (1, 1)),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "group_norm": lambda x: F.group_norm(x, 2),
    "instance_norm": lambda x: F.instance_norm(x),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "channel_shuffle": lambda x: F.channel_shuffle(x[:, :, None], 2),
    "cosine": lambda x: F.cosine_similarity(x, x + 1, dim=-1),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "repeat": lambda x: x.repeat(1, 1, 2),
    "expand": lambda x: x[None].expand(3, -1, -1, -1),
    "bmm": lambda x: torch.bmm(x, x.mT),
    "einsum": lambda x: torch.einsum("abc,adc->abd", x, x),
    "every second": lambda x: x[..., ::2],
    "the last": lambda x: x[..., -1],
    "all but one": lambda x: x[:, 1:],
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "kl_div": lambda x: F.kl_div(x, x.softmax(-1), reduction="batchmean"),
    "complex": lambda x: torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)).abs(),
}


def _operations() -> Iterator[tuple[str, Callable[[torch.Tensor], Any]]]:
    for dim in (2, -1, -2):
        for name in ALONG:
            yield f"{name}({dim})", lambda x, name=name, dim=dim: getattr(x, name)(dim)  # type: ignore[misc]
        for name, call in OF_DIM.items():
            yield f"{name}({dim})", lambda x, call=call, dim=dim: call(x, dim)  # type: ignore[misc]
    yield from PLAIN.items()


def _tensors(value: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _wrong(rank: int, sharded: int) -> tuple[list[str], int]:
    """Return the operations with wrong layouts, and the number of operations compared."""
    mesh, size = DeviceMesh.from_group(dist.group.WORLD, "cpu"), dist.get_world_size()
    whole = torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(0))
    own, wrong, compared = whole.chunk(size, sharded)[rank].clone(), [], 0
    for name, call in _operations():
        with torch.no_grad(), no_redistribution():
            try:
                claimed = _tensors(call(DTensor.from_local(own.clone(), mesh, [Shard(sharded)], run_check=False)))
            except (RuntimeError, IndexError):
                continue  # refused
        for value, expected, mine in zip(claimed, _tensors(call(whole)), _tensors(call(own)), strict=True):
            placement = value.placements[0]
            if placement.is_partial() or not (placement.is_replicate() or type(placement) is Shard):
                continue
            part = expected if placement.is_replicate() else expected.chunk(size, placement.dim)[rank]
            compared += 1
            if part.shape != mine.shape or not torch.allclose(part.float(), mine.float()):
                wrong.append(f"{name}: {placement}")
    return wrong, compared


@pytest.mark.parametrize("sharded", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_compute_the_layouts_of_the_rules(sharded: int) -> None:
    for wrong, compared in run_distributed(_wrong, 2, sharded):
        assert wrong == []
        assert compared > 70
