"""Modules whose output for one row depends on the other rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from slapo_tracing.nodes import forward_wrappers

from ..model.state_rollback import StateSnapshot


class Tolerance(NamedTuple):
    """Relative differences that rounding may cause.

    Args:
        repeated: Tolerance of a loss after another one has differed.
        values: Tolerance of a tensor's values, relative to its largest.
    """

    loss: float
    repeated: float
    values: float


def tolerance_of(modules: Sequence[nn.Module], precision: str) -> Tolerance:
    """Return the relative differences that rounding may cause in a model of this precision."""
    kinds = {p.dtype for module in modules for p in module.parameters() if p.is_floating_point() or p.is_complex()}
    if precision != "fp32" or kinds & {torch.bfloat16, torch.float16}:
        return Tolerance(2e-2, 5e-3, 5e-2)
    if kinds and not kinds - {torch.float64, torch.complex128}:
        return Tolerance(1e-9, 1e-11, 1e-8)
    device = {p.device.type for module in modules for p in module.parameters()}
    if device - {"cpu", "meta"} and torch.get_float32_matmul_precision() != "highest":
        return Tolerance(2e-3, 5e-4, 1e-2)
    return Tolerance(1e-5, 2e-6, 1e-4)


def batch_norms(root: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that normalise by statistics of their rows in training, by path."""
    found = {path: module for path, module in root.named_modules() if isinstance(module, _BatchNorm)}
    return {path: module for path, module in found.items() if module.training or module.running_mean is None}


def written_buffers(root: nn.Module, state: StateSnapshot) -> dict[str, torch.Tensor]:
    """Return copies of the floating-point buffers that a run modified, without running statistics of norms."""
    norms = {path for path, module in root.named_modules() if isinstance(module, _NormBase)}
    found = {name: each for name, each in root.named_buffers() if each.is_floating_point() and not each.is_meta}
    found = {name: each for name, each in found.items() if name.rpartition(".")[0] not in norms}
    return {name: each.detach().double().clone() for name, each in found.items() if state.has_changed(each)}


def over_replicas(module: nn.Module) -> bool:
    """Return True if a BatchNorm's statistics are over all replicas: ``SyncBatchNorm``, or a wrapper with ``over_replicas``."""
    wrappers = forward_wrappers(module)
    return isinstance(module, nn.SyncBatchNorm) or any(getattr(each, "over_replicas", False) for each in wrappers)


@contextmanager
def by_running_statistics(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Context in which these BatchNorms use their running statistics, if they have any."""
    modes = [(module, module.training) for module in modules if getattr(module, "running_mean", None) is not None]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode


class Event(NamedTuple):
    """Input or output tensors of a module.

    Args:
        inside: Path of the module whose forward called it.
        is_output: True for outputs, False for inputs.
    """

    path: str
    inside: str
    is_output: bool
    tensors: list[torch.Tensor]


@contextmanager
def events_of(modules: Sequence[nn.Module]) -> Iterator[list[Event]]:
    """Record inputs and outputs of modules in the order of execution.

    The hooks are torch's global module hooks, since some modules compute differently with hooks of their own.
    """
    paths = {module: path for root in modules for path, module in root.named_modules()}
    events: list[Event] = []
    stack: list[str] = []

    def pre_forward(module: nn.Module, args: Any) -> None:
        if module in paths:
            events.append(Event(paths[module], stack[-1] if stack else "", False, _tensors(args)))
            stack.append(paths[module])

    def post_forward(module: nn.Module, args: Any, output: Any) -> None:
        if module in paths:
            stack.pop()
            events.append(Event(paths[module], stack[-1] if stack else "", True, _tensors(output)))

    with register_module_forward_pre_hook(pre_forward), register_module_forward_hook(post_forward):
        yield events


def models_within(roots: Sequence[nn.Module]) -> set[str]:
    """Return the paths of modules with all parameters of their root: the root, and a model that it only wraps."""
    sizes = {root: len(list(root.parameters())) for root in roots}
    return {path for root in roots for path, module in root.named_modules() if len(list(module.parameters())) == sizes[root]}


def first_mixing(
    whole: Sequence[Event],
    parts: Sequence[Sequence[Event]],
    rows: Sequence[int],
    tolerance: float,
    with_loss: Collection[str] = (),
) -> str | None:
    """Return the path of the first module whose output for a row differs between a part and the whole.

    A difference in a module's input comes from the forward of the module around it. A module that returns rows and a number,
    e.g. a router's balance loss, also mixes rows if the number is not the mean of the parts' numbers.

    Args:
        tolerance: Largest relative difference that counts as equal.
        with_loss: Paths of modules that may return the loss beside rows; their numbers are not compared.
    """
    calls, known = _by_call(whole), [_by_call(part) for part in parts]
    for key, one in calls.items():
        others = [part.get(key) for part in known]
        first = others[0]
        if first is None:
            continue
        pairs = list(zip(one.tensors, first.tensors, strict=False))
        if any(_differ(a, b, (rows[0], rows[1]), tolerance) for a, b in pairs):
            return one.path if one.is_output else one.inside
        has_rows = any(_rows_dim(a.shape, b.shape, (rows[0], rows[1])) is not None for a, b in pairs)
        if one.is_output and has_rows and one.path not in with_loss and not _numbers_are_means(one, others, rows, tolerance):
            return one.path
    # a module runs for a part only if the forward depends on the number of rows, or on a single row
    return next((event.inside for part in known for key, event in part.items() if key not in calls), None)


def _numbers_are_means(whole: Event, parts: Sequence[Event | None], rows: Sequence[int], tolerance: float) -> bool:
    for index, tensor in enumerate(whole.tensors):
        if tensor.dim() or not tensor.is_floating_point():
            continue
        found = [part.tensors[index].item() for part in parts if part is not None and len(part.tensors) > index]
        if len(found) == len(parts):
            mean = sum(value * number for value, number in zip(found, rows[1:], strict=True)) / rows[0]
            if abs(tensor.item() - mean) > tolerance * max(map(abs, found)):
                return False
    return True


def _by_call(events: Sequence[Event]) -> dict[tuple[str, bool, int], Event]:
    found: dict[tuple[str, bool, int], Event] = {}
    calls: Counter[tuple[str, bool]] = Counter()
    for event in events:
        kind = event.path, event.is_output
        found[event.path, event.is_output, calls[kind]] = event
        calls[kind] += 1
    return found


def _differ(whole: torch.Tensor, part: torch.Tensor, rows: tuple[int, int], tolerance: float) -> bool:
    dim = _rows_dim(whole.shape, part.shape, rows)
    if dim is None:
        return False
    one, other = whole.narrow(dim, 0, part.shape[dim]), part
    if not one.is_floating_point():
        return False
    one, other = one.double(), other.double()
    is_wrong = (one - other).abs() > tolerance * other.abs().nan_to_num(0.0, 0.0, 0.0).max().clamp(min=1e-6)
    return bool((is_wrong & one.isfinite() & other.isfinite()).any())


def _rows_dim(whole: Sequence[int], part: Sequence[int], rows: tuple[int, int]) -> int | None:
    """Return the dimension whose sizes have the ratio of the numbers of rows, or None."""
    if len(whole) != len(part):
        return None
    differing = [dim for dim, (one, other) in enumerate(zip(whole, part, strict=True)) if one != other]
    if len(differing) != 1:  # without rows; or rows x rows, where a part is not a subset along one dimension
        return None
    dim = differing[0]
    return dim if part[dim] and whole[dim] * rows[1] == part[dim] * rows[0] else None


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf.detach().clone() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.numel()]
