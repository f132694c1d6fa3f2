"""Rounding errors: estimated by dtype, or measured on the unmodified model in a wider dtype."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from slapo_core import VerifyError

from ..model_setup.model_copies import copy_model
from .equivalence import Difference, Tolerance
from .model_results import ComparisonTask, ModelResults, compute, pairs
from .parameter_values import EXACT
from .report import short_repr

_TOLERANCES = {
    torch.float64: Tolerance(0.0, 1e-9, 1e-9),
    torch.float32: Tolerance(0.0, 1e-4, 1e-4),
    torch.float16: Tolerance(0.0, 2e-3, 2e-3),
    torch.bfloat16: Tolerance(0.0, 2e-2, 2e-2),
}
"""Tolerance for the least precise dtype of the reference's parameters. For half precision, rounding is measured as well."""
_MAX_ERROR_FACTOR = 6.0
"""Allowed error, in multiples of the unmodified model's own largest rounding error."""
_MAX_RELATIVE_DIFFERENCE = 0.25
"""Relative difference of a tensor that half precision may cause where signs of activations near 0 flip."""
_NORM_FACTOR = 4.0
"""Allowed norm of errors, in multiples of the norm of the unmodified model's own rounding errors."""
_OUTLIER_SHARE = 0.05
"""Share of a tensor's largest errors that the norm leaves out."""
_ROUNDED = 1e-5
"""Share of the largest number that rounding in float32 may add to a 0. A larger one means that another branch ran."""
_HALF = (torch.float16, torch.bfloat16)


def tolerance_of(model: nn.Module, outputs: Iterable[tuple[str, Any]] = ()) -> Tolerance:
    """Return the tolerance for rounding in the dtypes of the model's parameters and outputs."""
    tensors = [*model.parameters(), *(each for _, each in outputs if isinstance(each, torch.Tensor))]
    types = {each.dtype.to_real() for each in tensors if each.is_floating_point() or each.is_complex()}
    return max((_TOLERANCES[dtype] for dtype in types if dtype in _TOLERANCES), key=lambda each: each.scale, default=EXACT)


def check_tolerance(tolerance: Any) -> None:
    """Raise ``VerifyError`` for an invalid tolerance of the user; None is valid."""
    if tolerance is not None and not isinstance(tolerance, Tolerance):
        raise VerifyError(f"tolerance is {short_repr(tolerance)}; give a Tolerance of slapo_verify.comparison.equivalence")
    parts = () if tolerance is None else (tolerance.atol, tolerance.rtol, tolerance.scale)
    if not all(isinstance(each, (int, float)) and 0 <= each < math.inf for each in parts):
        raise VerifyError(f"tolerance is {short_repr(tolerance)}; give numbers from 0 on")


def with_rounding(task: ComparisonTask, reference: nn.Module, expected: ModelResults, closely: bool = False) -> ComparisonTask:
    """Return the task with measured rounding errors: of weight updates, and in half precision of all results.

    ``closely`` measures float32 results, too, since a gradient that is mathematically 0 consists of rounding errors.
    """
    weights = reference.named_parameters(remove_duplicate=False) if task.level == "step" else ()
    noise = {f"update of {name!r}": storage_error(each) for name, each in weights if each.is_floating_point()}
    if not is_half(reference) and not closely:
        return replace(task, tolerance=replace(task.tolerance, noise=noise))
    wide = torch.float32 if is_half(reference) else torch.float64
    model = copy_model(reference)
    exact = compute(model.float() if is_half(reference) else model.double(), with_dtype(task, wide))  # complex ones stay
    rounding = (each for each in pairs(expected, exact) if not each[0].startswith(_NOT_ROUNDED))
    both = [(what, one, other) for what, one, other in rounding if one.dtype is not torch.bool]
    most = _ROUNDED * max((_largest(high) for _, _, high in both), default=0.0) if closely else math.inf
    for what, low, high in both:
        if not closely or _largest(high) <= most:
            noise[what] = noise.get(what, 0.0) + rounding_error(low, high)
    rounded = {} if closely else {what: (low, high) for what, low, high in both}
    return replace(task, tolerance=replace(task.tolerance, noise=noise), rounded=rounded)


_NOT_ROUNDED = ("weight", "gradient of input", "what the forward left of input")


def rounding_error(low: torch.Tensor, high: torch.Tensor) -> float:
    """Return the allowed error, given the numbers in two dtypes."""
    return _MAX_ERROR_FACTOR * _largest(_errors(low, high))


def _errors(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return the errors of the numbers that both types have; not of masks, which are the largest that each has."""
    errors = low.to(high.dtype) - high
    if not low.is_floating_point():
        return errors
    return errors[low.isfinite() & high.isfinite() & (low.abs() < torch.finfo(low.dtype).max / 2)]


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest absolute value of the finite numbers."""
    numbers = tensor[tensor.isfinite()].abs()
    return float(numbers.max()) if numbers.numel() else 0.0


def is_half(model: nn.Module) -> bool:
    """Return True if a model has parameters in half precision."""
    return any(each.dtype in _HALF for each in model.parameters())


def with_dtype(task: ComparisonTask, dtype: torch.dtype) -> ComparisonTask:
    """Return the task with less precise floating-point inputs converted, and with the tolerance of the dtype."""

    def widen(value: Any) -> Any:
        is_narrower = isinstance(value, torch.Tensor) and value.is_floating_point() and value.itemsize < dtype.itemsize
        return value.to(dtype) if is_narrower else value

    args, kwargs = pytree.tree_map(widen, (task.args, dict(task.kwargs)))
    return replace(task, args=args, kwargs=kwargs, tolerance=_TOLERANCES[dtype])


def is_rounding_like(task: ComparisonTask, expected: ModelResults, actual: ModelResults, found: Iterable[Difference]) -> bool:
    """Return True if at most a quarter of each tensor differs, and norms are like those of rounding errors."""
    known = {what: (one, other) for what, one, other in pairs(expected, actual)}
    for each in found:
        one, other = known.get(each.what, (None, None))
        if each.absolute is None or one is None or other is None or one.shape != other.shape:
            return False
        wide = torch.promote_types(one.dtype, torch.float64)
        error = other.to(wide) - one.to(wide)
        rounded = task.rounded.get(each.what)
        is_systematic = rounded is not None and not _size_of(error) <= _NORM_FACTOR * _size_of(_errors(*rounded))
        if is_systematic or not float(error.norm()) <= _MAX_RELATIVE_DIFFERENCE * float(one.to(wide).norm()):
            return False
    return True


def _size_of(errors: torch.Tensor) -> float:
    """The norm without the largest: a sign that turns makes a few large ones, what is wrong makes most of them large."""
    errors = errors.detach().abs().double().flatten()
    errors = errors[errors.isfinite()]
    largest = errors.topk(math.ceil(_OUTLIER_SHARE * errors.numel())).values
    return math.sqrt(max(0.0, float(errors.square().sum() - largest.square().sum())))


def storage_error(weight: torch.Tensor) -> float:
    """Return the rounding error of the difference of two stored values of a weight: one step at the largest."""
    return torch.finfo(weight.dtype).eps * float(weight.detach().abs().max()) if weight.numel() else 0.0
