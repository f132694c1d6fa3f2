"""What the tensors of files are in the model: as they are called there, or as Transformers reads them for the model's class."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from copy import deepcopy
from typing import Any, NamedTuple

from slapo_core import BuildError

from ..safetensors_files.reader import WeightFiles
from ..tensor_views.box_view import View
from ..tensor_views.unread_tensor import NotRead
from .unmodified_model import Unmodified


class Known(NamedTuple):
    """What files hold, in the model's names.

    Args:
        views: Name in the unmodified model to what it is made of.
        left_out: Names in the files that the model's class does not want.
        unread: Sentences on what cannot be read in parts.
    """

    views: dict[str, View]
    left_out: frozenset[str]
    unread: tuple[str, ...]


def known(files: WeightFiles, unmodified: Unmodified | None) -> Known:
    """The tensors of files by their names in the model.

    Args:
        files: Where they are.
        unmodified: The model before any step; None where it is none of Transformers'.
    """
    whole = {name: View.of(files, name) for name in files.entries}
    if unmodified is None:
        return Known(whole, frozenset(), ())
    views, unread = _converted(whole, unmodified.model)
    return Known(views, frozenset(_left_out(views, unmodified)), tuple(unread))


def may_be_missing(unmodified: Unmodified | None) -> re.Pattern[str] | None:
    """Names that the model's class can do without."""
    patterns = unmodified.model._keys_to_ignore_on_load_missing if unmodified is not None else None
    return re.compile("|".join(f"({pattern})" for pattern in sorted(patterns))) if patterns else None


def _left_out(names: Collection[str], unmodified: Unmodified) -> Iterator[str]:
    model: Any = unmodified.model
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    # buffers that were saved once and are computed now, as from_pretrained knows them
    former = {r"rotary_emb\.inv_freq": "rotary_emb.inv_freq", r"(^|\.)position_ids$": "position_ids"}
    buffers = [name for name, _ in model.named_buffers()]
    patterns |= {pattern for pattern, end in former.items() if any(name.endswith(end) for name in buffers)}
    own = model.state_dict().keys()
    return (name for name in names if name not in own and any(re.search(pattern, name) for pattern in patterns))


def _converted(whole: dict[str, View], model: Any) -> tuple[dict[str, View], list[str]]:
    """What ``from_pretrained`` makes of the tensors, by the name of each it gives the model.

    It follows ``convert_and_load_state_dict_in_model`` of Transformers, on tensors that are not read.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    steps = get_model_conversion_mapping(model)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    own, prefix = model.state_dict(), model.base_model_prefix
    views: dict[str, View] = {}
    collected: dict[str, tuple[Any, list[str]]] = {}
    for name in sorted(whole, key=dot_natural_key):
        key, pattern = rename_source_key(name, renamings, converters, prefix, own)
        if key not in own and name in own:
            key, pattern = rename_source_key(name, [], [], prefix, own)
        if key not in own:  # several may come to one name there, as experts of a layer that the model lacks do
            views.setdefault(key, whole[name])
            continue
        if pattern is None:
            if key in views:
                raise BuildError(f"{views[key].names[0]} and {name} are both {key} in the model; one of them has to go")
            views[key] = whole[name]
            continue
        converter, names = collected.setdefault(key, (deepcopy(by_pattern[pattern]), []))
        converter.add_tensor(key, name, pattern, NotRead(whole[name]))
        names.append(name)
    unread = []
    for key, (converter, names) in collected.items():
        try:
            made = converter.convert(key, model=model, config=model.config)
        except (NotImplementedError, ValueError, LookupError, AttributeError, TypeError) as err:
            unread.append(f"{key}, which Transformers makes of {', '.join(names[:3])} with {converter.operations}: {err}")
            continue
        views.update({name: (each[0] if isinstance(each, list) else each).source for name, each in made.items()})
    return views, unread
