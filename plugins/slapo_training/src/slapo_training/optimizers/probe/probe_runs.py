"""Steps of copies of an optimizer on small parameters: whole or in parts, together or apart."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from ...distributed._torch_private import CollectiveCalledError
from .introspection import OneStep, Optimizer, advance, counts, groups_in, optimizers_in, parameters_in, replace_in_tables
from .optimizer_copies import copy_optimizer, probe_parameter, representatives, substituted_states
from .step_operators import Operators, StepOperators

Cut = Callable[[torch.Tensor], torch.Tensor]


class Size(NamedTuple):
    """Shapes of the stepped parameters by number of dimensions, and number of steps of each phase."""

    shapes: dict[int, tuple[int, ...]]
    steps: tuple[int, ...]


SMALL = Size({0: (), 1: (12,), 2: (8, 6), 3: (4, 4, 4), 4: (4, 4, 3, 3)}, (10, 2, 2))
_ADVANCES = (1_000, 1_000_000)
"""Steps by which counters are advanced before each later phase, to pass warm-ups."""
_SCALES = (1.0, 1.0, 10.0, 0.1)
"""Scales of the gradients of each step, so that a limit on norms is exceeded in some steps."""
_TOLERANCE = 1e-3
_LEARNING_RATE = 0.01


class ProbeRuns:
    """Steps of copies of an optimizer with a few small parameters.

    Args:
        size: Shapes of the parameters and numbers of steps.

    Attributes:
        is_sparse: True if gradients are sparse, with all rows.
        goes_ahead: True if counters are advanced between phases.
        draws: True if a run used the process's random numbers.
        keeps_factors: True if a run left state that is neither scalar nor per-element.
    """

    def __init__(self, optimizer: Optimizer, size: Size, is_sparse: bool = False, goes_ahead: bool = True) -> None:
        self._optimizer, self._size, self.is_sparse, self.goes_ahead = optimizer, size, is_sparse, goes_ahead
        self._all, self._chosen = parameters_in(optimizer), representatives(optimizer, merges=size is not SMALL)
        self._places = {id(parameter): place for place, parameter in enumerate(self._chosen)}
        self.draws = self.keeps_factors = False
        if not self._chosen:
            raise ValueError("it has no parameters")

    def run_first(self) -> list[torch.Tensor]:
        """Return the updates of whole parameters, with dense gradients, or sparse ones if the optimizer needs these.

        Raises:
            Exception: the optimizer fails with both.
        """
        failure: Exception | None = None
        for self.is_sparse, self.goes_ahead in ((False, True), (False, False), (True, True), (True, False)):
            try:
                found = self.run(identity_cut)
            except CollectiveCalledError:
                raise
            except Exception as err:
                failure = failure or err
            else:
                if not self.goes_ahead or all(bool(each.isfinite().all()) for each in found):
                    return found
        assert failure is not None
        raise failure

    def run(
        self,
        cut: Cut | Sequence[Cut],
        places: Sequence[int] | None = None,
        calls: Sequence[Sequence[int]] = (),
        after_step: Callable[[Optimizer, bool], None] = lambda optimizer, is_last: None,
        context: AbstractContextManager[Any] | None = None,
    ) -> list[torch.Tensor]:
        """Return the update of each parameter in each phase, phase by phase.

        Args:
            cut: Returns the part of a parameter or gradient to step; or one function per parameter.
            places: Indices of the parameters that exist in the run; None for all.
            calls: Indices of the parameters of each call of ``step``; empty for one call.
            after_step: Called with the optimizer, and True after the last step of a phase.
            context: Entered around each step.
        """
        numbers = torch.Generator().manual_seed(0)
        whole = [torch.randn(shape, generator=numbers) for shape in self.shapes]
        cuts = cut if isinstance(cut, Sequence) else [cut] * len(whole)
        substitutes = [
            probe_parameter(old, own(value.to(old.device)), is_bare=cut in FLAT)
            for old, value, own in zip(self._chosen, whole, cuts, strict=True)
        ]
        stepped = range(len(substitutes)) if places is None else places
        trial = self._copy(substitutes, stepped)
        _seed()
        state, other = torch.get_rng_state(), random.getstate()
        added, step = list[torch.Tensor](), 0
        for phase, steps in enumerate(self._size.steps if self.goes_ahead else self._size.steps[:1]):
            before = [each.detach().clone() for each in substitutes]
            for number in range(steps):
                scale = _SCALES[step % len(_SCALES)]
                for place, (each, value) in enumerate(zip(substitutes, whole, strict=True)):
                    gradient = scale * torch.randn(value.shape, generator=numbers)
                    own = cuts[place](gradient.to(each.device)).to(each.dtype).clone()
                    each.grad = (own.to_sparse(1) if self.is_sparse else own) if place in stepped else None
                is_last = number == steps - 1 and phase < len(_ADVANCES)
                known = counts(trial) if is_last else None
                with context or nullcontext():
                    if calls:
                        _step_in_several_calls(trial, substitutes, calls)
                    else:
                        type(trial).step(trial)
                if known is not None and self.goes_ahead:
                    advance(trial, known, _ADVANCES[phase])
                after_step(trial, number == steps - 1)
                step += 1
            added += [each.detach() - old for each, old in zip(substitutes, before, strict=True)]
        self.draws = self.draws or not torch.equal(state, torch.get_rng_state()) or random.getstate() != other
        self.keeps_factors = self.keeps_factors or _keeps_factors(trial)
        return added

    def operators(self) -> Operators:
        """Return the operators of the steps of whole parameters."""
        recorder = StepOperators()
        self.run(identity_cut, context=recorder)
        return recorder.found

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [self._shape(each) for each in self._chosen]

    def is_same_in_parts(self, whole: Sequence[torch.Tensor], cuts: tuple[Cut, Cut]) -> bool:
        """Return True if two optimizers, each with one part of every parameter, update as one does with whole ones."""
        for cut in cuts:
            try:
                found = self.run(cut)
            except CollectiveCalledError:
                raise
            except Exception:
                return False
            if not all(is_close(part, cut(full)) for part, full in zip(found, whole, strict=True)):
                return False
        return True

    def depends_on_other_parameters(self, whole: Sequence[torch.Tensor]) -> bool:
        """Return True if the update of some parameters changes without the others."""
        for first in (0, 1):
            places = range(first, len(self._chosen), 2)
            if places:
                found = self.run(identity_cut, places)
                pairs = [(found[at], whole[at]) for at in range(len(whole)) if at % len(self._chosen) in places]
                if not all(is_close(own, full) for own, full in pairs):
                    return True
        return False

    def is_same_in_several_calls(self, whole: Sequence[torch.Tensor]) -> bool:
        """Return True if two calls of ``step``, each of half of the parameters, update as one call of all does."""
        calls = [each for first in (0, 1) if (each := range(first, len(self._chosen), 2))]
        return len(calls) < 2 or all(map(is_close, self.run(identity_cut, calls=calls), whole))

    def _shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        return self._size.shapes.get(parameter.dim(), (2,) * parameter.dim())

    def _copy(self, substitutes: list[nn.Parameter], places: Sequence[int]) -> Optimizer:
        dummies: dict[int, nn.Parameter] = {}
        memo: dict[int, Any] = {}
        for parameter in self._all:
            place = self._places.get(id(parameter))
            if place is None:
                if parameter.dim() not in dummies:
                    dummies[parameter.dim()] = probe_parameter(
                        parameter, torch.zeros(self._shape(parameter), device=parameter.device)
                    )
                memo[id(parameter)] = dummies[parameter.dim()]
            else:
                memo[id(parameter)] = substitutes[place]
        memo |= substituted_states(self._optimizer, memo)
        trial = copy_optimizer(self._optimizer, memo)
        replace_in_tables(trial, self._all, lambda old: [memo[id(old)]])
        kept = {id(substitutes[place]) for place in places}
        for group in groups_in(trial):
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in kept]
            _set_rate(group)
        if self._size is not SMALL:
            for each in optimizers_in(trial):  # some optimizers read the first parameter of a group
                each.param_groups[:] = [group for group in each.param_groups if group["params"]] or each.param_groups
        return trial


def _step_in_several_calls(trial: Optimizer, parameters: Sequence[nn.Parameter], calls: Sequence[Sequence[int]]) -> None:
    """Take one step by several calls of ``step``, each of some parameters, as ZeRO does group by group."""
    gradients, step = [each.grad for each in parameters], OneStep(trial)
    groups = [(group, group["params"]) for group in groups_in(trial)]
    for number, call in enumerate(calls):
        if number:
            step.restore_counters()
        own = {id(parameters[place]) for place in call}
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient if id(parameter) in own else None
        for group, members in groups:
            group["params"] = [each for each in members if id(each) in own]
        type(trial).step(trial)
    for group, members in groups:
        group["params"] = members


def _set_rate(group: dict[str, Any]) -> None:
    """Set a nonzero learning rate; a warm-up starts with zero."""
    rate = group.get("lr")
    if isinstance(rate, torch.Tensor):
        rate.fill_(_LEARNING_RATE)
    elif isinstance(rate, float | int):
        group["lr"] = _LEARNING_RATE


def _keeps_factors(optimizer: Optimizer) -> bool:
    """Return True if the state has tensors that are neither scalar nor per-element."""
    for each in optimizers_in(optimizer):
        for parameter, state in each.state.items():
            shape = parameter.shape if isinstance(parameter, torch.Tensor) else None
            for value in state.values() if isinstance(state, dict) else ():
                found = value if isinstance(value, list | tuple) else [value]
                if any(isinstance(item, torch.Tensor) and item.numel() > 1 and item.shape != shape for item in found):
                    return True
    return False


def is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return True if an update equals the expected one up to rounding."""
    largest = expected.abs().max().item() if expected.numel() else 0.0
    return found.shape == expected.shape and bool((found - expected).abs().le(_TOLERANCE * largest).all())


@contextmanager
def isolate() -> Iterator[None]:
    """Context that restores random states and hides warnings."""
    before, others = torch.get_rng_state(), random.getstate()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    try:
        with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_rng_state(before)
        random.setstate(others)
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)


def identity_cut(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _half(tensor: torch.Tensor, dim: int, number: int) -> torch.Tensor:
    if tensor.dim() <= dim:
        return tensor
    return tensor.tensor_split(2, dim)[number]


def _flat_half(tensor: torch.Tensor, number: int) -> torch.Tensor:
    return _half(tensor.reshape(-1), 0, number) if tensor.dim() else tensor


def _corner(tensor: torch.Tensor, size: int) -> torch.Tensor:
    return tensor[tuple(slice(size) for _ in tensor.shape)]


_CORNER = 8
ROWS: tuple[Cut, Cut] = (lambda tensor: _half(tensor, 0, 0), lambda tensor: _half(tensor, 0, 1))
COLUMNS: tuple[Cut, Cut] = (lambda tensor: _half(tensor, 1, 0), lambda tensor: _half(tensor, 1, 1))
FLAT: tuple[Cut, Cut] = (lambda tensor: _flat_half(tensor, 0), lambda tensor: _flat_half(tensor, 1))
CORNERS: tuple[Cut, Cut] = (lambda tensor: _corner(tensor, _CORNER), lambda tensor: _corner(tensor, 4 * _CORNER))
