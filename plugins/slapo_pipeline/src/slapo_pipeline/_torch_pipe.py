"""What is used of ``torch.distributed.pipelining`` by tracing that has no public name, in one place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def pipe_split_calls(instead: Callable[[], Any]) -> Iterator[None]:
    """Meanwhile ``torch.distributed.pipelining.pipe_split()`` calls ``instead``: what it calls else, no tracer here sees."""
    if "torch.distributed.pipelining" not in sys.modules:  # then no model calls it
        yield
        return
    operators: Any = torch.ops.pippy
    before = operators._pipe_split
    operators._pipe_split = instead
    try:
        yield
    finally:
        operators._pipe_split = before
