"""The private names of torch behind ``slapo_sharding``: these fail when torch moves one or changes what it does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from slapo_core.testing import run_distributed
from slapo_sharding._torch_private import NO_BACKWARD, backward_pass, layouts_kept, mesh_of

pytestmark = pytest.mark.multiproc


def _rules(rank: int) -> None:
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    part = DTensor.from_local(torch.empty(2, 3, 8, device="meta"), mesh, [Shard(2)], run_check=False)
    with torch.no_grad(), layouts_kept():
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


def test_a_mesh_needs_no_ranks() -> None:
    with torch.no_grad(), layouts_kept():
        part = DTensor.from_local(torch.empty(2, 8, device="meta"), mesh_of(3), [Shard(1)], run_check=False)
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
