"""Self-attention layers that replace a model's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..dispatch.dispatcher import run
from ..dispatch.registry import implementation_registry
from .fused import FusedQKV, check_heads
from .linear import check_probability

_IGNORED_ARGUMENTS = ("cache_position", "position_ids", "use_cache")
"""Arguments that Transformers' models pass and that have no effect here."""


class FlashAttention(nn.Module):
    """Multi-head self-attention by the kernel ``attention``, with the call of Transformers' modules and no position embedding.

    The children are ``query``, ``key`` and ``value``, each an ``nn.Linear``, or ``qkv``, a ``FusedQKV``; and ``out_proj``.

    Args:
        hidden_size: Width of the input and of the output.
        num_attention_heads: Number of heads; it divides the width.
        is_decoder: True for causal attention with an ``out_proj`` and a dropout after it, as in GPT-2; False for attention to
            all positions with neither, as in BERT.
        attn_pdrop: Dropout probability of the attention weights.
        resid_pdrop: Dropout probability after ``out_proj``.
        attn_op_name: Implementation of ``attention``, or a name that ``FlashAttentionOp`` takes; ``"auto"``: the first usable.
        fused_qkv: Whether the three projections are one matrix product.
        bias: Whether the projections have a bias.
        output_proj: Whether there are an ``out_proj`` and a dropout; default: as ``is_decoder``.

    Raises:
        ValueError: the heads do not divide the width, or ``attn_pdrop`` is not a probability.
        ScheduleError: there is no such implementation.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        is_decoder: bool = False,
        attn_pdrop: float = 0.0,
        resid_pdrop: float = 0.0,
        attn_op_name: str = "auto",
        fused_qkv: bool = False,
        bias: bool = True,
        output_proj: bool | None = None,
    ) -> None:
        super().__init__()
        check_heads(hidden_size, num_attention_heads)
        check_probability("attn_pdrop", attn_pdrop)
        self.hidden_size, self.num_attention_heads = hidden_size, num_attention_heads
        self.attention_head_size = hidden_size // num_attention_heads
        self.is_decoder, self.attn_pdrop, self.attn_op_name, self.fused_qkv = is_decoder, attn_pdrop, attn_op_name, fused_qkv
        self.choice = implementation_named(attn_op_name)
        if fused_qkv:
            self.qkv = FusedQKV(hidden_size, num_attention_heads, bias=bias)
        else:
            self.query, self.key, self.value = (nn.Linear(hidden_size, hidden_size, bias) for _ in range(3))
        self.output_proj = is_decoder if output_proj is None else output_proj
        if self.output_proj:
            self.out_proj = nn.Linear(hidden_size, hidden_size, bias)
            self.resid_dropout = nn.Dropout(resid_pdrop)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **others: Any
    ) -> tuple[torch.Tensor, None]:
        """Attend.

        Args:
            hidden_states: ``[batch, length, hidden_size]``.
            attention_mask: ``[batch, length]``, nonzero for positions to attend to; or a mask that broadcasts to
                ``[batch, heads, length, length]``, additive or bool, True for positions to attend to.
            others: Other arguments that Transformers passes.

        Returns:
            ``[batch, length, hidden_size]``, and None for the attention weights, which are never computed as a whole.

        Raises:
            ValueError: another argument asks for something unsupported; a broadcast mask is neither bool nor floating; or the
                input has no batch dimension.
        """
        for name, value in others.items():
            if value is not None and value is not False and name not in _IGNORED_ARGUMENTS:
                raise ValueError(f"FlashAttention has no {name}; call the model without it, or keep its own attention")
        if isinstance(hidden_states, torch.Tensor) and hidden_states.dim() != 3:
            raise ValueError(f"FlashAttention takes [batch, length, width], not {list(hidden_states.shape)}")
        dropout_p = self.attn_pdrop if self.training else 0.0
        out = _attend(self._project(hidden_states), attention_mask, self.is_decoder, dropout_p, choice=self.choice).flatten(2)
        return (self.resid_dropout(self.out_proj(out)) if self.output_proj else out), None

    def extra_repr(self) -> str:
        """Return heads, causality and dropout, which the children do not show."""
        return f"heads={self.num_attention_heads}, is_decoder={self.is_decoder}, attn_pdrop={self.attn_pdrop}"

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return query, key and value: ``[batch, length, heads of this rank, head size]``."""
        if self.fused_qkv:
            return self.qkv(x)  # type: ignore[no-any-return]
        return tuple(each(x).unflatten(-1, (-1, self.attention_head_size)) for each in (self.query, self.key, self.value))


class FlashAttentionOp(nn.Module):
    """Attention by the kernel ``attention``, without weights, for a model with projections of its own.

    Args:
        attn_op_name: Implementation of ``attention``; ``"auto"``: the first that is usable. Of the established names,
            ``"native_xformers"`` and ``"native_flash_attn"`` are plain operations, ``"cutlass"`` is torch's own kernel, and
            ``"cuda"`` and ``"triton"`` are flash-attention if it is usable, else the next implementation.
        apply_causal_mask: Whether each position attends only to positions up to itself.
        scale: Factor of the scores; default: ``head_size ** -0.5``.

    Raises:
        ScheduleError: there is no such implementation.
    """

    def __init__(self, attn_op_name: str, apply_causal_mask: bool, scale: float | None = None) -> None:
        super().__init__()
        self.attn_op_name, self.choice = attn_op_name, implementation_named(attn_op_name)
        self.apply_causal_mask, self.scale = apply_causal_mask, scale

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: torch.Tensor | None,
        p: float,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query_layer: ``[batch, length, heads, head size]``, and so are ``key_layer`` and ``value_layer``.
            attention_mask: As in ``FlashAttention``, or None.
            p: Dropout probability of the attention weights in training.

        Returns:
            A tensor of the shape of ``query_layer``.

        Raises:
            ValueError: ``p`` is not a probability, or a broadcast mask is neither bool nor floating.
        """
        check_probability("p", p)
        heads, p = (query_layer, key_layer, value_layer), p if self.training else 0.0
        return _attend(heads, attention_mask, self.apply_causal_mask, p, choice=self.choice, scale=self.scale)

    def extra_repr(self) -> str:
        return f"attn_op_name={self.attn_op_name!r}, apply_causal_mask={self.apply_causal_mask}, scale={self.scale}"


_ESTABLISHED_NAMES = {"auto": None, "cuda": None, "triton": None, "cutlass": "native"}
_ESTABLISHED_NAMES |= dict.fromkeys(("native_xformers", "native_flash_attn"), "eager")


def implementation_named(attn_op_name: str) -> str | None:
    """Return the implementation of ``attention`` that a name stands for; None means the first that is usable."""
    if isinstance(attn_op_name, str) and attn_op_name in _ESTABLISHED_NAMES:
        return _ESTABLISHED_NAMES[attn_op_name]
    return implementation_registry().get("attention", attn_op_name).name


def _attend(
    heads: tuple[torch.Tensor, ...], mask: torch.Tensor | None, is_causal: bool, dropout_p: float, **options: Any
) -> torch.Tensor:
    """Return the attention of query, key and value, all ``[batch, length, heads, head size]``, in the same shape."""
    q, k, v = (each.transpose(1, 2) for each in heads)
    mask = None if mask is None else _kernel_mask(mask, q.shape[2], is_causal)
    out: torch.Tensor = run("attention", q, k, v, mask, dropout_p=dropout_p, is_causal=is_causal and mask is None, **options)
    return out.transpose(1, 2)


def _kernel_mask(mask: torch.Tensor, length: int, is_causal: bool) -> torch.Tensor:
    """Return the mask in the kernel's form, combined with a causal one if asked."""
    if mask.dim() == 2:
        mask = mask.bool()[:, None, None, :]
    if not (mask.dtype is torch.bool or mask.is_floating_point()):
        raise ValueError(f"FlashAttention takes a mask of bools or of what is added to the scores, not of {mask.dtype}")
    if not is_causal:
        return mask
    seen = torch.ones(length, mask.shape[-1], dtype=torch.bool, device=mask.device).tril(mask.shape[-1] - length)
    return mask & seen if mask.dtype is torch.bool else mask.masked_fill(~seen, torch.finfo(mask.dtype).min)
