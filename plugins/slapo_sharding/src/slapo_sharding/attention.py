"""Attention modules: a head is never split, fused projections are split block by block, and what counts heads turns local.

Models differ in names only, so an attention module is told by what it has: the size of a head, and projections that make
heads. Transformers' attention views ``(..., -1, head_dim)``, which needs no count; what else it keeps is in the lists here.
"""

from __future__ import annotations

from torch import nn

_HEAD_SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim", "dim_per_head")
_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "num_kv_heads")
_WIDTHS = ("split_size", "embed_dim", "all_head_size", "inner_dim")
_FUSED = ("c_attn", "qkv", "qkv_proj", "query_key_value", "Wqkv", "in_proj", "gate_up_proj")
PROJECTIONS = {
    *_FUSED[:-1],
    *("q_attn", "q_proj", "k_proj", "v_proj", "query", "key", "value", "q", "k", "v", "q_lin", "k_lin", "v_lin"),
}
_HEAD_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")
_LOCAL = "_slapo_local_heads"


def fused_blocks(owner: nn.Module | None, child: str, width: int) -> tuple[int, ...] | None:
    """Sizes of the blocks of a projection called ``child`` inside ``owner``; one block where nothing is fused.

    GPT-2 and its kin split the output of ``c_attn`` by their own ``split_size``, which leaves no doubt.

    Returns:
        None when the name says that it is fused, and nothing says how.
    """
    if child not in _FUSED:
        return (width,)
    size = getattr(owner, "split_size", None)
    if isinstance(size, int) and size > 0 and width % size == 0:
        return (size,) * (width // size)
    return None


def makes_heads(owner: nn.Module | None, child: str) -> bool:
    """Whether ``child`` of ``owner`` is a projection whose output is attention heads."""
    return owner is not None and child in PROJECTIONS and _head_size(owner) is not None


def whole_heads(owner: nn.Module, blocks: tuple[int, ...], num_shards: int) -> str | None:
    """Why heads cannot be dealt out to ``num_shards`` ranks, or None. ``blocks`` are the output widths."""
    size = _head_size(owner)
    assert size is not None
    for width in blocks:
        if width % size or (width // size) % num_shards:
            return f"{width / size:g} attention heads of size {size} cannot be dealt out to {num_shards} ranks"
    if counts_local_heads(owner):
        return None
    known = {**getattr(getattr(owner, "config", None), "__dict__", {}), **owner.__dict__}
    for name in _COUNTS:
        if isinstance(count := known.get(name), int) and count % num_shards:
            return f"{name} of the attention module is {count}, not divisible by {num_shards} ranks"
    return None


def count_local_heads(owner: nn.Module, num_shards: int) -> None:
    """Let the attention module count local heads; once, however many of its projections are sharded."""
    if num_shards == 1 or _LOCAL in owner.__dict__:
        return
    owner.__dict__[_LOCAL] = num_shards
    for name in (*_COUNTS, *_WIDTHS):
        if (value := _integer(owner, name)) is not None:
            setattr(owner, name, value // num_shards)


def norms_heads(owner: nn.Module, child: str) -> bool:
    """Whether ``child`` of ``owner`` normalises single heads: all it has is as long as one, and its name says so."""
    size, module = _head_size(owner), owner._modules.get(child)
    shapes = {tuple(parameter.shape) for parameter in module.parameters()} if module is not None else set()
    return size is not None and child in _HEAD_NORMS and shapes == {(size,)}


def counts_local_heads(owner: nn.Module) -> bool:
    """Whether a shard step made the attention module count local heads."""
    return _LOCAL in owner.__dict__


def _head_size(owner: nn.Module) -> int | None:
    return next((size for name in _HEAD_SIZES if (size := _integer(owner, name))), None)


def _integer(owner: nn.Module, name: str) -> int | None:
    value = owner.__dict__.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
