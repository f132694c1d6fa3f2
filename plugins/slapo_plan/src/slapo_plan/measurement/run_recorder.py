"""One dispatch mode that records what a run on real or fake tensors does: memory and collectives, and operators if asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from ..records import Work
from ._torch_private import WAIT, FakeTensor
from .collectives import collective_record
from .storage_tracker import StorageTracker

OperatorObserver = Callable[[Any, Any, Any, Any], Work | None]
"""Returns the record of an operator's call, given the operator, its arguments and its result; None for views."""


class RunRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records memory, collectives and operators.

    Attributes:
        memory: The storages that are alive.
        work: Collectives and operators since the last ``take_work``, in order.
    """

    supports_higher_order_operators = True

    def __init__(self, operators: OperatorObserver | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = StorageTracker()
        self.work: list[Work] = []
        self._operators = operators

    def take_work(self) -> tuple[Work, ...]:
        """Return what was recorded, and begin anew."""
        work, self.work = tuple(self.work), []
        return work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is WAIT and isinstance(args[0], FakeTensor):
            return args[0]  # torch's own fake is a new tensor, where real ranks wait for the same one
        result = func(*args, **kwargs)
        self.memory.add(result)
        record = collective_record(func, args, kwargs, result) if hasattr(func, "_opname") else None
        if record is None and self._operators is not None:
            record = self._operators(func, args, kwargs, result)
        if record is not None:
            self.work.append(record)
        return result
