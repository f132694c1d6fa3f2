"""Attention in models of Transformers, which let it be chosen by name: their own interface, with their own masks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from slapo_core import ScheduleError

from .fully_masked_queries import keep, plain

NAMES = {"native": "sdpa", "flash": "flash_attention_2", "flex": "flex_attention", "eager": "eager"}
"""Implementation to what Transformers calls it."""
_SUPPORT = {"sdpa": "_supports_sdpa", "flash_attention_2": "_supports_flash_attn", "flex_attention": "_supports_flex_attn"}


def models(root: nn.Module) -> dict[str, Any]:
    """The models of Transformers from ``root`` down that are in no other one, and can be told how to attend, by path."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return {}
    found: dict[str, Any] = {}
    for path, module in root.named_modules():
        if isinstance(module, library.PreTrainedModel) and not any(_is_inside(path, other) for other in found):
            found[path] = module
    return {path: model for path, model in found.items() if model._can_set_attn_implementation()}


def refusal(model: Any, name: str) -> str | None:
    """Why a model cannot attend by what Transformers calls ``name``; None where it can."""
    kind = type(model).__name__
    for config in configs(model):
        if name not in ("eager", "flex_attention") and getattr(config, "attn_logit_softcapping", None) is not None:
            return f"a {kind} caps its attention logits, which {name!r} does not"
        if name != "eager" and getattr(config, "output_attentions", False):
            return f"the {kind} is asked for attention weights, which {name!r} does not give"
    lacking = [type(each).__name__ for each in _parts(model) if name in _SUPPORT and not getattr(each, _SUPPORT[name], False)]
    return f"a {lacking[0]} does not support {name!r}" if lacking else None


def current(model: Any) -> set[str]:
    """How the model and those inside it attend now."""
    return {plain(str(config._attn_implementation)) for config in configs(model)}


def tell(model: Any, names: Sequence[str]) -> Callable[[], None]:
    """Let a model attend by the first of these that Transformers accepts here; returns what puts back what it did.

    Raises:
        ScheduleError: it accepts none.
    """
    before = [(config, config._attn_implementation) for config in configs(model)]
    for name in names:
        try:
            model.set_attn_implementation(name)
            keep(model, before)
            return partial(_put_back, before)
        except (ImportError, ValueError) as err:
            _put_back(before)
            reason = err
    what = f"{type(model).__name__} cannot attend by {names[-1]!r}: {reason}"
    raise ScheduleError(what, primitive="use_kernels") from reason


def configs(model: Any) -> list[Any]:
    """The configurations of a model, of those inside it and of what these are made of."""
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


def _is_inside(path: str, other: str) -> bool:
    return not other or path == other or path.startswith(f"{other}.")


def _put_back(before: list[tuple[Any, str | None]]) -> None:
    for config, name in before:
        config._attn_implementation_internal = name
