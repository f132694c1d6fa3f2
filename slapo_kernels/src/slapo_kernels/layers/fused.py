"""Fused layers: an MLP, and the projections of query, key and value as one product."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from slapo_core import is_sharded, parameter_facts

from ..dispatch.dispatcher import run
from .linear import activation_named, check_probability


class FusedMLP(nn.Module):
    """``dropout(fc_out(activation(fc_in(x))))``, with the activation by the kernel ``bias_act``.

    The weights are ``fc_in.weight``, ``fc_in.bias``, ``fc_out.weight`` and ``fc_out.bias``. Both layers are ``nn.Linear`` and
    are called with their bias, which is free in the product, so they can be sharded, synced and hooked.

    Args:
        hidden_size: Width of the input and of the output.
        intermediate_size: Width between the layers.
        orig_act: The activation, by the names of ``LinearWithAct``.
        resid_pdrop: Dropout probability at the end.
        use_torchscript: No effect; accepted for scripts that choose a compiler. The dispatcher chooses the implementation of
            ``bias_act``, and ``SLAPO_KERNELS=bias_act=...`` forces one.

    Raises:
        ValueError: there is no such activation, ``resid_pdrop`` is not a probability, or ``use_torchscript`` is not a bool.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, orig_act: str, resid_pdrop: float = 0.0, use_torchscript: bool = False
    ) -> None:
        super().__init__()
        check_probability("resid_pdrop", resid_pdrop)
        if not isinstance(use_torchscript, bool):
            raise ValueError(f"use_torchscript is {use_torchscript!r}; give a bool, or choose by SLAPO_KERNELS=bias_act=...")
        self.orig_act, self.activation = orig_act, activation_named(orig_act)
        self.fc_in = nn.Linear(hidden_size, intermediate_size)
        self.fc_out = nn.Linear(intermediate_size, hidden_size)
        self.dropout = nn.Dropout(resid_pdrop)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map ``[..., hidden_size]`` to the same shape."""
        between = run("bias_act", self.fc_in(hidden_states), None, activation=self.activation)
        out: torch.Tensor = self.dropout(self.fc_out(between))
        return out

    def extra_repr(self) -> str:
        return f"orig_act={self.orig_act!r}"


def check_heads(hidden_size: int, num_heads: int) -> None:
    """Raise ``ValueError`` unless the heads divide the width."""
    if num_heads < 1 or hidden_size < 1 or hidden_size % num_heads:
        raise ValueError(f"a width of {hidden_size} is not divisible by {num_heads} heads")


class FusedQKV(nn.Module):
    """Projections of query, key and value as one matrix product.

    The rows of ``fused_linear.weight`` are ``[num_heads, 3, head size]``, so a shard of them, as from
    ``sch["fused_linear"].shard(["weight", "bias"], axis=0)``, has complete heads, and the forward returns these.

    Args:
        hidden_size: Width of the input, and of each projection.
        num_heads: Number of heads; it divides the width.
        world_size: Number of ranks that will share the heads; used for a check only.
        bias: Whether the projections have a bias.

    Raises:
        ValueError: the heads do not divide the width, or cannot be split over the ranks.
    """

    def __init__(self, hidden_size: int, num_heads: int, world_size: int = 1, bias: bool = True) -> None:
        super().__init__()
        check_heads(hidden_size, num_heads)
        if world_size < 1 or num_heads % world_size:
            raise ValueError(f"{num_heads} heads cannot be split over {world_size} ranks")
        self.hidden_size, self.num_heads, self.head_size = hidden_size, num_heads, hidden_size // num_heads
        self.fused_linear = nn.Linear(hidden_size, 3 * hidden_size, bias)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Map ``[..., hidden_size]`` to query, key and value of ``[..., heads of this rank, head size]``."""
        fused = self.fused_linear(hidden_states).unflatten(-1, (-1, 3, self.head_size))
        query, key, value = fused.unbind(-2)
        return query, key, value

    @classmethod
    def from_separate(cls, query: nn.Linear, key: nn.Linear, value: nn.Linear, num_heads: int) -> FusedQKV:
        """Make a ``FusedQKV`` with copies of the weights of three layers.

        Raises:
            ValueError: the layers differ in width or have other widths than their input, or only some have a bias.
        """
        for each in (query, key, value):
            if not isinstance(each, nn.Linear):
                raise ValueError(f"FusedQKV takes layers of nn.Linear, not {each!r}")
        size = query.in_features
        for each in (query, key, value):
            if (each.in_features, each.out_features) != (size, size):
                raise ValueError(
                    f"FusedQKV takes layers from {size} to {size}, not from {each.in_features} to {each.out_features}"
                )
            if (each.bias is None) != (query.bias is None):
                raise ValueError("FusedQKV takes layers that all have a bias, or none")
        weight = query.weight
        fused = cls(size, num_heads, bias=query.bias is not None).to(weight.device, weight.dtype)
        with torch.no_grad():
            for name, parameter in fused.fused_linear.named_parameters():
                parts = [getattr(each, name) for each in (query, key, value)]
                parameter.copy_(torch.stack([part.unflatten(0, (num_heads, -1)) for part in parts], dim=1).flatten(0, 2))
                _record_origin(parameter, [(part, head) for head in range(num_heads) for part in parts], size // num_heads)
                parameter.requires_grad_(getattr(query, name).requires_grad)
        return fused.train(query.training)

    def to_separate(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        """Return query, key and value as separate layers, with copies of the weights."""
        fused = self.fused_linear
        layers = [
            nn.Linear(fused.in_features, self.hidden_size, fused.bias is not None, fused.weight.device, fused.weight.dtype)
            for _ in range(3)
        ]
        with torch.no_grad():
            for name, parameter in fused.named_parameters():
                parts = parameter.view(self.num_heads, 3, -1, *parameter.shape[1:]).unbind(1)
                for place, (layer, part) in enumerate(zip(layers, parts, strict=True)):
                    getattr(layer, name).copy_(part.flatten(0, 1))
                    own = [(parameter, 3 * head + place) for head in range(self.num_heads)]
                    _record_origin(getattr(layer, name), own, self.head_size)
                    getattr(layer, name).requires_grad_(parameter.requires_grad)
        query, key, value = (layer.train(self.training) for layer in layers)
        return query, key, value


def _record_origin(parameter: torch.Tensor, parts: Iterable[tuple[torch.Tensor, int]], size: int) -> None:
    """Record the ranges of ``size`` rows that a new parameter consists of, as ``slapo_weights.made_of`` does.

    Each of the parts is a source parameter and the index of its range of rows.
    """
    held = list(parts)
    if all(parameter_facts(part).names and not is_sharded(part) for part, _ in held):
        parameter_facts(parameter)  # makes the facts now, so that a copy of the parameter has them
        rows = tuple((parameter_facts(part).names[0], (number * size, (number + 1) * size), len(part)) for part, number in held)
        setattr(parameter, "slapo_made_of", (0, rows))  # noqa: B010  tensors have no such attribute for mypy
