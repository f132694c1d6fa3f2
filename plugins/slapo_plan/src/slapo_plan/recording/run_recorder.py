"""One dispatch mode that records what a run on real or fake tensors does: memory, collectives and operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..records import Work
from ._torch_private import READ, WAIT, FakeTensor
from .operator_recorder import OperatorRecorder
from .storage_tracker import StorageTracker


class RunRecorder(OperatorRecorder):  # type: ignore[no-untyped-call]
    """Recorder of operators and collectives that counts memory, too.

    Attributes:
        memory: The storages that are alive.
        answers: True to answer 1 where a number of a fake tensor is read, as some optimizers do; what they allocate does not
            depend on it.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.memory = StorageTracker()
        self.answers = False

    def take_work(self) -> tuple[Work, ...]:
        """Return what was recorded since the last call."""
        work, self.records = tuple(self.records), []
        return work

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "prim":  # questions about a tensor, most of all calls
            return func(*args, **(kwargs or {}))
        return self.run(lambda args, kwargs: func(*args, **kwargs), func, args, kwargs or {})

    def run(self, call: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if func is WAIT and isinstance(args[0], FakeTensor):
            return args[0]  # torch's own fake is a new tensor, where real ranks wait for the same one
        if self.answers and func is READ and isinstance(args[0], FakeTensor):
            return 1.0
        result = super().run(call, func, args, kwargs)
        self.memory.add(result)
        return result
