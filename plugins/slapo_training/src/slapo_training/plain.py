"""Plain data: what ``torch.load(weights_only=True)`` reads back without running what a file says."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from slapo_core.errors import BuildError

_SINGLE = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, nn.Parameter, torch.dtype, torch.device, torch.Size)


def check_plain(value: Any, what: str) -> None:
    """Refuse to write what could not be read back.

    Raises:
        BuildError: an object of another class; ``what`` says whose it is.
    """
    kind = type(value)
    if kind in (dict, OrderedDict):
        for key, each in value.items():
            check_plain(key, what)
            check_plain(each, f"{what}, {key!r}")
    elif kind in (list, tuple, set):
        for each in value:
            check_plain(each, what)
    elif kind not in _SINGLE:
        raise BuildError(
            f"{what} has a {kind.__module__}.{kind.__qualname__}; only numbers, strings, tensors, lists, tuples, "
            "sets and dicts of these are saved"
        )
