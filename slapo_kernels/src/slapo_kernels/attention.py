"""Self-attention in the place of a model's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .fused import FusedQKV, check_heads
from .linear import check_probability
from .registry import run
from .table import table

_MEANS_NOTHING = ("cache_position", "position_ids", "use_cache")
"""Arguments of Transformers' models that change nothing here."""


class FlashAttention(nn.Module):
    """Multi-head self-attention by the kernel ``attention``, called as Transformers calls its own, with positions in the input.

    Weights are ``query``, ``key`` and ``value``, each an ``nn.Linear``, or ``qkv``, a ``FusedQKV``; and ``out_proj``.

    Args:
        hidden_size: Width of the input and of the output.
        num_attention_heads: They divide the width.
        is_decoder: Each position sees those up to itself, and there are an ``out_proj`` and a dropout behind, as in GPT-2;
            otherwise each sees all, and there is nothing behind, as in BERT.
        attn_pdrop: Dropout of the probabilities.
        resid_pdrop: Of the dropout behind ``out_proj``.
        attn_op_name: Implementation of ``attention``; ``"auto"``: the first that is usable.
        fused_qkv: Whether the three projections are one product.
        bias: Of all projections.
        output_proj: Whether there are an ``out_proj`` and a dropout; default: as ``is_decoder``.

    Raises:
        ValueError: the heads do not divide the width, or ``attn_pdrop`` is no probability.
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
        if attn_op_name != "auto":
            table().get("attention", attn_op_name)
        self.hidden_size, self.num_attention_heads = hidden_size, num_attention_heads
        self.attention_head_size = hidden_size // num_attention_heads
        self.is_decoder, self.attn_pdrop, self.attn_op_name, self.fused_qkv = is_decoder, attn_pdrop, attn_op_name, fused_qkv
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
            attention_mask: ``[batch, length]``, which positions count; or what is added to the scores, or whether each may be
                looked at, broadcast to ``[batch, heads, length, length]``.
            others: What Transformers passes besides.

        Returns:
            ``[batch, length, hidden_size]``, and None for the probabilities, which are never there as a whole.

        Raises:
            ValueError: an argument among the others asks for something that this does not do, the mask is neither of bools nor
                of floats where it is broadcast, or the input has no batch.
        """
        for name, value in others.items():
            if value is not None and value is not False and name not in _MEANS_NOTHING:
                raise ValueError(f"FlashAttention has no {name}; call the model without it, or keep its own attention")
        if isinstance(hidden_states, torch.Tensor) and hidden_states.dim() != 3:
            raise ValueError(f"FlashAttention takes [batch, length, width], not {list(hidden_states.shape)}")
        q, k, v = (each.transpose(1, 2) for each in self._projected(hidden_states))
        mask = None if attention_mask is None else self._mask(attention_mask, q.shape[2])
        out: torch.Tensor = run(
            "attention",
            q,
            k,
            v,
            mask,
            choice=None if self.attn_op_name == "auto" else self.attn_op_name,
            dropout_p=self.attn_pdrop if self.training else 0.0,
            is_causal=self.is_decoder and mask is None,
        )
        out = out.transpose(1, 2).flatten(2)
        return (self.resid_dropout(self.out_proj(out)) if self.output_proj else out), None

    def extra_repr(self) -> str:
        """What the parts do not show."""
        return f"heads={self.num_attention_heads}, is_decoder={self.is_decoder}, attn_pdrop={self.attn_pdrop}"

    def _projected(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Query, key and value: ``[batch, length, heads of this rank, head size]``."""
        if self.fused_qkv:
            return self.qkv(x)  # type: ignore[no-any-return]
        return tuple(each(x).unflatten(-1, (-1, self.attention_head_size)) for each in (self.query, self.key, self.value))

    def _mask(self, mask: torch.Tensor, length: int) -> torch.Tensor:
        """As the kernel takes it, causal too where this is; a mask that is already stays as it is."""
        if mask.dim() == 2:
            mask = mask.bool()[:, None, None, :]
        if not (mask.dtype is torch.bool or mask.is_floating_point()):
            raise ValueError(f"FlashAttention takes a mask of bools or of what is added to the scores, not of {mask.dtype}")
        if not self.is_decoder:
            return mask
        seen = torch.ones(length, mask.shape[-1], dtype=torch.bool, device=mask.device).tril(mask.shape[-1] - length)
        return mask & seen if mask.dtype is torch.bool else mask.masked_fill(~seen, torch.finfo(mask.dtype).min)
