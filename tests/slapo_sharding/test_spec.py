"""Cutting a tensor and putting it together again."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slapo_core.parameters import ShardSpec


@st.composite
def specs(draw: st.DrawFn) -> ShardSpec:
    num_shards = draw(st.integers(1, 4))
    blocks = tuple(num_shards * part for part in draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] = sum(blocks)
    return ShardSpec(dim, tuple(shape), draw(st.integers(0, num_shards - 1)), num_shards, blocks)


@settings(max_examples=60, deadline=None)
@given(specs())
def test_pieces_assemble_to_the_whole(spec: ShardSpec):
    full = torch.arange(torch.Size(spec.full_shape).numel()).view(spec.full_shape)
    pieces = [spec.local(full, rank) for rank in range(spec.num_shards)]
    assert torch.equal(spec.assemble(pieces), full)


@settings(max_examples=60, deadline=None)
@given(specs())
def test_each_piece_has_its_part_of_every_block(spec: ShardSpec):
    full = torch.arange(sum(spec.blocks))
    flat = ShardSpec(0, (sum(spec.blocks),), spec.rank, spec.num_shards, spec.blocks)
    expected = torch.cat([block.chunk(spec.num_shards)[spec.rank] for block in full.split(spec.blocks)])
    assert torch.equal(flat.local(full), expected)


@settings(max_examples=30, deadline=None)
@given(specs())
def test_a_piece_is_contiguous_and_keeps_no_hold_of_the_whole(spec: ShardSpec):
    full = torch.zeros(spec.full_shape)
    piece = spec.local(full)
    assert piece.is_contiguous()
    assert piece.untyped_storage().data_ptr() != full.untyped_storage().data_ptr()


def test_a_piece_of_a_meta_tensor_is_meta():
    spec = ShardSpec(1, (4, 6), 1, 2, (2, 4))
    assert spec.local(torch.empty(4, 6, device="meta")).shape == (4, 3)
