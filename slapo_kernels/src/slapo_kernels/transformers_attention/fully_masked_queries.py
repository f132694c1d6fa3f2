"""Attention of Transformers under names of our own, for queries that may look at nothing: they get what they got before.

Such are padding on the left, and padding farther from all tokens than a window. Transformers' ``sdpa`` gives them zeros; its
eager attention adds the least number there is to all their scores, and so gives them the mean of all values.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from ..implementations._torch_private import is_dry_run, is_watched

_ZEROS, _MEANS = "slapo_eager", "slapo_sdpa"
"""The eager attention that gives zeros, and the ``sdpa`` that gives means."""
_PLAIN = {_ZEROS: "eager", _MEANS: "sdpa"}
_GIVES = {"eager": "means", "sdpa": "zeros", _ZEROS: "zeros", _MEANS: "means"}
_EAGER = "eager_attention_forward"
_eager: dict[type, Callable[..., Any]] = {}
"""Class of an attention to the eager attention of its model."""


def plain(name: str) -> str:
    """What Transformers calls it."""
    return _PLAIN.get(name, name)


def keep(model: nn.Module, before: Iterable[tuple[Any, str | None]]) -> None:
    """Let queries that may look at nothing get what they got before the model was told to attend otherwise.

    Models that go by the names of their attention, or have eager attention of several kinds in one, are left as they are.

    Args:
        model: Of Transformers.
        before: Its configurations, and how each attended.
    """
    ours: dict[str, str] = {"eager": _ZEROS, "sdpa": _MEANS}
    told = [(config, now) for config, name in before if _differ(name, now := config._attn_implementation)]
    if told and _can_be_renamed(model):
        _register()
        for config, now in told:
            config._attn_implementation_internal = ours[now]


def _differ(before: str | None, now: str | None) -> bool:
    gave, give = _GIVES.get(str(before)), _GIVES.get(str(now))
    return gave is not None and give is not None and gave != give


def _can_be_renamed(model: nn.Module) -> bool:
    library = sys.modules["transformers.modeling_utils"].PreTrainedModel.__mro__
    classes = {cls for module in model.modules() for cls in type(module).__mro__ if cls not in library}
    methods = [(cls, inspect.unwrap(each)) for cls in classes for each in vars(cls).values() if inspect.isfunction(each)]
    for cls, method in methods:
        code, known = method.__code__, method.__globals__
        if "_attn_implementation" in code.co_names and any("sdpa" in _words(each) for each in code.co_consts):
            return False
        if method.__name__ == "forward" and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
            functions = [known[name] for name in code.co_names if name.endswith(_EAGER) and name in known]
            if len(functions) != 1:
                return False
            _eager[cls] = functions[0]
    return True


def _words(constant: object) -> Collection[object]:
    return constant if isinstance(constant, (tuple, frozenset)) else (constant,)


def _register() -> None:
    masks, models = sys.modules["transformers.masking_utils"], sys.modules["transformers.modeling_utils"]
    models.AttentionInterface.register(_ZEROS, _zeros)
    models.AttentionInterface.register(_MEANS, _means)
    masks.AttentionMaskInterface.register(_ZEROS, _bools)
    masks.AttentionMaskInterface.register(_MEANS, _bools_or_added)


def _bools(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Whether each key may be looked at; eager attention knows nothing of causality without a mask."""
    kwargs["allow_is_causal_skip"] = False
    mask: torch.Tensor | None = sys.modules["transformers.masking_utils"].sdpa_mask(*args, **kwargs)
    return mask


def _bools_or_added(*args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> torch.Tensor | None:
    """Added to the scores where a query may look at nothing, or while nobody knows; waits for a GPU."""
    mask: torch.Tensor | None = sys.modules["transformers.masking_utils"].sdpa_mask(*args, dtype=dtype, **kwargs)
    if mask is None or not (is_watched() or is_dry_run(mask)) and mask.any(-1).all():
        return mask
    return _added(mask, dtype)


def _zeros(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's own eager attention; with a position bias, queries that see nothing get means from ``sdpa`` too."""
    if mask is None or mask.dtype is not torch.bool:
        return _own(module, query, key, value, mask, **kwargs)
    out, weights = _own(module, query, key, value, _added(mask, query.dtype), **kwargs)
    if kwargs.get("position_bias") is not None:
        return out, weights
    unseen = ~mask.any(-1, keepdim=True)
    return out.masked_fill(unseen.transpose(1, 2), 0.0), weights.masked_fill(unseen, 0.0)


def _means(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``sdpa``, but for a mask that is added: no kernel makes means with their gradients of it."""
    if mask is not None and mask.dtype is not torch.bool:
        return _own(module, query, key, value, mask, **kwargs)
    found: tuple[torch.Tensor, None] = sys.modules["transformers.modeling_utils"].sdpa_attention_forward(
        module, query, key, value, mask, **kwargs
    )
    return found


def _own(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    eager = next(_eager[cls] for cls in type(module).__mro__ if cls in _eager)
    found: tuple[torch.Tensor, torch.Tensor] = eager(module, *args, **kwargs)
    return found


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.where(mask, torch.zeros((), device=mask.device, dtype=dtype), torch.finfo(dtype).min)
