"""Names and views of the files' tensors in the model, with the conversions of Transformers' ``from_pretrained``."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from copy import deepcopy
from typing import Any, NamedTuple

from slapo_core import BuildError

from ..safetensors_files.reader import WeightFiles
from ..tensor_views.box_view import TensorView
from ..tensor_views.unread_tensor import UnreadTensor
from .unmodified_model import UnmodifiedModel


class LoadedNames(NamedTuple):
    """The files' tensors by the model's names.

    Args:
        views: Name in the unmodified model to the view of the files.
        ignored: Names in the files that the model's class ignores.
        unread: Messages on tensors that cannot be read in parts.
    """

    views: dict[str, TensorView]
    ignored: frozenset[str]
    unread: tuple[str, ...]


def load_names(files: WeightFiles, unmodified: UnmodifiedModel | None) -> LoadedNames:
    """Return the tensors of files by their names in the model; without ``unmodified`` it is not a Transformers' model."""
    whole = {name: TensorView.of(files, name) for name in files.entries}
    if unmodified is None:
        return LoadedNames(whole, frozenset(), ())
    views, unread = _convert_tensors(whole, unmodified.model)
    return LoadedNames(views, frozenset(_ignored_names(views, unmodified)), tuple(unread))


def ignorable_names(unmodified: UnmodifiedModel | None) -> re.Pattern[str] | None:
    """Return a pattern of the names that files may lack for the model's class, or None."""
    patterns = unmodified.model._keys_to_ignore_on_load_missing if unmodified is not None else None
    return re.compile("|".join(f"({pattern})" for pattern in sorted(patterns))) if patterns else None


def _ignored_names(names: Collection[str], unmodified: UnmodifiedModel) -> Iterator[str]:
    model: Any = unmodified.model
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    # buffers that were saved once and are computed now, as from_pretrained knows them
    former = {r"rotary_emb\.inv_freq": "rotary_emb.inv_freq", r"(^|\.)position_ids$": "position_ids"}
    buffers = [name for name, _ in model.named_buffers()]
    patterns |= {pattern for pattern, end in former.items() if any(name.endswith(end) for name in buffers)}
    own = model.state_dict().keys()
    return (name for name in names if name not in own and any(re.search(pattern, name) for pattern in patterns))


def _convert_tensors(whole: dict[str, TensorView], model: Any) -> tuple[dict[str, TensorView], list[str]]:
    """Convert the tensors as ``from_pretrained`` does; return views by the model's names, and messages on failures.

    It follows ``convert_and_load_state_dict_in_model`` of Transformers, on unread tensors.
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
    views: dict[str, TensorView] = {}
    collected: dict[str, tuple[Any, list[str]]] = {}
    for name in sorted(whole, key=dot_natural_key):
        key, pattern = rename_source_key(name, renamings, converters, prefix, own)
        if key not in own and name in own:
            key, pattern = rename_source_key(name, [], [], prefix, own)
        if key not in own:  # several may get one name here, as experts of a layer that the model lacks
            views.setdefault(key, whole[name])
            continue
        if pattern is None:
            if key in views:
                raise BuildError(f"{views[key].names[0]} and {name} are both {key} in the model; one of them has to go")
            views[key] = whole[name]
            continue
        converter, names = collected.setdefault(key, (deepcopy(by_pattern[pattern]), []))
        converter.add_tensor(key, name, pattern, UnreadTensor(whole[name]))
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
