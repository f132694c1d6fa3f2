"""Attention modules: heads are never split, fused projections are split block by block, and head counts become local.

An attention module is recognised by its attributes: the size or the number of heads, and projections that make heads.
Transformers' attention views ``(..., -1, head_dim)``, which needs no count; the names of its other attributes are listed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import NamedTuple

from torch import nn

from ..communication import shard_ranges
from ..rules.sharding_rule import applied_cut, split_of

_HEAD_SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim", "dim_per_head")
_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "kv_heads")
_GROUPS = ("num_key_value_groups", "n_rep")
_WIDTHS = ("split_size", "embed_dim", "all_head_size", "inner_dim")
_KEY_WIDTHS = ("kv_dim",)
FUSED = ("c_attn", "qkv", "qkv_proj", "query_key_value", "Wqkv", "in_proj", "gate_up_proj")
_QUERIES = ("q_attn", "q_proj", "query", "q", "q_lin")
_KEYS = ("k_proj", "v_proj", "key", "value", "k", "v", "k_lin", "v_lin")
PROJECTIONS = {*FUSED[:-1], *_QUERIES, *_KEYS}
_HEAD_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")
_LOCAL, _SHOWN, _TRACED = "_slapo_local_heads", "_slapo_shown_counts", "_slapo_shown_by_trace"


def fused_blocks(owner: nn.Module | None, child: str, width: int) -> tuple[int, ...] | None:
    """Return the block sizes of a projection called ``child`` inside ``owner``; one block if it is not fused.

    GPT-2 and similar models split the output of ``c_attn`` by their attribute ``split_size``.

    Returns:
        None if the name is that of a fused projection whose blocks are unknown.
    """
    if child not in FUSED:
        return (width,)
    size = getattr(owner, "split_size", None)
    if isinstance(size, int) and size > 0 and width % size == 0:
        return (size,) * (width // size)
    return None


def makes_heads(owner: nn.Module | None, child: str) -> bool:
    """Return whether ``child`` of ``owner`` is a projection whose output is attention heads."""
    return owner is not None and child in PROJECTIONS and _head_size(owner) is not None


class Heads(NamedTuple):
    """Heads of an attention on all ranks together: numbers of query and of key heads, and the size of a head."""

    queries: int
    keys: int
    size: int

    def local(self, num_shards: int) -> Heads:
        """Return the heads of one rank: its query heads, and the key heads that these use, replicated if ranks share them."""
        own = self.queries // num_shards
        return Heads(own, own // gcd(own, self.queries // self.keys), self.size)

    def counts(self) -> dict[str, int]:
        """Return the attributes in which models keep counts of key heads, with their values."""
        widths = dict.fromkeys(_KEY_WIDTHS, self.keys * self.size)
        return {**dict.fromkeys(_KEY_COUNTS, self.keys), **dict.fromkeys(_GROUPS, self.queries // self.keys), **widths}


def head_ranges(
    owner: nn.Module, child: str, blocks: tuple[int, ...], num_shards: int
) -> tuple[shard_ranges.Ranges, ...] | None:
    """Return the ranges of each rank in the output of a projection that makes heads; None for equal parts of every block.

    Raises:
        LookupError: heads would have to be split; its message says why.
    """
    size, heads = _head_size(owner), _heads(owner, child, blocks)
    assert size is not None
    copied = heads if heads is not None and heads.keys % num_shards else None
    dealt = []
    for index, width in enumerate(blocks):
        keys = copied if _is_keys(child, index) else None
        if keys is not None and keys.keys * size == width and keys.queries % num_shards == 0:
            dealt.append(shard_ranges.key_head_ranges(keys.queries, keys.keys, size, num_shards))
        elif keys is None and width % size == 0 and (width // size) % num_shards == 0:
            dealt.append(shard_ranges.block_ranges(width, num_shards))
        else:
            raise LookupError(f"{width / size:g} attention heads of size {size} cannot be dealt out to {num_shards} ranks")
    if not counts_local_heads(owner):
        _check_counts(owner, heads, num_shards)
    return shard_ranges.concatenated_ranges(blocks, dealt) if any(width // size % num_shards for width in blocks) else None


def copied_heads(owner: nn.Module, child: str, blocks: tuple[int, ...], num_shards: int) -> Heads | None:
    """Return the heads of an attention whose key heads ranks have to replicate; None if they need not, or cannot."""
    heads = _heads(owner, child, blocks)
    try:
        head_ranges(owner, child, blocks, num_shards)
    except LookupError:
        return None
    return heads if heads is not None and heads.keys % num_shards else None


def blocks_with_key_heads(child: str, blocks: tuple[int, ...], heads: Heads) -> tuple[int, ...]:
    """Return the blocks of a projection with the key and value widths of ``heads``."""
    width = heads.keys * heads.size
    return tuple(width if _is_keys(child, index) else old for index, old in enumerate(blocks))


def key_counts(owner: nn.Module, heads: Heads, other: Heads) -> dict[str, int]:
    """Return the attributes of an attention that count key heads, with their values for ``other``."""
    counts = other.counts()
    return {name: counts[name] for name, value in heads.counts().items() if _integer(owner, name) == value}


def _is_keys(child: str, block: int) -> bool:
    """Return whether a block of a projection is keys or values."""
    return child in _KEYS or (child in FUSED and block > 0)


def _check_counts(owner: nn.Module, heads: Heads | None, num_shards: int) -> None:
    """Raise ``LookupError`` for counts that are not divisible, or that differ from the projections' if keys are replicated."""
    if heads is not None and heads.keys % num_shards:
        for name, expected in heads.counts().items():
            if (value := _integer(owner, name)) not in (None, expected):
                raise LookupError(f"{name} of the attention module is {value}, but {expected} by its projections")
    known = {**getattr(getattr(owner, "config", None), "__dict__", {}), **owner.__dict__}
    for name in (*_COUNTS, *_KEY_COUNTS):
        copied = heads is not None and name in _KEY_COUNTS and known.get(name) == heads.keys
        if isinstance(count := known.get(name), int) and count % num_shards and not copied:
            raise LookupError(f"{name} of the attention module is {count}, not divisible by {num_shards} ranks")


def _heads(owner: nn.Module, child: str, blocks: tuple[int, ...]) -> Heads | None:
    """Return the heads by the widths of the projections, or None."""
    size = _head_size(owner)
    widths: list[int | None] = []
    if child not in FUSED:
        first = [next((name for name in names if name in owner._modules), "") for names in (_QUERIES, _KEYS)]
        widths = [_width(owner._modules.get(name)) for name in first]
    elif len(blocks) == 3 and blocks[1] == blocks[2]:
        widths = [*blocks[:2]]
    match widths:
        case [int(queries), int(keys)] if size and not (queries % keys or keys % size):
            return Heads(queries // size, keys // size, size)
    return None


def _width(projection: nn.Module | None) -> int | None:
    """Return the width of a projection's output on all ranks together, or None."""
    applied = applied_cut(projection) if projection is not None else None
    if applied is not None and applied.cut.output == "sharded":
        return applied.spec.full_shape[applied.spec.dim]
    return next((width for name in ("out_features", "nf") if isinstance(width := getattr(projection, name, None), int)), None)


def count_local_heads(owner: nn.Module, child: str, blocks: tuple[int, ...], num_shards: int) -> None:
    """Let the attention module count local heads; the second and later projections change nothing."""
    if num_shards == 1 or _LOCAL in owner.__dict__:
        return
    heads = _heads(owner, child, blocks)
    whole, local = (heads.counts(), heads.local(num_shards).counts()) if heads is not None else ({}, {})
    owner.__dict__[_LOCAL] = num_shards
    for name in (*_COUNTS, *_KEY_COUNTS, *_WIDTHS, *_KEY_WIDTHS, *_GROUPS):
        value = _integer(owner, name)
        if value is not None and value == whole.get(name):
            setattr(owner, name, local[name])
        elif value is not None and name not in _GROUPS:
            setattr(owner, name, value // num_shards)


def norms_heads(owner: nn.Module, child: str) -> bool:
    """Return whether ``child`` of ``owner`` is a norm of single heads, by its name and the shape of its parameters."""
    size, module = _head_size(owner), owner._modules.get(child)
    shapes = {tuple(parameter.shape) for parameter in module.parameters()} if module is not None else set()
    return size is not None and child in _HEAD_NORMS and shapes == {(size,)}


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is an attention, by the name of its class or a child that makes heads."""
    return "attention" in type(module).__name__.lower() or any(makes_heads(module, child) for child in module._modules)


def replicated_attentions(root: nn.Module) -> Iterator[str]:
    """Yield the paths of the innermost attention modules that are entirely replicated."""
    for path, module in root.named_modules():
        if is_attention(module) and any(parameter.dim() > 1 for parameter in module.parameters()):
            inner, *others = module.modules()
            if not any(map(split_of, (inner, *others))) and not any(map(is_attention, others)):
                yield path


def counts_local_heads(owner: nn.Module) -> bool:
    """Return whether a shard step made the attention module count local heads."""
    return _LOCAL in owner.__dict__


def mark_counts_verified(module: nn.Module) -> None:
    """Record that a trace verified the local counts of this module and all modules inside."""
    for part in module.modules():
        part.__dict__[_TRACED] = True
        if part._modules:
            part.__dict__[_SHOWN] = True


def counts_verified(module: nn.Module) -> bool:
    """Return whether a trace of this rank's model has verified the uses of the module's output."""
    return _TRACED in module.__dict__


def counts_locally(module: nn.Module) -> bool:
    """Return whether a step made the module count this rank's shard."""
    return _SHOWN in module.__dict__ or counts_local_heads(module)


def _head_size(owner: nn.Module) -> int | None:
    return next((size for name in _HEAD_SIZES if (size := _integer(owner, name))), None) or _counted_size(owner)


def _counted_size(owner: nn.Module) -> int | None:
    """Return the head size as query width by head count, if no attribute has it and the key and value widths fit."""
    count = next((count for name in _COUNTS if (count := _integer(owner, name))), 0) * owner.__dict__.get(_LOCAL, 1)
    widths = [_width(owner._modules[name]) for names in (_QUERIES, _KEYS) for name in names if name in owner._modules]
    if count <= 0 or len(widths) != 3 or widths[1] != widths[2] or not all(widths):
        return None
    size, rest = divmod(int(widths[0] or 0), count)
    return None if rest or int(widths[1] or 0) % size else size


def _integer(owner: nn.Module, name: str) -> int | None:
    value = owner.__dict__.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
