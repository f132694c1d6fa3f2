"""Rules for the stacked experts of Transformers: one tensor for all experts, split along each expert's inner width.

Every rank computes its part of every expert. The output is then partial, and so are the gradients of all inputs: the hidden
states, and the routing weights, which each rank multiplies with its partial outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import nn

from .sharding_rule import AttributeOverride, Cut, ShardingRule, applied_cut, forward_with

_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
_WIDTHS = ("intermediate_dim", "intermediate_size")


def _matcher_of(transposed: bool, packed: bool) -> Callable[[nn.Module], bool]:
    """Return the test for experts of one weight layout; ``packed``: gate before up, not interleaved."""

    def matches(module: nn.Module) -> bool:
        known = vars(module)
        if not all(isinstance(known.get(flag), bool) for flag in _FLAGS) or "down_proj" not in module._parameters:
            return False
        is_packed: bool = known["has_gate"] and known["is_concatenated"]
        return known["is_transposed"] is transposed and is_packed is packed

    return matches


def with_shared_bias(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Forward of experts with an output bias: the first rank adds it, and its gradient is replicated on all ranks."""
    applied = applied_cut(module)
    bias = module._parameters.get("down_proj_bias")
    if applied is None or bias is None or applied.spec.rank == 0:
        return type(module).forward(module, *args, **kwargs)
    return forward_with(module, {"down_proj_bias": bias - bias.detach()}, *args, **kwargs)


def _refuse(module: Any, cut: Cut) -> str | None:
    if unknown := {name for name, _ in module.named_parameters()} - cut.dims.keys() - {"down_proj_bias"}:
        return f"the use of {min(unknown)!r} in the experts is not known; leave them whole"
    if module.has_post_expert_norm:
        return "the norm behind each expert needs its whole output; leave the experts whole"
    if getattr(module, "_is_expert_parallel", False):
        return "the experts themselves are distributed over the ranks; leave them whole"
    width, name = module.down_proj.shape[cut.dims["down_proj"]], "gate_up_proj" if module.has_gate else "up_proj"
    if module.get_parameter(name).shape[cut.dims[name]] != width * (2 if module.has_gate else 1):
        return f"{name!r} and 'down_proj' do not fit together; leave the experts whole"
    return None if _is_local(module, cut, width) else "the experts' gate mixes their inner width; leave them whole"


def _is_local(module: Any, cut: Cut, width: int) -> bool:
    """Return whether the code between the projections computes the same on shards, by a numeric probe."""
    ranks = next((ranks for ranks in range(2, width + 1) if width % ranks == 0), 1)
    local = AttributeOverride(module, {name: vars(module)[name] // ranks for name in _WIDTHS if name in vars(module)})
    between = type(module)._apply_gate if module.has_gate else (lambda of, x: of.act_fn(x))
    size = width * (2 if module.has_gate else 1)
    x = torch.sin(torch.arange(3.0 * size)).view(3, -1, size) * 4
    parts = x.view(3, 1, cut.parts["gate_up_proj"] if module.has_gate else 1, ranks, -1)
    with torch.no_grad():
        whole = between(module, x)
        return all(
            torch.allclose(between(local, parts[..., rank, :].flatten(-2)), piece)
            for rank, piece in enumerate(whole.chunk(ranks, -1))
        )


def _rules() -> Iterator[ShardingRule]:
    for transposed, packed in product((False, True), (True, False)):
        inner, outer = (2, 1) if transposed else (1, 2)
        dims = {"gate_up_proj": inner, "up_proj": inner, "gate_up_proj_bias": 1, "up_proj_bias": 1, "down_proj": outer}
        parts = {"gate_up_proj": 2, "gate_up_proj_bias": 2} if packed else {"gate_up_proj": 1}
        cut = Cut(dims, "replicated", "partial", _WIDTHS, with_shared_bias, fusable=False, parts=parts)
        yield ShardingRule("stack of experts", _matcher_of(transposed, packed), (cut,), _refuse)


def _is_llama4(module: nn.Module) -> bool:
    """Return whether a module is the experts of Llama 4, which have no flags; compared by name."""
    cls = type(module)
    return cls.__name__ == "Llama4TextExperts" and cls.__module__ == "transformers.models.llama4.modeling_llama4"


_LLAMA4 = Cut(
    *({"gate_up_proj": 2, "down_proj": 1}, "replicated", "partial", ("expert_dim", "intermediate_size")),
    fusable=False,
    parts={"gate_up_proj": 2},
)
RULES = (*_rules(), ShardingRule("Llama 4's stack of experts", _is_llama4, (_LLAMA4,)))
