"""Choice of the attention in Transformers' models by name, through their own interface and with their own masks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from slapo_core import ScheduleError

from .fully_masked_queries import keep_fully_masked_results, transformers_name

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
