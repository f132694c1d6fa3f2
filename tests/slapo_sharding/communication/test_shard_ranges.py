"""Splitting a tensor and assembling it again: even, uneven and replicated pieces."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slapo_core import ShardSpec
from slapo_sharding.communication.shard_ranges import block_ranges, concatenated_ranges, key_head_ranges


@st.composite
def specs(draw: st.DrawFn) -> ShardSpec:
    num_shards = draw(st.integers(1, 4))
    blocks = tuple(num_shards * part for part in draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] = sum(blocks)
    return ShardSpec(dim, tuple(shape), draw(st.integers(0, num_shards - 1)), num_shards, blocks)


@st.composite
def dealt(draw: st.DrawFn) -> ShardSpec:
    """Draw ranges of each rank, empty or repeated ones among them, that cover the dimension."""
    num_shards = draw(st.integers(1, 4))
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    size = shape[dim] = draw(st.integers(1, 9))
    ends = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=4))})
    parts = [
        *zip(ends, ends[1:], strict=False),
        *draw(st.lists(st.sampled_from([(0, 1), (0, size), (size, size)]), max_size=3)),
    ]
    holders = [draw(st.integers(0, num_shards - 1)) for _ in parts]
    ranges = [tuple(part for part, of in zip(parts, holders, strict=True) if of == rank) for rank in range(num_shards)]
    ranges = [own or ((0, 0),) for own in ranges]
    return ShardSpec(dim, tuple(shape), draw(st.integers(0, num_shards - 1)), num_shards, (size,), uneven_ranges=tuple(ranges))


def numbered(spec: ShardSpec) -> torch.Tensor:
    return torch.arange(torch.Size(spec.full_shape).numel()).view(spec.full_shape)


@settings(max_examples=150, deadline=None)
@given(specs() | dealt())
def test_pieces_assemble_to_the_whole(spec: ShardSpec):
    full = numbered(spec)
    pieces = [spec.local(full, rank) for rank in range(spec.num_shards)]
    assert [piece.shape[spec.dim] for piece in pieces] == list(spec.sizes)
    assert torch.equal(spec.assemble(pieces), full)


@settings(max_examples=150, deadline=None)
@given(specs() | dealt())
def test_every_element_counts_once(spec: ShardSpec):
    full = numbered(spec)
    ranks = [replace(spec, rank=rank) for rank in range(spec.num_shards)]
    counted = torch.cat([each.without_copies(each.local(full)).flatten() for each in ranks])
    assert torch.equal(counted.sort().values, full.flatten())


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_block_ranges_are_those_of_torch_chunk(num_shards: int, blocks: list[int]):
    """Also if torch omits the last chunks because they are empty."""
    ranges = concatenated_ranges(blocks, [block_ranges(size, num_shards) for size in blocks])
    full = torch.arange(sum(blocks))
    spec = ShardSpec(0, (len(full),), 0, num_shards, tuple(blocks), uneven_ranges=ranges)
    for rank in range(num_shards):
        expected = [[*block.chunk(num_shards), *[block[:0]] * num_shards][rank] for block in full.split(blocks)]
        assert torch.equal(spec.local(full, rank), torch.cat(expected))


@settings(max_examples=60, deadline=None)
@given(specs())
def test_each_piece_has_its_part_of_every_block(spec: ShardSpec):
    full = torch.arange(sum(spec.blocks))
    flat = ShardSpec(0, (sum(spec.blocks),), spec.rank, spec.num_shards, spec.blocks)
    expected = torch.cat([block.chunk(spec.num_shards)[spec.rank] for block in full.split(spec.blocks)])
    assert torch.equal(flat.local(full), expected)


@settings(max_examples=30, deadline=None)
@given(specs())
def test_a_piece_is_contiguous_and_does_not_keep_the_full_tensor_alive(spec: ShardSpec):
    full = torch.zeros(spec.full_shape)
    piece = spec.local(full)
    assert piece.is_contiguous()
    assert piece.untyped_storage().data_ptr() != full.untyped_storage().data_ptr()


def test_a_piece_of_a_meta_tensor_is_meta():
    spec = ShardSpec(1, (4, 6), 1, 2, (2, 4))
    assert spec.local(torch.empty(4, 6, device="meta")).shape == (4, 3)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_every_query_head_finds_its_key_head(num_shards: int, served: int, own: int, size: int):
    """Models pair each local key head with the same number of local query heads."""
    queries = num_shards * own * served
    for pairs in {queries // served, own} - {0}:
        if queries % pairs:
            continue
        dealt = key_head_ranges(queries, pairs, size, num_shards)
        spec = ShardSpec(0, (pairs * size,), 0, num_shards, (pairs * size,), uneven_ranges=dealt)
        heads = torch.arange(pairs).repeat_interleave(size)
        local = [spec.local(heads, rank).view(-1, size)[:, 0] for rank in range(num_shards)]
        paired = torch.cat([each.repeat_interleave(queries // num_shards // len(each)) for each in local])
        assert torch.equal(paired, torch.arange(pairs).repeat_interleave(queries // pairs))
        assert torch.equal(spec.assemble([spec.local(heads, rank) for rank in range(num_shards)]), heads)
