"""Operations that do the same to each token of ``[tokens, width]``, whatever the order of the tokens.

A rank's part of ``[batch, sequence, width]`` that is flattened and then gathered has its tokens in another order than in the
unmodified model. Layers and what is computed number by number do not mind, and a reduce-scatter puts the tokens back where they
came from; anything else may mind.
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
    """Whether a node may make something else of tokens in another order; linear layers aside.

    Args:
        node: That is given values in another order.
        module: That it calls, if it calls one.
        reordered: The nodes of such values.
    """
    name = function_name(node)
    if module is not None:
        name = type(module).__name__.lower() if type(module).__module__.startswith("torch.nn.") else ""
    others = [other.meta.get("val") for other in node.all_input_nodes if other not in reordered]
    return name not in _ELEMENTWISE or not all(isinstance(value, torch.Tensor) and value.dim() < 2 for value in others)
