"""Private names of torch that this package uses; a test fails when torch moves one."""

from __future__ import annotations

import datetime
import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle


def nll_mean_of(loss: torch.Tensor) -> tuple[int, int] | None:
    """Return the number of labels of a loss that is a mean, and the label value that it excludes.

    Both are read from the saved tensors of ``cross_entropy`` and ``nll_loss``, or from another node's ``label_mean``, which has
    labels and excluded value. None for other losses, weighted means, and saved tensors with unpack hooks, which may run once
    only.
    """
    return _nll_mean_of_node(loss.grad_fn)


def nll_means_in_graph(loss: torch.Tensor) -> list[tuple[int, int]]:
    """Return the results of ``nll_mean_of`` for the nodes of a loss's graph, up to a limit."""
    nodes = [loss.grad_fn]
    seen, found = set(nodes), []
    for node in nodes:
        if node is None or len(nodes) > _MAX_NODES:
            continue
        if (told := _nll_mean_of_node(node)) is not None:
            found.append(told)
            continue
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                nodes.append(before)
    return found


_MAX_NODES = 200


def _nll_mean_of_node(node: Any) -> tuple[int, int] | None:
    if (told := getattr(node, "label_mean", None)) is not None:
        return int((told[0] != told[1]).sum()), told[1]
    if node is None or node.name() not in ("NllLossBackward0", "NllLoss2DBackward0"):
        return None
    kept: Any = node
    target, weight, ignored = kept._raw_saved_target, kept._raw_saved_weight, kept._saved_ignore_index
    if target.unpack_hook is not None or weight.data is not None or kept._saved_reduction != _MEAN:
        return None
    ignored -= 2**64 if ignored >= 2**63 else 0  # torch returns it as an unsigned number
    return int((target.data != ignored).sum()), ignored


_MEAN = 1
"""Torch's number of ``reduction="mean"``."""


def groups_known() -> int:
    """Return the number of this process's groups, from which torch names a group that not all ranks make together."""
    return len(dist.distributed_c10d._world.pg_names)


def job_timeout() -> datetime.timedelta | None:
    """Return the timeout of this job's default group; torch does not use it for other groups.

    None for a backend without a timeout, e.g. a fake one.
    """
    group = dist.group.WORLD
    assert group is not None
    options = group._get_backend(group._device_types[0]).options
    limit: datetime.timedelta | None = None if options is None else options._timeout
    return limit


class MetadataUnpickler(pickle.Unpickler):
    """Unpickler of the ``.metadata`` of ``torch.distributed.checkpoint``, restricted to its classes."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class, dtype or layout."""
        from torch.distributed.checkpoint import filesystem, metadata  # noqa: PLC0415  it takes half a second

        kinds = [getattr(metadata, each) for each in (*metadata.__all__, "_MEM_FORMAT_ENCODING")]
        known = {(kind.__module__, kind.__qualname__): kind for kind in (*kinds, filesystem._StorageInfo)}
        known |= {("torch", "Size"): torch.Size}
        known |= {(module, "PosixPath"): pathlib.PosixPath for module in ("pathlib", "pathlib._local")}
        if (module, name) in known:
            return known[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype | torch.layout):
            return found
        if (module, name) == ("torch.serialization", "_get_layout"):
            return getattr(torch.serialization, name)
        raise pickle.UnpicklingError(f"it has {module}.{name}, which no checkpoint needs")


class CollectiveWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that raises ``CollectiveCalledError`` if code in it calls a collective."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
            raise CollectiveCalledError(str(func))
        return func(*args, **(kwargs or {}))


class MessageWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that raises ``CollectiveCalledError`` if code, DTensors too, sends or receives more than ``most`` elements."""

    def __init__(self, most: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._most = most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(each, "placements") for each in types):
            return NotImplemented  # DTensor dispatches the operation again with local tensors
        found = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
            sent = [each for each in tree_leaves((args, kwargs, found)) if isinstance(each, torch.Tensor)]
            if any(each.numel() > self._most for each in sent):
                raise CollectiveCalledError(str(func))
        return found


class CollectiveCalledError(Exception):
    """Error of a collective within ``CollectiveWatch`` or ``MessageWatch``."""


def leaves_of(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors in which a backward of ``outputs`` would accumulate gradients."""
    found = {id(each): each for each in outputs if each.requires_grad and each.grad_fn is None}
    for node in _nodes(outputs):
        if node.name().endswith("AccumulateGrad"):
            found[id(node.variable)] = node.variable
    return [*found.values()]


def has_inner_backward(outputs: Sequence[torch.Tensor]) -> bool:
    """Return True if a backward of ``outputs`` runs another one in it, e.g. a reentrant checkpoint; its leaves are unknown."""
    return any(node.name() == "CheckpointFunctionBackward" for node in _nodes(outputs))


def has_custom_functions(outputs: Sequence[torch.Tensor]) -> bool:
    """Return True if a backward of ``outputs`` runs a custom ``autograd.Function``, in Python or C++."""
    return any(isinstance(node, BackwardCFunction) or "CppNode" in node.name() for node in _nodes(outputs))


def _nodes(outputs: Sequence[torch.Tensor]) -> Iterator[Any]:
    """Iterate over the nodes of the graph of tensors, each once."""
    seen: set[Any] = set()
    waiting: list[Any] = [each.grad_fn for each in outputs if each.grad_fn is not None]
    while waiting:
        if (node := waiting.pop()) not in seen:
            seen.add(node)
            yield node
            waiting += [each for each, _ in node.next_functions if each is not None]


@contextmanager
def without_hooks(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Context in which tensors have no gradient hooks."""
    kept = [(hooks, list(hooks.items())) for each in tensors if (hooks := each._backward_hooks)]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, items in kept:
            hooks.clear()  # a recompute may have put one back
            hooks.update(items)


def register_first(tensor: torch.Tensor, hook: Callable[[Any], Any]) -> RemovableHandle:
    """Register a hook that runs before all others of the tensor; users' hooks get its result."""
    handle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    assert tensor._backward_hooks is not None
    cast("OrderedDict[int, Any]", tensor._backward_hooks).move_to_end(handle.id, last=False)
    return cast(RemovableHandle, handle)


def set_local(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Replace the memory of a DTensor by another local tensor of the same shape and dtype, as FSDP2 does."""
    cast(Any, tensor)._local_tensor = local


def awaits_accumulation(parameter: torch.Tensor) -> bool:
    """Return whether hooks of ``register_post_accumulate_grad_hook`` wait for the parameter's gradient."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))
