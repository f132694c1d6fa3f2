"""Recorder of the operators and collectives that run under it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..records import OperatorRecord, Work
from ._torch_private import in_backward, saved_tensors_are_hooked
from .collective_calls import collective_record
from .operator_costs import operator_record

_Key = tuple[Any, ...]


class OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that records each operator and collective, forward and backward, on real, fake or meta tensors.

    Equal calls are analysed once: those of one operator on tensors of equal shapes, strides and types.

    Attributes:
        records: What ran so far, in order. Views, allocations and reads of single numbers are left out.

    Example:
        >>> model = nn.Linear(4, 8)
        >>> with OperatorRecorder() as recorder:
        ...     model(torch.ones(2, 4)).sum().backward()
        >>> sum(record.flops for record in recorder.records)
        256
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records: list[Work] = []
        self._known: dict[_Key, OperatorRecord | None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self.run(lambda args, kwargs: func(*args, **kwargs), func, args, kwargs or {})

    def run(self, call: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator by calling ``call(args, kwargs)``, and record it."""
        if func.namespace in ("c10d", "_c10d_functional"):
            output = call(args, kwargs)
            if (communication := collective_record(func, args, output)) is not None:
                self.records.append(communication)
            return output
        key: list[Any] = [func]  # before an operator in place changes a shape
        _add_parts(key, (*args, *kwargs.values()), [])
        known, output = tuple(key), call(args, kwargs)
        if known not in self._known:
            self._known[known] = operator_record(func, args, kwargs, output)
        if (record := self._known[known]) is not None:
            hooked = saved_tensors_are_hooked()
            if in_backward() and (hooked or torch.is_grad_enabled()):  # a forward inside of a backward
                record = record._replace(recomputed=True)
            self.records.append(record._replace(hooked=True) if hooked else record)
        return output


def _add_parts(key: list[Any], values: Iterable[Any], seen: list[torch.Tensor]) -> None:
    """Append what the work of an operator depends on: its tensors, which of them are the same, sizes and flags."""
    for value in values:
        if isinstance(value, torch.Tensor):
            first = next((index for index, other in enumerate(seen) if other is value), -1)
            if first < 0:
                seen.append(value)
            key += (value.shape, value.stride() if value.layout is torch.strided else None, value.dtype, first)
        elif isinstance(value, (list, tuple)):
            _add_parts(key, value, seen)
        elif isinstance(value, (bool, int, str, torch.dtype)):
            key.append(value)
