"""Offload of saved tensors to CPU memory in the forward, and their return in the backward."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ..forward_state._torch_private import storage_key, weak_storage


class _Thread(threading.local):
    """Offload state of one thread."""

    def __init__(self) -> None:
        self.is_disabled = False
        self.last_call: Callable[[], _Call | None] = lambda: None


_thread = _Thread()


@contextmanager
def offload_disabled() -> Iterator[None]:
    """Disable offload in the block: a checkpoint's forward saves nothing, and its recomputation's tensors are used at once."""
    before, _thread.is_disabled = _thread.is_disabled, True
    try:
        yield
    finally:
        _thread.is_disabled = before


class OffloadWrapper:
    """Forward wrapper that ``sch.offload()`` puts around a module.

    Args:
        min_bytes: Storages with fewer bytes stay.
    """

    def __init__(self, min_bytes: int) -> None:
        self.min_bytes = min_bytes

    def __call__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if _thread.is_disabled or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        with self.offload_hooks(call):
            return call(*args, **kwargs)

    def offload_hooks(self, call: Callable[..., Any]) -> AbstractContextManager[Any]:
        """Return the hooks that offload saved tensors, except parameters and buffers of the module of the forward ``call``."""
        module = _module_of(call)
        own = [] if module is None else [*module.parameters(), *module.buffers()]
        pack = _Packer(self.min_bytes, {storage_key(tensor) for tensor in own})
        return saved_tensors_hooks(pack, _unpack)


def find_offload(call: Any) -> OffloadWrapper | None:
    """Return the wrapper of ``sch.offload()`` inside a wrapped forward, or None."""
    while isinstance(call, partial) and call.args:
        if isinstance(call.func, OffloadWrapper):
            return call.func
        call = call.args[0]
    return None


def _module_of(call: Any) -> nn.Module | None:
    while isinstance(call, partial) and call.args:
        call = call.args[0]
    found = getattr(call, "__self__", call)
    return found if isinstance(found, nn.Module) else None


class _Call:
    """One forward of an offloaded module.

    Attributes:
        copies: Offloaded copies that the backward has not freed yet.
        before: The previous call in this thread, whose backward comes next.
    """

    def __init__(self) -> None:
        self.copies: list[weakref.ref[_CpuCopy]] = []
        self.before, _thread.last_call = _thread.last_call, weakref.ref(self)

    def fetch(self) -> None:
        """Start the copies of all tensors to the device."""
        for copy in [copy() for copy in self.copies]:
            if copy is not None:
                copy.fetch()

    def fetch_before(self) -> None:
        """Start the copies of the previous call, once."""
        before, self.before = self.before(), lambda: None
        if before is not None:
            before.fetch()


class _CpuCopy:
    """A copy of a storage, given as bytes, on the CPU until it is fetched."""

    def __init__(self, memory: torch.Tensor, call: _Call) -> None:
        self.device, self.call = memory.device, call
        self.back: torch.Tensor | None = None
        self.is_fetched: torch.cuda.Event | None = None
        self.on_cpu: torch.Tensor | None
        if not memory.is_cuda:
            self.on_cpu = memory.to("cpu", copy=True)
            return
        stream = _side_stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        self.on_cpu = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=True)
        with torch.cuda.stream(stream):
            self.on_cpu.copy_(memory, non_blocking=True)
        memory.record_stream(stream)

    def fetch(self) -> None:
        """Start the copy to the device, unless it was started."""
        if self.on_cpu is None:
            return
        if self.device.type != "cuda":
            self.back = self.on_cpu.to(self.device)
        else:
            stream = _side_stream(self.device)  # the stream of the first copy, so that it has finished
            with torch.cuda.stream(stream):
                self.back = self.on_cpu.to(self.device, non_blocking=True)
            self.is_fetched = stream.record_event()
        self.on_cpu = None

    def get(self) -> torch.Tensor:
        """Return the storage on its device; the current stream waits for the copy."""
        self.fetch()
        assert self.back is not None
        if self.is_fetched is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(self.is_fetched)
            self.back.record_stream(current)
        return self.back


class _View:
    """Placeholder that autograd saves in the place of a tensor."""

    def __init__(self, copy: _CpuCopy, tensor: torch.Tensor) -> None:
        self.copy, self.dtype = copy, tensor.dtype
        self.place = tensor.storage_offset(), tensor.shape, tensor.stride()


class _Packer:
    """Pack hook of one call of a module; ``own`` has the keys of the storages of its parameters and buffers, which stay."""

    def __init__(self, min_bytes: int, own: set[int]) -> None:
        self.min_bytes, self.own, self.call = min_bytes, own, _Call()
        # by storage and version: a storage changed between two uses needs two copies; the weak reference reserves its key
        self.known: dict[tuple[int, int], tuple[Any, weakref.ref[_CpuCopy]]] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor | _View:
        if not self._should_offload(tensor):
            return tensor
        key = storage_key(tensor), tensor._version
        copy = self.known[key][1]() if key in self.known else None
        if copy is None:
            storage = tensor.untyped_storage()
            with torch.no_grad():
                memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                copy = _CpuCopy(memory, self.call)
            self.call.copies.append(weakref.ref(copy))
            self.known[key] = weak_storage(storage), weakref.ref(copy)
        return _View(copy, tensor)

    def _should_offload(self, tensor: torch.Tensor) -> bool:
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_quantized
        if not is_plain or tensor.is_meta or tensor.is_conj() or tensor.is_neg():
            return False
        return tensor.untyped_storage().nbytes() >= max(self.min_bytes, 1) and storage_key(tensor) not in self.own


def _unpack(kept: torch.Tensor | _View) -> torch.Tensor:
    if not isinstance(kept, _View):
        return kept
    memory = kept.copy.get()
    kept.copy.call.fetch_before()
    with torch.no_grad():
        return torch.empty(0, dtype=kept.dtype, device=memory.device).set_(memory.untyped_storage(), *kept.place)


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _side_streams[device]
