"""Comparison of two models' outputs, and of the gradient of every parameter under its original name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from slapo_core import parameter_facts, rng_state, set_rng_state
from slapo_training.distributed import over_group

from .tensor_leaves import Leaves, OpaqueObject, copy_leaves, dense, leaves_of


@dataclass(frozen=True)
class Tolerance:
    """Allowed difference of two numbers: ``atol + rtol * |expected| + scale * typical size of the expected tensor``.

    Integers and booleans must be equal.

    Args:
        atol: Absolute.
        rtol: Relative to the number.
        scale: Relative to the tensor; see ``typical_size``.
        noise: Additional difference for single tensors, by ``Difference.what``.
    """

    atol: float
    rtol: float
    scale: float = 0.0
    noise: Mapping[str, float] = field(default_factory=dict)

    def absolute(self, expected: torch.Tensor, what: str = "") -> float:
        """Return the part that is equal for all numbers of a tensor."""
        scale = self.scale * typical_size(expected) if self.scale else 0.0
        return self.atol + scale + self.noise.get(what, 0.0)

    def accepts(self, expected: torch.Tensor, actual: torch.Tensor, what: str = "") -> torch.Tensor:
        """Return a mask of the elements that are close enough."""
        if not (expected.is_floating_point() or expected.is_complex()):
            return expected == actual
        return torch.isclose(actual, expected, rtol=self.rtol, atol=self.absolute(expected, what))


_SAMPLED = 1 << 12
"""Number of elements of a tensor from which the median is taken."""
_MEDIANS = 30.0
_MASKS = 100.0


def typical_size(tensor: torch.Tensor) -> float:
    """Return the root mean square of a tensor's finite numbers, robust against a few huge ones.

    It is at most 30 times the median of the non-zero numbers. The largest number is left out if it occurs several times and
    exceeds 100 times the median of the others: then it is a mask.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return 0.0
    numbers = tensor.detach().flatten()
    size = _root_mean_square(numbers)
    sample = _sample(numbers).abs().double()
    sample = sample[sample.isfinite() & (sample > 0)]
    if math.isfinite(size) and not _has_mask(sample):
        return min(size, _MEDIANS * float(sample.median())) if sample.numel() else size
    numbers = numbers.abs().double()
    numbers = numbers[numbers.isfinite()]
    if _has_mask(sample):
        numbers, sample = numbers[numbers < sample.max()], sample[sample < sample.max()]
    size = _root_mean_square(numbers)
    return min(size, _MEDIANS * float(sample.median())) if sample.numel() else size


def _sample(numbers: torch.Tensor) -> torch.Tensor:
    """Return a fixed random sample. A regular one might consist of a single column."""
    if numbers.numel() <= _SAMPLED:
        return numbers
    generator = torch.Generator().manual_seed(0)
    return numbers[torch.randint(numbers.numel(), (_SAMPLED,), generator=generator, device="cpu").to(numbers.device)]


def _has_mask(sample: torch.Tensor) -> bool:
    """Return True if the largest number occurs several times and is far from the others."""
    if not sample.numel():
        return False
    largest = sample.max()
    others = sample[sample < largest]
    return others.numel() < sample.numel() - 1 and others.numel() > 0 and bool(largest > _MASKS * others.median())


def _root_mean_square(numbers: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(numbers)) / numbers.numel() ** 0.5 if numbers.numel() else 0.0


@dataclass(frozen=True)
class Difference:
    """One result that differs between two models.

    Args:
        what: ``"output.logits"``, ``"loss"``, ``"gradient of 'h.0.weight'"``.
        message: One sentence with the numbers.
        absolute: Largest absolute error; None if shapes, dtypes or structures differ, or for NaN.
        relative: Largest relative error, likewise.
    """

    what: str
    message: str
    absolute: float | None = None
    relative: float | None = None


@dataclass
class Run:
    """Results of a forward and a backward of a model, and its inputs afterwards."""

    outputs: Leaves
    loss: torch.Tensor | None
    input_grads: Leaves
    param_grads: dict[str, torch.Tensor | None]
    inputs: Leaves = field(default_factory=list)


def assert_equivalent(
    before: nn.Module,
    after: nn.Module,
    *inputs: Any,
    atol: float = 1e-5,
    rtol: float = 1e-5,
    loss: Callable[[Any], torch.Tensor] | None = None,
    **kwargs: Any,
) -> None:
    """Run both models on the same inputs and random state and compare all results.

    Compared in this order: the outputs' structure, shapes and dtypes, their values, the loss, the inputs after the forward, the
    gradients of inputs that require one, and the gradient of every parameter under its name in ``before``. Gradients of sharded
    parameters are gathered over their group, which makes the call collective. NaN is never equal. Neither model's ``.grad``
    changes.

    Args:
        before: The unmodified model, in the same mode (training or not) as ``after``.
        after: The scheduled model.
        *inputs: Positional inputs; each run gets its own copies of the tensors.
        atol: Largest absolute difference.
        rtol: Largest difference relative to ``before``.
        loss: ``loss(outputs)``. By default a sum of all floating-point outputs with fixed weights that differ between elements,
            since the plain sum of a softmax or a layer norm has no gradient. If nothing is differentiable only outputs are
            compared.
        **kwargs: Keyword inputs.

    Raises:
        AssertionError: names the first tensor that differs, with the largest absolute and relative error.
    """
    if before.training != after.training:
        modes = ["train" if model.training else "eval" for model in (before, after)]
        raise AssertionError(f"before is in {modes[0]} mode; after is in {modes[1]} mode")
    state = rng_state()
    expected = run_model(before, inputs, kwargs, loss)
    set_rng_state(state)
    actual = run_model(after, inputs, kwargs, loss)
    for difference in differences(expected, actual, Tolerance(atol, rtol)):
        raise AssertionError(difference.message)


def run_model(
    model: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], loss: Callable[[Any], torch.Tensor | None] | None = None
) -> Run:
    """Run a model forward and backward on copies of the inputs, and restore ``.grad``. Collective if it is sharded."""
    kept = {parameter: parameter.grad for parameter in model.parameters()}
    copies: Leaves = []
    args, keywords = copy_leaves(inputs, "", copies), copy_leaves(kwargs, "", copies)
    try:
        for parameter in kept:
            parameter.grad = None
        outputs = model(*args, **keywords)
        leaves = list(leaves_of(outputs, ""))
        values = [(path, leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf) for path, leaf in leaves]
        total = loss(outputs) if loss else weighted_sum(outputs)
        if total is not None and total.requires_grad:
            total.backward()  # type: ignore[no-untyped-call]
        input_grads = [leaf for path, tensor in copies if tensor.requires_grad for leaf in leaves_of(tensor.grad, path)]
        left = [leaf for path, tensor in copies for leaf in leaves_of(tensor.detach(), path)]
        return Run(values, None if total is None else total.detach(), input_grads, _named_gradients(model), left)
    finally:
        for parameter, grad in kept.items():
            parameter.grad = grad


def weighted_sum(outputs: Any) -> torch.Tensor | None:
    """Return a sum of all floating-point numbers with gradients, with fixed different weights; None if there are none."""
    total = None
    for _, leaf in leaves_of(outputs, ""):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            real = (torch.view_as_real(leaf) if leaf.is_complex() else leaf).double()
            real = torch.where(real.isfinite(), real, 0.0)  # infinities of both signs would have no sum
            weights = torch.cos(torch.arange(real.numel(), dtype=torch.float64, device=real.device)).view(real.shape)
            term = (real * weights).sum()
            total = term if total is None else total + term
    return total


def _named_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the full gradients by original name; a tied parameter occurs under each of its names."""
    found: dict[str, torch.Tensor | None] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for original in parameter_facts(parameter).names or (name,):
            if original not in found:
                found[original] = over_group(parameter, lambda held: None if held.grad is None else dense(held.grad))
    return found


def differences(expected: Run, actual: Run, tolerance: Tolerance) -> Iterator[Difference]:
    """Yield the differences of two runs, in the order of ``assert_equivalent``."""
    yield from _leaf_differences("output", expected.outputs, actual.outputs, tolerance)
    yield from difference("loss", expected.loss, actual.loss, tolerance)
    yield from _leaf_differences("what the forward left of input", expected.inputs, actual.inputs, tolerance)
    yield from _leaf_differences("gradient of input", expected.input_grads, actual.input_grads, tolerance)
    yield from named_differences("gradient", expected.param_grads, actual.param_grads, tolerance)


def named_differences(
    what: str, expected: Mapping[str, Any], actual: Mapping[str, Any], tolerance: Tolerance
) -> Iterator[Difference]:
    """Yield the differences of tensors under their names."""
    missing = [name for name in expected if name not in actual]
    if missing:
        message = f"{what} of {missing[0]!r}: after has no parameter of this original name, {len(missing)} are missing"
        yield Difference(f"{what} of {missing[0]!r}", message)
    for name, value in expected.items():
        if name in actual:
            yield from difference(f"{what} of {name!r}", value, actual[name], tolerance)


def difference(what: str, expected: Any, actual: Any, tolerance: Tolerance) -> Iterator[Difference]:
    """Yield the difference of two values, if any; shapes and dtypes are compared first."""
    if _kind(expected) != _kind(actual):
        yield Difference(what, f"{what}: expected {_kind(expected)}, found {_kind(actual)}")
    else:
        yield from _value_differences(what, expected, actual, tolerance)


def _leaf_differences(what: str, expected: Leaves, actual: Leaves, tolerance: Tolerance) -> Iterator[Difference]:
    """Yield the differences of leaves: structure, shapes and dtypes of all before any value."""
    before, after = [path for path, _ in expected], [path for path, _ in actual]
    if before != after:
        missing, extra = sorted(set(before) - set(after)), sorted(set(after) - set(before))
        yield Difference(what, f"{what}: the structure differs; missing {missing}, not expected {extra}")
        return
    pairs = [(what + path, one, other) for (path, one), (_, other) in zip(expected, actual, strict=True)]
    wrong = [pair for pair in pairs if _kind(pair[1]) != _kind(pair[2])]
    for pair in wrong or pairs:
        yield from difference(*pair, tolerance)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)} on {value.device.type}"
    if isinstance(value, OpaqueObject):
        return f"a {value.kind.__qualname__}"
    if isinstance(value, type):
        return f"a {value.__qualname__}"
    return "nothing" if value is None else f"a {type(value).__qualname__}"


def _value_differences(what: str, expected: Any, actual: Any, tolerance: Tolerance) -> Iterator[Difference]:
    if isinstance(expected, float):
        expected, actual = torch.tensor(expected), torch.tensor(actual)
    if isinstance(expected, torch.Tensor):
        yield from _tensor_differences(what, expected, actual, tolerance)
    elif expected != actual:
        yield Difference(what, f"{what}: expected {expected!r}, found {actual!r}")


_WIDER = {
    torch.complex32: torch.complex64,
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
    **{getattr(torch, name): torch.float32 for name in dir(torch) if name.startswith("float8_")},
}
"""Types that torch stores but cannot compare."""


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same numbers in a type that can be compared."""
    return tensor.view(torch.int64) if tensor.dtype is torch.uint64 else tensor.to(_WIDER.get(tensor.dtype, tensor.dtype))


def _tensor_differences(what: str, expected: torch.Tensor, actual: torch.Tensor, tolerance: Tolerance) -> Iterator[Difference]:
    expected, actual = comparable(expected), comparable(actual)
    for label, tensor in (("before", expected), ("after", actual)):
        if count := int(torch.isnan(tensor).sum()):
            yield Difference(what, f"{what}: {label} has {count} NaN in {tensor.numel()} elements")
            return
    close = tolerance.accepts(expected, actual, what)
    if bool(close.all()):
        return
    wide = torch.complex128 if expected.is_complex() else torch.float64
    error = torch.where(expected == actual, 0, (actual.to(wide) - expected.to(wide)).abs())
    relative = error / expected.to(wide).abs()
    relative = torch.where(error == 0, 0, relative)
    wrong, allowed = int((~close).sum()), tolerance.absolute(expected, what)
    is_rounded = (allowed or tolerance.rtol) and (expected.is_floating_point() or expected.is_complex())
    bounds = f"; allowed {allowed:.3g} + {tolerance.rtol:g} x before" if is_rounded else ""
    place = tuple(map(int, torch.unravel_index(error.argmax(), error.shape)))
    largest = f"largest absolute error {_number(error)} at {place}, largest relative error {_number(relative)}"
    message = f"{what}: {wrong} of {close.numel()} elements differ; {largest}{bounds}"
    yield Difference(what, message, float(error.max()), float(relative.max()))


def _number(error: torch.Tensor) -> str:
    value = float(error.max())
    return "infinity" if math.isinf(value) else f"{value:.3g}"
