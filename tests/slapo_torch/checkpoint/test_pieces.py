"""``pieces``: what all ranks hold, put together, is the unmodified model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import slapo_sharding.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, ShardSpec, build, create_schedule
from slapo_testing import run_distributed
from slapo_training.model import Piece, piece_of
from slapo_training.model.pieces import assemble

from ..layouts import adamw, gpt2, largest_difference, mesh_of, my_part, put_together, scheduled, tokens

Layout = dict[str, int]


def gpt2_in_pieces(rank: int, layout: Layout, options: dict[str, Any]) -> tuple[float, int]:
    mesh, batch = mesh_of(**layout), tokens(layout.get("dp", 1))[0]
    engine = build(scheduled(gpt2(), mesh, my_part(batch, mesh)), "torch", optimizer=adamw, microbatches=2, **options)
    held = sum(piece.tensor.numel() for piece in engine.pieces().values())
    found = largest_difference(put_together(engine, mesh), gpt2())
    engine.train_batch(**my_part(batch, mesh))
    after = put_together(engine, mesh)
    assert largest_difference(after, gpt2()) > 1e-3
    engine.close()
    return found, held


@pytest.mark.sampled(2)
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ({"dp": 2}, {}),
        ({"dp": 2}, {"data_parallel": "fsdp"}),
        ({"pp": 2}, {}),
        ({"tp": 2}, {}),
        ({"dp": 2, "tp": 2}, {"data_parallel": "fsdp"}),
        ({"pp": 2, "tp": 2}, {}),
        ({"pp": 2, "dp": 2}, {"data_parallel": "fsdp"}),
    ],
    ids=["ddp", "fsdp", "pp", "tp", "fsdp over tp", "pp of tp", "fsdp in pp"],
)
def test_the_pieces_of_all_ranks_are_the_model(layout: Layout, options: dict[str, Any]) -> None:
    """GPT-2 has fused q, k and v, a tied parameter, and a sharded vocabulary."""
    ranks = 1
    for size in layout.values():
        ranks *= size
    total = sum(parameter.numel() for parameter in gpt2().parameters())
    for difference, held in run_distributed(gpt2_in_pieces, ranks, layout, options):
        assert difference == 0.0
        assert held == total if layout == {"dp": 2} and not options else held < 0.8 * total


class Uneven(nn.Module):
    """Seven rows over two ranks, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 7)
        self.norm = nn.BatchNorm1d(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.up(x))


def uneven_in_pieces(rank: int, layout: Layout, options: dict[str, Any]) -> float:
    mesh = mesh_of(**layout)
    torch.manual_seed(0)
    sch = create_schedule(
        Uneven(),
        mesh=mesh,
        plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_sharding.plugin, slapo_torch.plugin]),
    )
    if layout.get("tp", 1) > 1:
        sch["up"].shard(["weight", "bias"], axis=0, uneven=True, gathered=False).sync("fwd_post", "all_gather", axis=1)
    engine = build(sch, "torch", optimizer=adamw, loss_fn=nn.functional.mse_loss, check=False, **options)
    found = put_together(engine, mesh)
    torch.manual_seed(0)
    return largest_difference(found, Uneven())


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("layout", "options"), [({"tp": 2}, {}), ({"dp": 2}, {"data_parallel": "fsdp"})], ids=["dealt", "rows"]
)
def test_parts_of_unequal_size_and_buffers_are_the_model(layout: Layout, options: dict[str, Any]) -> None:
    assert run_distributed(uneven_in_pieces, 2, layout, options) == [0.0, 0.0]


def spec_of(rank: int, **changes: Any) -> ShardSpec:
    given = {"dim": 0, "full_shape": (12, 4), "rank": rank, "num_shards": 2, "blocks": (6, 6), **changes}
    return ShardSpec(**given)


def test_rows_of_fused_blocks_lie_where_the_blocks_do() -> None:
    """Ten rows would cross from q to k."""
    full = torch.arange(48.0).view(12, 4)
    pieces = []
    for rank in range(2):
        local = spec_of(rank).local(full)
        pieces += [piece_of(local[a:b], spec_of(rank), local.shape, (a, b)) for a, b in ((0, 4), (4, 6), (6, 6))]
    assert pieces[0].ranges == (((0, 3), (6, 7)), ((0, 4),))
    assert [piece.tensor.numel() for piece in pieces] == [16, 8, 0] * 2
    assert torch.equal(assemble(pieces), full)


def test_copies_of_a_dealt_range_count_once() -> None:
    dealt = (((0, 8),), ((4, 12),))
    full = torch.arange(48.0).view(12, 4)
    assert torch.equal(
        assemble(piece_of(spec_of(r, uneven_ranges=dealt).local(full), spec_of(r, uneven_ranges=dealt)) for r in range(2)), full
    )


def test_pieces_of_some_ranks_are_not_taken_for_all() -> None:
    local = spec_of(0).local(torch.zeros(12, 4))
    with pytest.raises(BuildError, match="leave out 24 of 48 elements; give those of all ranks"):
        assemble([piece_of(local, spec_of(0))])
    with pytest.raises(BuildError, match="are not pieces of one tensor"):
        assemble([piece_of(local, spec_of(0)), Piece(torch.zeros(3), (3,), (((0, 3),),))])


def test_a_number_is_a_piece() -> None:
    assert assemble([piece_of(torch.tensor(3), None)]) == 3
