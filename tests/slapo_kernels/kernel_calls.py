"""Implementations of all kernels that count their calls, to see that kernels run at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import slapo_fusion.plugin
import slapo_kernels.plugin
import slapo_memory.plugin
import slapo_pipeline.plugin
import slapo_sharding.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, hookimpl
from slapo_kernels.dispatch import dispatcher
from slapo_kernels.implementations import eager
from slapo_testing import isolated_plugins


class Counted(NamedTuple):
    """Inputs of a kernel in a test.

    Args:
        plugins: For ``create_schedule``.
        calls: How often each kernel was called; the implementation is ``"counted"``.
    """

    plugins: Registry
    calls: Counter[str]


COUNTED = {"*": "counted"}
"""For ``force``."""


@contextmanager
def counted_kernels() -> Iterator[Counted]:
    """Let each kernel have one more implementation, eager's own."""
    calls: Counter[str] = Counter()

    def call(kernel: str, *args: Any, **kwargs: Any) -> Any:
        calls[kernel] += 1
        return getattr(eager, kernel)(*args, **kwargs)

    class Plugin:
        @hookimpl
        def slapo_kernels(self) -> dict[str, dict[str, Any]]:
            return {kernel: {"counted": partial(call, kernel)} for kernel in dispatcher.kernel_names()}

    plugins = (
        slapo_fusion.plugin,
        slapo_kernels.plugin,
        slapo_memory.plugin,
        slapo_pipeline.plugin,
        slapo_sharding.plugin,
        slapo_tracing.plugin,
        slapo_training.plugin,
        Plugin(),
    )
    with isolated_plugins(*plugins) as isolated:
        dispatcher.reset()
        try:
            yield Counted(isolated, calls)
        finally:
            dispatcher.reset()
