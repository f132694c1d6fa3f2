"""Choice of the attention in Transformers' models by name, through their own interface and with their own masks.

A choice keeps the model's results for queries whose mask hides every key: padding on the left, and padding farther from all
tokens than a window. Transformers' ``sdpa`` returns zeros for them. Its eager attention adds the smallest number to all their
scores, and so returns the mean of all values.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from slapo_core import ScheduleError

from .implementations._torch_private import is_dry_run, is_traced_or_compiled

NAMES = {"native": "sdpa", "flash": "flash_attention_2", "flex": "flex_attention", "eager": "eager"}
"""Name of an implementation to Transformers' name of it."""
_SUPPORT = {"sdpa": "_supports_sdpa", "flash_attention_2": "_supports_flash_attn", "flex_attention": "_supports_flex_attn"}


def transformers_models(root: nn.Module) -> dict[str, Any]:
    """Return the outermost Transformers' models from ``root`` down whose attention can be chosen, by path."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return {}
    found: dict[str, Any] = {}
    for path, module in root.named_modules():
        outer = any(not other or path == other or path.startswith(f"{other}.") for other in found)
        if isinstance(module, library.PreTrainedModel) and not outer:
            found[path] = module
    return {path: model for path, model in found.items() if model._can_set_attn_implementation()}


def refusal(model: Any, name: str) -> str | None:
    """Return the reason why a model cannot use Transformers' attention ``name``, or None."""
    kind = type(model).__name__
    for config in configs(model):
        if name not in ("eager", "flex_attention") and getattr(config, "attn_logit_softcapping", None) is not None:
            return f"a {kind} caps its attention logits, which {name!r} does not"
        if name != "eager" and getattr(config, "output_attentions", False):
            return f"the {kind} is asked for attention weights, which {name!r} does not give"
    lacking = [type(each).__name__ for each in _parts(model) if name in _SUPPORT and not getattr(each, _SUPPORT[name], False)]
    return f"a {lacking[0]} does not support {name!r}" if lacking else None


def attention_names(model: Any) -> set[str]:
    """Return Transformers' names of the attention that the model and the models inside it use now."""
    return {transformers_name(str(config._attn_implementation)) for config in configs(model)}


def set_attention(model: Any, names: Sequence[str]) -> Callable[[], None]:
    """Set a model's attention to the first of these names that Transformers accepts; return a function that restores it.

    Raises:
        ScheduleError: Transformers accepts none of them.
    """
    before = [(config, config._attn_implementation) for config in configs(model)]
    for name in names:
        try:
            model.set_attn_implementation(name)
            keep_fully_masked_results(model, before)
            return partial(_put_back, before)
        except (ImportError, ValueError) as err:
            _put_back(before)
            reason = err
    what = f"{type(model).__name__} cannot attend by {names[-1]!r}: {reason}"
    raise ScheduleError(what, primitive="use_kernels") from reason


def configs(model: Any) -> list[Any]:
    """Return the configs of a model and of the models inside it, with their sub-configs."""
    todo: list[Any] = [part.config for part in _parts(model)]
    found: dict[int, Any] = {}
    for config in todo:
        if config is not None and id(config) not in found:
            found[id(config)] = config
            todo += [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return list(found.values())


def _parts(model: nn.Module) -> list[Any]:
    library: Any = sys.modules["transformers.modeling_utils"]
    return [module for module in model.modules() if isinstance(module, library.PreTrainedModel)]


def _put_back(before: list[tuple[Any, str | None]]) -> None:
    for config, name in before:
        config._attn_implementation_internal = name


_EAGER_WITH_ZEROS, _SDPA_WITH_MEANS = "slapo_eager", "slapo_sdpa"
"""Names of an eager attention that returns zeros, and of an ``sdpa`` that returns means."""
_TRANSFORMERS_NAMES = {_EAGER_WITH_ZEROS: "eager", _SDPA_WITH_MEANS: "sdpa"}
_FULLY_MASKED_RESULTS = {"eager": "means", "sdpa": "zeros", _EAGER_WITH_ZEROS: "zeros", _SDPA_WITH_MEANS: "means"}
_EAGER = "eager_attention_forward"
_eager: dict[type, Callable[..., Any]] = {}
"""Class of an attention to the eager attention of its model."""


def transformers_name(name: str) -> str:
    """Return Transformers' name of an attention."""
    return _TRANSFORMERS_NAMES.get(name, name)


def keep_fully_masked_results(model: nn.Module, before: Iterable[tuple[Any, str | None]]) -> None:
    """Keep the results of fully masked queries after a change of the model's attention from the names in ``before``.

    Models that compare the name of their attention, or have several eager attention functions in one class, do not change.
    """
    ours: dict[str, str] = {"eager": _EAGER_WITH_ZEROS, "sdpa": _SDPA_WITH_MEANS}
    told = []
    for config, name in before:
        now = config._attn_implementation
        gave, give = _FULLY_MASKED_RESULTS.get(str(name)), _FULLY_MASKED_RESULTS.get(str(now))
        if gave and give and gave != give:
            told.append((config, now))
    if told and _can_be_renamed(model):
        _register()
        for config, now in told:
            config._attn_implementation_internal = ours[now]


def _can_be_renamed(model: nn.Module) -> bool:
    library = sys.modules["transformers.modeling_utils"].PreTrainedModel.__mro__
    classes = {cls for module in model.modules() for cls in type(module).__mro__ if cls not in library}
    methods = [(cls, inspect.unwrap(each)) for cls in classes for each in vars(cls).values() if inspect.isfunction(each)]
    for cls, method in methods:
        code, known = method.__code__, method.__globals__
        if "_attn_implementation" in code.co_names and any(
            each == "sdpa" or (isinstance(each, (tuple, frozenset)) and "sdpa" in each) for each in code.co_consts
        ):
            return False
        if method.__name__ == "forward" and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
            functions = [known[name] for name in code.co_names if name.endswith(_EAGER) and name in known]
            if len(functions) != 1:
                return False
            _eager[cls] = functions[0]
    return True


def _register() -> None:
    masks, models = sys.modules["transformers.masking_utils"], sys.modules["transformers.modeling_utils"]
    models.AttentionInterface.register(_EAGER_WITH_ZEROS, _eager_with_zeros)
    models.AttentionInterface.register(_SDPA_WITH_MEANS, _sdpa_with_means)
    masks.AttentionMaskInterface.register(_EAGER_WITH_ZEROS, _bool_mask)
    masks.AttentionMaskInterface.register(_SDPA_WITH_MEANS, _bool_or_additive_mask)


def _bool_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Return the bool mask; never None for causality alone, as eager attention is causal by its mask only."""
    kwargs["allow_is_causal_skip"] = False
    mask: torch.Tensor | None = sys.modules["transformers.masking_utils"].sdpa_mask(*args, **kwargs)
    return mask


def _bool_or_additive_mask(*args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> torch.Tensor | None:
    """Return an additive mask if some query is fully masked or the mask cannot be read, else a bool one; synchronises."""
    mask: torch.Tensor | None = sys.modules["transformers.masking_utils"].sdpa_mask(*args, dtype=dtype, **kwargs)
    if mask is None or not (is_traced_or_compiled() or is_dry_run(mask)) and mask.any(-1).all():
        return mask
    return _additive_mask(mask, dtype)


def _eager_with_zeros(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's eager attention with zeros for fully masked queries; with a position bias ``sdpa`` has means, too."""
    if mask is None or mask.dtype is not torch.bool:
        return _model_eager(module, query, key, value, mask, **kwargs)
    out, weights = _model_eager(module, query, key, value, _additive_mask(mask, query.dtype), **kwargs)
    if kwargs.get("position_bias") is not None:
        return out, weights
    unseen = ~mask.any(-1, keepdim=True)
    return out.masked_fill(unseen.transpose(1, 2), 0.0), weights.masked_fill(unseen, 0.0)


def _sdpa_with_means(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``sdpa`` for a bool mask, and the model's eager attention for an additive one: no kernel has right gradients there."""
    if mask is not None and mask.dtype is not torch.bool:
        return _model_eager(module, query, key, value, mask, **kwargs)
    sdpa: Callable[..., tuple[torch.Tensor, None]] = sys.modules["transformers.modeling_utils"].sdpa_attention_forward
    return sdpa(module, query, key, value, mask, **kwargs)


def _model_eager(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    eager = next(_eager[cls] for cls in type(module).__mro__ if cls in _eager)
    found: tuple[torch.Tensor, torch.Tensor] = eager(module, *args, **kwargs)
    return found


def _additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.where(mask, torch.zeros((), device=mask.device, dtype=dtype), torch.finfo(dtype).min)
