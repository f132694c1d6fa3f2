"""Rule for ``nn.MultiheadAttention``: the heads are sharded, and the output is partial.

Attributes such as ``num_heads`` keep their values, because code around the module makes masks for all heads from them. The
forward uses the sizes of the parameters instead. Attention weights are returned for all heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..communication import collectives
from ..communication._torch_private import nested_without_padding
from .sharding_rule import AppliedCut, Cut, ShardingRule, applied_cut, computes_as


def with_local_heads(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Forward of this rank's heads: return a partial output, and the attention weights of all heads."""
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    if query.is_nested:
        return _forward_of_nested(module, query, need_weights, average_attn_weights)
    batched, swapped = query.dim() == 3, query.dim() == 3 and not module.batch_first
    given = [x if batched else x.unsqueeze(0) for x in _batch_first((query, key, value), swapped)]
    made = _with_extra_keys(module, *_project_inputs(module, *given))
    heads = [x.reshape(*x.shape[:-1], -1, module.head_dim).transpose(1, 2) for x in made]
    causal = is_causal and key_padding_mask is None and not need_weights
    mask = None if causal else _mask(module, heads, key_padding_mask, attn_mask)
    mixed, weights = _attend(module, heads, mask, causal, need_weights)
    bias = module.out_proj.bias
    bias = None if bias is None else collectives.on_first_rank(bias, _cut_of(module).spec.group)
    output = F.linear(mixed.transpose(1, 2).flatten(2), module.out_proj.weight, bias)
    if weights is not None:
        weights = _weights_of_all_heads(module, weights, average_attn_weights)
        weights = weights if batched else weights.squeeze(0)
    return (output.transpose(0, 1) if swapped else output if batched else output.squeeze(0)), weights


def _batch_first(values: tuple[torch.Tensor, ...], swapped: bool) -> tuple[torch.Tensor, ...]:
    """Put the batch first; the same tensor stays the same."""
    if not swapped:
        return values
    made = {id(x): x.transpose(0, 1) for x in values}
    return tuple(made[id(x)] for x in values)


def _project_inputs(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    packed, bias = module.in_proj_weight, module.in_proj_bias
    if packed is not None and query is key and key is value:
        return F.linear(query, packed, bias).chunk(3, -1)
    separate = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    weights = separate if packed is None else packed.chunk(3)
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    return tuple(map(F.linear, (query, key, value), weights, biases))


def _with_extra_keys(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Append the learned key and the zero key, if the module has them."""
    rows = len(key)
    if module.bias_k is not None:
        key = torch.cat([key, module.bias_k.expand(rows, -1, -1)], 1)
        value = torch.cat([value, module.bias_v.expand(rows, -1, -1)], 1)
    if module.add_zero_attn:
        key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
    return query, key, value


def _mask(
    module: Any, heads: list[torch.Tensor], padding: torch.Tensor | None, given: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the sum of both masks, for the heads of this rank: ``[batch or 1, heads or 1, queries or 1, keys]``."""
    query, key, _ = heads
    total: torch.Tensor | None = None
    if given is not None:
        total = _additive_mask_of(given, query.dtype)
        if total.dim() == 3:
            total = total.reshape(-1, module.num_heads, *total.shape[1:])[:, _own_heads(module, query.shape[1])]
        else:
            total = total[None, None]
    if padding is not None:
        added = _additive_mask_of(padding, query.dtype).view(len(query), 1, 1, -1)
        total = added if total is None else total + added
    return total if total is None else F.pad(total, (0, key.shape[2] - total.shape[-1]))


def _additive_mask_of(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask in the form that is added to scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def _attend(
    module: Any, heads: list[torch.Tensor], mask: torch.Tensor | None, causal: bool, need_weights: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    query, key, value = heads
    rate = module.dropout if module.training else 0.0
    if not need_weights:
        return F.scaled_dot_product_attention(query, key, value, mask, rate, causal), None
    scores = (query * module.head_dim**-0.5) @ key.transpose(-2, -1)
    weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), rate, module.training)
    return weights @ value, weights


def _cut_of(module: nn.Module) -> AppliedCut:
    applied = applied_cut(module)
    assert applied is not None
    return applied


def _own_heads(module: nn.Module, number: int) -> slice:
    start = _cut_of(module).spec.rank * number
    return slice(start, start + number)


def _weights_of_all_heads(module: Any, weights: torch.Tensor, average: bool) -> torch.Tensor:
    spec = _cut_of(module).spec
    if average:
        return collectives.all_reduce(weights.sum(1) / module.num_heads, spec.group)
    own = _own_heads(module, weights.shape[1])
    padded = F.pad(weights, (0, 0, 0, 0, own.start, module.num_heads - own.stop))
    return collectives.all_reduce(padded, spec.group)


def _forward_of_nested(
    module: Any, x: torch.Tensor, need_weights: bool, average: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Forward of a nested tensor; torch's encoders make one of padded inputs in evaluation."""
    lengths = torch.tensor([len(row) for row in x.unbind()], device=x.device)
    padded = x.to_padded_tensor(0.0)
    padding = torch.arange(padded.shape[1], device=x.device) >= lengths[:, None]
    output, weights = with_local_heads(module, padded, padded, padded, padding, need_weights, None, average)
    return nested_without_padding(output, padding), weights


_DIMS = {
    **dict.fromkeys(("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"), 0),
    "bias_k": 2,
    "bias_v": 2,
    "out_proj.weight": 1,
}
_PARTS = {"in_proj_weight": 3, "in_proj_bias": 3}
_CUT = Cut(
    *(_DIMS, "replicated", "partial"), forward=with_local_heads, fusable=False, parts=_PARTS, divided=("num_heads",), draws=True
)
RULES = [ShardingRule("MultiheadAttention", lambda module: computes_as(module, nn.MultiheadAttention), (_CUT,))]
