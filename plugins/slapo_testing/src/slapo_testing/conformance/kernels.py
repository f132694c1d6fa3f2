"""Checks of an implementation of a kernel, beside the eager one."""

from __future__ import annotations

import inspect
import math
import pkgutil
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from slapo_core import ScheduleError, rng_state
from slapo_verify.comparison import Run, Tolerance, differences

from .checks import Check, run_all
from .examples.case import ConformanceError, check_sentence
from .examples.examples import KernelExample
from .examples.kernel_calls import kernel_calls
from .examples.validation import check_examples_list
from .numeric_checks.numerics import RUNS
from .numeric_checks.precision import RELATIVE_TOLERANCE, rounding_errors

if TYPE_CHECKING:
    from slapo_kernels import Implementation

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes in which an implementation is compared, if it supports them."""


def kernel_checks(kernel: str, implementation: str, examples: Iterable[KernelExample] = (), device: str = "cpu") -> list[Check]:
    """Return the checks of an implementation of a kernel, for ``pytest.mark.parametrize``.

    Values and gradients are compared with those of the eager implementation, in every dtype that the implementation supports.
    The kit has calls of each kernel, which the implementation computes or refuses.

    Args:
        kernel: Name of the kernel.
        implementation: Name of the implementation.
        examples: Further calls, which it must compute unless they say what is ``refused``.
        device: Device of the tensors.
    """
    given = check_examples_list("kernel", kernel, examples, KernelExample)
    cases = [KernelCase(kernel, implementation, device, example) for example in [*given, *kernel_calls(kernel)]]
    owner = f"{kernel}={implementation}"
    checks = [
        Check(owner, "registered", None, partial(_chosen, kernel, implementation, device)),
        Check(owner, "signature", None, partial(_signature, kernel, implementation, device)),
        Check(owner, "some call", None, partial(_some_call, cases)),
    ]
    for case in cases:
        checks += [Check(owner, check, case.example, partial(_check_call, case, check)) for check in KERNEL_CHECKS]
    return checks


def check_kernel(kernel: str, implementation: str, examples: Iterable[KernelExample] = (), device: str = "cpu") -> None:
    """Check an implementation of a kernel, as ``kernel_checks`` does.

    Raises:
        ConformanceError: one sentence for each check that failed.
    """
    run_all(kernel_checks(kernel, implementation, examples, device))


@dataclass(frozen=True)
class Circumstance:
    """Way to make a call.

    Args:
        dtype: Dtype of floating-point arguments.
        only: The argument that has a gradient, ``""`` for none; default: all floating-point ones.
        contiguous: False for inputs in another memory order, and for the gradient of a sum, which is one number expanded.
        autocast: True for a call under autocast.
        twice: True for two backwards, of half the gradient each; a second one may be refused.
    """

    dtype: torch.dtype = torch.float32
    only: str | None = None
    contiguous: bool = True
    autocast: bool = False
    twice: bool = False

    def __str__(self) -> str:
        gradients = {None: "", "": ", without gradients"}.get(self.only, f", with a gradient of {self.only!r} alone")
        memory = "" if self.contiguous else ", not contiguous"
        return f"in {str(self.dtype).removeprefix('torch.')}{gradients}{memory}" + (" under autocast" if self.autocast else "")


@dataclass(frozen=True)
class KernelCase:
    """A call of one implementation of a kernel.

    Args:
        kernel: Name of the kernel.
        implementation: Name of the implementation.
        device: Device of the tensors.
        example: The call.
    """

    kernel: str
    implementation: str
    device: str
    example: KernelExample

    def compare(self, way: Circumstance) -> None:
        """Compare the results with those of the eager implementation.

        Raises:
            ConformanceError: the results differ, or the call fails without a reason.
            ScheduleError: the implementation refuses the call.
        """
        try:
            wanted, is_random = self.run("eager", way)
        except Exception:
            if way == Circumstance():  # a wrong example
                raise
            return
        try:
            found, _ = self.run(self.implementation, way)
        except ScheduleError:
            raise
        except Exception as error:
            hint = "compute the call, or return the reason from refuses"
            raise ConformanceError(f"{way}: the call raises {type(error).__name__}: {error}; {hint}") from error
        wrong = next(differences(wanted, found, self._tolerance(way, wanted)), None)
        if wrong is not None and is_random:  # other random numbers
            if way == Circumstance():
                self._compare_means(way)
            wrong = next(differences(wanted, found, Tolerance(math.inf, 0.0)), None)
        if wrong is not None:
            raise ConformanceError(f"{way}: {wrong.message}")

    def run(self, choice: str, way: Circumstance, seed: int = 1) -> tuple[Run, bool]:
        """Return outputs, gradients and the arguments afterwards, and True if the call drew random numbers."""
        from slapo_kernels import eager, run  # noqa: PLC0415  installed where kernels are written

        bound = inspect.signature(getattr(eager, self.kernel)).bind(*self.example.args, **self.example.kwargs)
        tensors = {name: self._own(name, value, way) for name, value in bound.arguments.items() if torch.is_tensor(value)}
        bound.arguments.update(tensors)
        torch.manual_seed(seed)
        before = rng_state().devices
        with torch.autocast(self.device, torch.bfloat16, enabled=way.autocast):
            made = run(self.kernel, *bound.args, choice=choice, **bound.kwargs)
        draws = any(not torch.equal(state, before[device]) for device, state in rng_state().devices.items())
        outputs = made if isinstance(made, tuple) else (made,)
        incoming = [_output_gradient(each, way) for each in outputs]
        _backward([(output, grad) for output, grad in zip(outputs, incoming, strict=True) if output.requires_grad], way)
        leaves = {name: each for name, each in tensors.items() if each.requires_grad}
        gradients: dict[str, torch.Tensor | None] = {
            name: torch.zeros_like(each) if each.grad is None else each.grad for name, each in leaves.items()
        }
        results = [(f"[{index}]" if len(outputs) > 1 else "", each.detach()) for index, each in enumerate(outputs)]
        afterwards = [(f" {name!r}", each.detach()) for name, each in tensors.items()]
        afterwards += [(", the gradient of the output", each) for each in incoming]
        return Run(results, None, [], gradients, afterwards), draws

    def _own(self, name: str, value: torch.Tensor, way: Circumstance) -> torch.Tensor:
        floating = value.is_floating_point()
        own = value.detach().to(self.device, way.dtype if floating else None, copy=True)
        if not way.contiguous:
            own = own.transpose(0, -1).contiguous().transpose(0, -1) if own.dim() > 1 else own.repeat_interleave(2)[::2]
        has_gradient = floating and not value.isinf().any() and way.only in (None, name)
        return own.requires_grad_(bool(has_gradient))

    def _tolerance(self, way: Circumstance, wanted: Run) -> Tolerance:
        """Return a tolerance that allows rounding errors like those of the eager implementation."""
        exact, _ = self.run("eager", replace(way, dtype=torch.float64, autocast=False))
        half = way.autocast or way.dtype in (torch.bfloat16, torch.float16)
        relative = RELATIVE_TOLERANCE if half else 100 * torch.finfo(way.dtype).eps
        return Tolerance(0.0, relative, relative, rounding_errors(exact, wanted))

    def _compare_means(self, way: Circumstance) -> None:
        """Compare the means over many seeds; gradients of squares show whether forward and backward drop the same numbers."""
        wanted, found = self._moments("eager", way), self._moments(self.implementation, way)
        for name, (mean, variance) in wanted.items():
            other, variance_of_other = found[name]
            apart = float(((mean - other).abs() / (variance + variance_of_other).sqrt().clamp(min=1e-3)).max())
            if apart > 6:
                raise ConformanceError(f"{way}: the mean of the {name} over {RUNS} seeds is {apart:.1f} standard errors off")

    def _moments(self, choice: str, way: Circumstance) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return the mean of each result, and the variance of the mean."""
        runs = [self.run(choice, way, seed)[0] for seed in range(RUNS)]
        named = [{f"output{path}": each for path, each in run.outputs} for run in runs]
        for results, run in zip(named, runs, strict=True):
            results.update({f"gradient of {name!r}": grad for name, grad in run.param_grads.items()})
        stacked = {name: torch.stack([each[name] for each in named]).double() for name in named[0]}
        return {name: (each.mean(0), each.var(0) / RUNS) for name, each in stacked.items()}


def _output_gradient(output: torch.Tensor, way: Circumstance) -> torch.Tensor:
    """Return the gradient of a loss."""
    if not way.contiguous:
        return torch.ones((), dtype=output.dtype, device=output.device).expand(output.shape)
    return output.detach() + torch.cos(torch.arange(output.numel(), device=output.device)).view(output.shape).to(output.dtype)


def _backward(pairs: list[tuple[torch.Tensor, torch.Tensor]], way: Circumstance) -> None:
    """Run backward; raise ``ScheduleError`` if a second one is refused."""
    if not pairs:
        return
    outputs, gradients = zip(*pairs, strict=True)
    try:
        if way.twice:
            torch.autograd.backward(outputs, [each / 2 for each in gradients], retain_graph=True)
            gradients = tuple(each / 2 for each in gradients)
        torch.autograd.backward(outputs, gradients)
    except RuntimeError as error:
        if way.twice:  # it may free what it saved
            raise ScheduleError(f"no second backward: {error}") from error
        raise


def _chosen(kernel: str, implementation: str, device: str) -> Implementation:
    """Return an implementation.

    Raises:
        ScheduleError: it is not registered, or cannot be used here.
    """
    from slapo_kernels import choose  # noqa: PLC0415  installed where kernels are written

    return choose(kernel, device, None, implementation)


def _signature(kernel: str, implementation: str, device: str) -> None:
    """Check that the function, ``refuses`` and ``avoids`` take the arguments of the eager implementation."""
    from slapo_kernels import eager  # noqa: PLC0415  installed where kernels are written

    found = _chosen(kernel, implementation, device)
    wanted = inspect.signature(getattr(eager, kernel))
    target = pkgutil.resolve_name(found.target) if isinstance(found.target, str) else found.target
    for what, function in (("the implementation", target), ("refuses", found.refuses), ("avoids", found.avoids)):
        if function is not None and (why := _misfit(inspect.signature(function), wanted, defaults=function is target)):
            raise ConformanceError(f"{what} is called as {kernel}{wanted}: {why}")


def _misfit(given: inspect.Signature, wanted: inspect.Signature, defaults: bool) -> str | None:
    """Return the difference of two signatures, or None if calls of the second fit the first."""
    first = [
        name for name, each in wanted.parameters.items() if each.kind is not each.KEYWORD_ONLY and each.default is each.empty
    ]
    named = {name: name for name in wanted.parameters if name not in first}
    try:
        taken = given.bind(*first, **named).arguments
    except TypeError as error:
        return str(error)
    strict = wanted.parameters if not defaults else taken  # refuses and avoids may have names of their own
    if wrong := [name for name, value in taken.items() if isinstance(value, str) and name != value and name in strict]:
        return f"{wrong[0]!r} takes the place of {taken[wrong[0]]!r}"
    for name, each in wanted.parameters.items():
        own = given.parameters.get(name, each)
        if defaults and own.default != each.default and each.default is not each.empty:
            return f"{name!r} is {own.default!r} by default"
    return None


def _some_call(cases: Iterable[KernelCase]) -> None:
    """Check that the implementation computes one of the calls."""
    reason: Exception | None = None
    for case in cases:
        try:
            return case.compare(_ways(case, "values")[0])
        except ScheduleError as error:
            reason = error
        except ConformanceError:
            return None  # its own check tells
    raise ConformanceError(f"every call is refused; give an example that it computes; the last reason: {reason}")


KERNEL_CHECKS = ("values", "strided", "gradients", "autocast")
"""Checks that run on each call of a kernel."""


def _ways(case: KernelCase, check: str) -> list[Circumstance]:
    """Return the circumstances of one check: all dtypes for values, else the first one."""
    found = _chosen(case.kernel, case.implementation, case.device)
    every = [Circumstance(dtype) for dtype in DTYPES if found.lacks(case.device, dtype) is None]
    first = every[0]
    if check == "values":
        return every
    if check == "strided":
        return [replace(first, contiguous=False)]
    if check == "autocast":
        return [replace(first, autocast=True)] if first.dtype is torch.float32 else []
    names = case.run("eager", first)[0].param_grads
    return [*(replace(first, only=name) for name in ("", *names)), replace(first, twice=True)]


def _check_call(case: KernelCase, check: str) -> None:
    """Compare a call in each circumstance; the implementation may refuse it for a reason."""
    expected = case.example.refused
    for way in _ways(case, check):
        try:
            case.compare(way)
        except ScheduleError as error:
            check_sentence(error, f"the call {way}")
            if check == "values" and (expected == "" or not re.search(expected or "", str(error))):
                wanted = f", not with {expected!r}" if expected else ""
                raise ConformanceError(f"{way}: the call is refused with {str(error)!r}{wanted}") from error
        else:
            if check == "values" and expected:
                raise ConformanceError(f"{way}: the call is computed; it should be refused with {expected!r}")
