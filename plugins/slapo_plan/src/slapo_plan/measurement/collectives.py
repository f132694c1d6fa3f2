"""Records of the collectives that one rank issues, on real or fake ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..records import CollectiveRecord
from ._torch_private import COLLECTIVES, arguments_of, group_ranks

_INPUTS = ("input", "inputs", "tensors", "input_tensor", "input_tensors")
_OUTPUTS = ("output", "output_tensor", "output_tensors", "out")


def collective_record(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> CollectiveRecord | None:
    """Return the record of an operator's call if it is a collective over several ranks, else None."""
    kind = COLLECTIVES.get(func.namespace, {}).get(func._opname)
    if kind is None:
        return None
    arguments = arguments_of(func, args, kwargs)
    ranks = group_ranks(arguments)
    if len(ranks) < 2:
        return None
    if kind == "all_gather":
        whole = [arguments[name] for name in _OUTPUTS if name in arguments] or result
    else:
        whole = [arguments[name] for name in _INPUTS if name in arguments]
    return CollectiveRecord(kind, sum(each.nbytes for each in tree_leaves(whole) if isinstance(each, torch.Tensor)), ranks)
