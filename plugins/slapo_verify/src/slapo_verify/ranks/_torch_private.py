"""Private names of torch, behind plain functions.

These are the threaded process groups of torch's own tests, the store of the default process group, the dispatcher's operators
of collectives, and the stack of dispatch modes. ``test_thread_ranks.py``, ``test_failure_propagation.py`` and
``test_verify.py`` fail when torch moves one.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

T = TypeVar("T")
BACKEND = "threaded"
"""Name of the backend; it is there inside of ``threaded_groups``."""


def is_dry_run() -> bool:
    """Return True if tensors are fake, as while a model is traced."""
    return any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())


@contextmanager
def threaded_groups(waiting: Callable[[Callable[[], Any]], Any]) -> Iterator[Callable[[BaseException], None]]:
    """Make process groups belong to the thread that creates them; yield a function that ends all waiting threads.

    They end with ``SystemExit``. ``waiting`` receives a function that waits for other threads, and calls it.
    """
    private: Any = importlib.import_module("torch.testing._internal.distributed.multi_threaded_pg")

    places = [(private.Collective, "join"), (private, "_store_based_barrier")]
    before = [getattr(place, name) for place, name in places]
    c10d: Any = torch._C._distributed_c10d
    isolated = c10d._set_thread_isolation_mode  # names of groups are each thread's own
    private._install_threaded_pg()
    isolated(True)
    for (place, name), original in zip(places, before, strict=True):
        setattr(place, name, _wrap_blocking_call(original, waiting))
    try:
        yield private.ProcessLocalGroup.exception_handle
    finally:
        for (place, name), original in zip(places, before, strict=True):
            setattr(place, name, original)
        private.ProcessLocalGroup.reset()
        isolated(False)
        private._uninstall_threaded_pg()


def _wrap_blocking_call(original: Callable[..., T], waiting: Callable[[Callable[[], T]], T]) -> Callable[..., T]:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> T:
        return waiting(lambda: original(*args, **kwargs))

    return call


_COLLECTIVES = (
    *("allreduce_", "allreduce_coalesced_", "reduce_", "broadcast_", "barrier", "gather_", "scatter_"),
    *("allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
    *("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
    *("alltoall_", "alltoall_base_"),
)
"""Operators that return a work, alone or after the tensors. Point-to-point operators are excluded, since gloo cannot resume
their wait.
"""
_SLICE = timedelta(seconds=0.25)
_KEY = "BackendSelect"
"""Dispatch key that every call passes, including those from below autograd, as functional collectives make them."""


def default_store() -> Any:
    """Return the store of the default process group, which all ranks reach without a collective."""
    private: Any = dist.distributed_c10d
    return private._get_default_store()


@contextmanager
def watched_collectives(look: Callable[[], None]) -> Iterator[None]:
    """Call ``look`` a few times a second while this thread waits for a CPU collective, in a ``with`` block.

    An error of ``look`` leaves the collective, which is then out of step with the other ranks. Therefore no backend needs to
    abort collectives, which gloo cannot. Functional collectives and those of compiled regions are watched too.
    """
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    try:
        for name in _COLLECTIVES:
            library.impl(name, _watch_collective(getattr(torch.ops.c10d, name).default, look), _KEY, with_keyset=True)
        yield
    finally:
        library._destroy()


def _watch_collective(collective: Any, look: Callable[[], None]) -> Callable[..., Any]:
    private: Any = torch._C
    below = private._dispatch_keyset_full_after(getattr(private.DispatchKey, _KEY))
    own = threading.get_ident()

    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        result = collective.redispatch(keys & below, *args, **kwargs)
        if threading.get_ident() != own:
            return result  # of a checkpoint that is written in the background, say
        if any(each.device.type != "cpu" for each in pytree.tree_leaves(args) if isinstance(each, torch.Tensor)):
            return result  # to wait so for what runs on GPUs would hold the process up
        tensors, work = (result[:-1], result[-1]) if isinstance(result, tuple) else (None, result)
        again = _c10d().PythonCallbackWork(_sliced_wait(_c10d().Work.unbox(work), look)).boxed()
        return again if tensors is None else (*tensors, again)

    return call


def _sliced_wait(work: Any, look: Callable[[], None]) -> Callable[[timedelta], bool]:
    """Return a function that waits in slices as the work itself does; 0 means the group's own time limit."""

    def wait(limit: timedelta) -> bool:
        waited = timedelta(0)
        while True:
            try:
                return bool(work.wait(_SLICE))
            except RuntimeError:
                waited += _SLICE
                if work.is_completed() or timedelta(0) < limit <= waited:  # it failed, or the caller has waited enough
                    raise
                look()

    return wait


def _c10d() -> Any:
    return torch._C._distributed_c10d
