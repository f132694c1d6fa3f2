"""Operations on ``[tokens, width]`` whose result for a token does not depend on the order of tokens.

A local shard of ``[batch, sequence, width]`` that is flattened and then gathered has its tokens in another order than in the
unmodified model. Linear layers and elementwise operations are unaffected, and a reduce-scatter restores the order. Any other
operation may depend on it.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx, nn

from slapo_tracing.nodes import function_name

_ELEMENTWISE = frozenset(
    "add sub mul div truediv neg pow sqrt rsqrt exp tanh sigmoid erf relu gelu silu leakyrelu leaky_relu elu softplus dropout "
    "clamp identity contiguous to float half bfloat16 type_as".split()
)


def depends_on_token_order(node: fx.Node, module: nn.Module | None, reordered: Collection[fx.Node]) -> bool:
    """Return whether a node may depend on the order of its ``reordered`` tokens. Linear layers are not asked about."""
    name = function_name(node)
    if module is not None:
        name = type(module).__name__.lower() if type(module).__module__.startswith("torch.nn.") else ""
    others = [other.meta.get("val") for other in node.all_input_nodes if other not in reordered]
    return name not in _ELEMENTWISE or not all(isinstance(value, torch.Tensor) and value.dim() < 2 for value in others)
