"""Numeric probe of an optimizer: what an element's update depends on, by stepping small parameters whole and in parts."""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from slapo_core.causes import reason
from slapo_core.parameters import shard_spec

from .._torch_private import CollectiveFound, CollectiveWatch
from ..gradient_hooks.cut_attributes import matches
from .parameter_tables import has_positions, marks_at, replace_in_tables
from .step_counters import OneStep, advance, counts
from .tree import Optimizer, groups_in, optimizers_in, parameters_in


class Finding(NamedTuple):
    """Dependences of an optimizer's update.

    Args:
        shape: Whether it changes where a rank has rows or columns of a parameter instead of the whole.
        flat: Whether it changes where a rank has a range of the flattened parameter.
        coupled: Whether the update of one parameter depends on which others there are.
        draws: Whether a step draws random numbers of the process.
        communicates: Whether a step calls collectives.
        why_unknown: The reason why it could not be tried; it is then taken to depend on the shape.
    """

    shape: bool = False
    flat: bool = False
    coupled: bool = False
    draws: bool = False
    communicates: bool = False
    why_unknown: str = ""


class Size(NamedTuple):
    """Shapes of the parameters that are stepped, by their number of dimensions, and how often in each phase."""

    shapes: dict[int, tuple[int, ...]]
    steps: tuple[int, ...]


_SMALL = Size({0: (), 1: (12,), 2: (8, 6), 3: (4, 4, 4), 4: (4, 4, 3, 3)}, (10, 2, 2))
_LARGE = Size({0: (), 1: (512,), 2: (192, 160), 3: (16, 16, 16), 4: (32, 16, 3, 3)}, (3, 1))
"""Optimizers treat small parameters differently: Adafactor factors, Shampoo preconditions, from some size on."""
_LONGEST, _THIN, _SQUARE = 2**15, 4, 1280
"""Limits of what stands for still larger parameters of the model: of a long side, of the other one, of two alike."""
_MOST = 2**23
"""Elements of all that are tried at once: a model may have a group for each layer."""
_CORNER = 8
_AHEAD = (1_000, 1_000_000)
"""Steps that counters are moved forward by, before the phases behind the first: optimizers have warm-ups."""
_SCALES = (1.0, 1.0, 10.0, 0.1)
"""Scales of the gradients, step by step, so that a limit on norms is passed in some steps."""
_TOLERANCE = 1e-3
_REPRESENTATIVES = 2
_NUMBERS = ("_fsdp_orig_uid",)
"""Attributes by which a library numbers parameters: each would be of a kind of its own."""

Cut = Callable[[torch.Tensor], torch.Tensor]


def probe(optimizer: Optimizer) -> Finding:
    """Probe what the updates of an optimizer depend on.

    Neither the optimizer nor its parameters nor any random state are changed: copies of it step small parameters.

    Args:
        optimizer: As it was made; it has not stepped.
    """
    kind = _kind_of_torchs_own(optimizer)
    if kind in _known:
        return _known[kind]
    with apart():
        try:
            found = _probed(optimizer)
        except CollectiveFound:
            found = Finding(shape=True, flat=True, coupled=True, communicates=True)
        except Exception as err:
            found = Finding(shape=True, flat=True, coupled=has_positions(optimizer), why_unknown=reason(err))
    if kind is not None:
        _known[kind] = found
    return found


_known: dict[object, Finding] = {}
"""Findings by kind of optimizer: a process may build many engines."""


def _kind_of_torchs_own(optimizer: Optimizer) -> object:
    """Return all that the finding of an optimizer of torch's own classes depends on; None for another class or a used one."""
    kind = type(optimizer)
    if getattr(torch.optim, kind.__name__, None) is not kind or optimizer.state:
        return None
    chosen = {id(each): (each.dim(), each.dtype, each.device) for each in _representatives(optimizer, merges=False)}
    if not chosen:
        return None
    groups = [
        (
            [(name, repr(value)) for name, value in sorted(group.items()) if name not in ("params", "param_names")],
            [chosen[id(each)] for each in group["params"] if id(each) in chosen],
        )
        for group in optimizer.param_groups
    ]
    return kind, kind.step, repr((groups, sizes_of(optimizer)))


def is_same_in_turns(optimizer: Optimizer) -> bool:
    """Return whether calls of ``step`` of some parameters each, put together as ``OneStep`` does, are a step of all.

    Args:
        optimizer: As it was made; it has not stepped. Nothing is changed.
    """
    with apart():
        try:
            trial = Trial(optimizer, _SMALL)
            whole = trial.run_first()
        except Exception:  # it was probed before, or shows itself in the first step
            return True
        try:
            return trial.is_same_in_turns(whole)
        except Exception:
            return False


def _probed(optimizer: Optimizer) -> Finding:
    trial = Trial(optimizer, _SMALL)
    with CollectiveWatch():  # type: ignore[no-untyped-call]
        whole = trial.run_first()
    coupled = trial.draws or trial.is_coupled(whole)
    shape = trial.keeps_factors or not trial.is_same_in_parts(whole, _rows) or not trial.is_same_in_parts(whole, _columns)
    flat = shape or not trial.is_same_in_parts(whole, _flat)
    for size in (_LARGE, *_larger(optimizer)) if not shape else ():
        large = Trial(optimizer, size, trial.is_sparse, trial.goes_ahead)
        whole = large.run(_all)
        shape = large.keeps_factors or not all(large.is_same_in_parts(whole, cuts) for cuts in (_rows, _columns, _corners))
        flat = flat or shape or not large.is_same_in_parts(whole, _flat)
        if shape:
            break
    return Finding(shape, flat, coupled or has_positions(optimizer), trial.draws)


def sizes_of(optimizer: Optimizer) -> list[Size]:
    """Return all sizes that tell how an optimizer steps parameters like its own."""
    return [_SMALL, _LARGE, *_larger(optimizer)]


def _larger(optimizer: Optimizer) -> Iterator[Size]:
    """Sizes near those of the model, where these are larger than the largest that is always tried."""
    found: dict[int, tuple[int, ...]] = {}
    for parameter in parameters_in(optimizer):
        spec = shard_spec(parameter)
        shape = tuple(parameter.shape) if spec is None else tuple(spec.full_shape)
        if len(shape) in (1, 2):
            found[len(shape)] = tuple(map(max, found.get(len(shape), shape), shape))
    most = max(_MOST // len(_representatives(optimizer, merges=True)), _THIN)
    longest, square = min(_LONGEST, most // _THIN), min(_SQUARE, math.isqrt(most))
    long = {number: tuple(min(size, longest) for size in shape) for number, shape in found.items()}
    line, (rows, columns) = long.get(1, (1,)), long.get(2, (1, 1))
    shapes = [(rows, _THIN), (_THIN, columns), (min(rows, square), min(columns, square))]
    largest = _LARGE.shapes
    if max(rows, columns) > max(largest[2]) or line > largest[1]:
        for shape in shapes:
            yield Size({**_SMALL.shapes, 1: line, 2: shape}, (2,))


class Trial:
    """Steps of copies of an optimizer with few small parameters in the places of its own.

    Args:
        optimizer: The optimizer that is copied.
        size: Shapes of the parameters and number of steps.

    Attributes:
        is_sparse: Whether gradients are sparse ones, of all rows.
        goes_ahead: Whether counters are moved forward between phases.
        draws: Whether a run drew random numbers of the process.
        keeps_factors: Whether a run left state that is neither a number nor one for each element.
    """

    def __init__(self, optimizer: Optimizer, size: Size, is_sparse: bool = False, goes_ahead: bool = True) -> None:
        self._optimizer, self._size, self.is_sparse, self.goes_ahead = optimizer, size, is_sparse, goes_ahead
        self._all, self._chosen = parameters_in(optimizer), _representatives(optimizer, merges=size is not _SMALL)
        self._places = {id(parameter): place for place, parameter in enumerate(self._chosen)}
        self.draws = self.keeps_factors = False
        if not self._chosen:
            raise ValueError("it has no parameters")

    def run_first(self) -> list[torch.Tensor]:
        """Return what some steps add to whole parameters, of gradients as the optimizer takes them: dense, or sparse ones.

        Raises:
            Exception: it takes neither.
        """
        failure: Exception | None = None
        for self.is_sparse, self.goes_ahead in ((False, True), (False, False), (True, True), (True, False)):
            try:
                found = self.run(_all)
            except CollectiveFound:
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
    ) -> list[torch.Tensor]:
        """Return what each phase of steps adds to each parameter, phase by phase.

        Args:
            cut: Gives the part of a parameter, or of its gradient, that is stepped; or one for each parameter.
            places: Numbers of the parameters that are stepped, without the others; None for all.
            calls: Numbers of those that are stepped by one call of ``step``, call by call; none for all by one.
            after_step: Is called with the optimizer, and whether the step was the last of its phase.
        """
        numbers = torch.Generator().manual_seed(0)
        whole = [torch.randn(shape, generator=numbers) for shape in self.shapes]
        cuts = cut if isinstance(cut, Sequence) else [cut] * len(whole)
        substitutes = [
            _substitute(old, own(value.to(old.device)), is_bare=cut in _flat)
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
                is_last = number == steps - 1 and phase < len(_AHEAD)
                known = counts(trial) if is_last else None
                if calls:
                    _step_in_turns(trial, substitutes, calls)
                else:
                    type(trial).step(trial)
                if known is not None and self.goes_ahead:
                    advance(trial, known, _AHEAD[phase])
                after_step(trial, number == steps - 1)
                step += 1
            added += [each.detach() - old for each, old in zip(substitutes, before, strict=True)]
        self.draws = self.draws or not torch.equal(state, torch.get_rng_state()) or random.getstate() != other
        self.keeps_factors = self.keeps_factors or _keeps_factors(trial)
        return added

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the whole parameters that are stepped."""
        return [self._shape(each) for each in self._chosen]

    def is_same_in_parts(self, whole: Sequence[torch.Tensor], cuts: tuple[Cut, Cut]) -> bool:
        """Return whether two optimizers, each with its part of every parameter, add what one adds to the whole."""
        for cut in cuts:
            try:
                found = self.run(cut)
            except CollectiveFound:
                raise
            except Exception:
                return False
            if not all(is_close(part, cut(full)) for part, full in zip(found, whole, strict=True)):
                return False
        return True

    def is_coupled(self, whole: Sequence[torch.Tensor]) -> bool:
        """Return whether some parameters are stepped differently when others are not there."""
        for first in (0, 1):
            places = range(first, len(self._chosen), 2)
            if places:
                found = self.run(_all, places)
                pairs = [(found[at], whole[at]) for at in range(len(whole)) if at % len(self._chosen) in places]
                if not all(is_close(own, full) for own, full in pairs):
                    return True
        return False

    def is_same_in_turns(self, whole: Sequence[torch.Tensor]) -> bool:
        """Return whether two calls of ``step``, each of half of the parameters, add what one call of all adds."""
        calls = [each for first in (0, 1) if (each := range(first, len(self._chosen), 2))]
        return len(calls) < 2 or all(map(is_close, self.run(_all, calls=calls), whole))

    def _shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        return self._size.shapes.get(parameter.dim(), (2,) * parameter.dim())

    def _copy(self, substitutes: list[nn.Parameter], places: Sequence[int]) -> Optimizer:
        dummies: dict[int, nn.Parameter] = {}
        memo: dict[int, Any] = {}
        for parameter in self._all:
            place = self._places.get(id(parameter))
            if place is None:
                if parameter.dim() not in dummies:
                    dummies[parameter.dim()] = _substitute(
                        parameter, torch.zeros(self._shape(parameter), device=parameter.device)
                    )
                memo[id(parameter)] = dummies[parameter.dim()]
            else:
                memo[id(parameter)] = substitutes[place]
        memo |= _states(self._optimizer, memo)
        trial = _copied(self._optimizer, memo)
        replace_in_tables(trial, self._all, lambda old: [memo[id(old)]])
        kept = {id(substitutes[place]) for place in places}
        for group in groups_in(trial):
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in kept]
            _set_rate(group)
        if self._size is not _SMALL:
            for each in optimizers_in(trial):  # some look at the first parameter of a group
                each.param_groups[:] = [group for group in each.param_groups if group["params"]] or each.param_groups
        return trial


def _step_in_turns(trial: Optimizer, parameters: Sequence[nn.Parameter], calls: Sequence[Sequence[int]]) -> None:
    """Take one step by several calls, each of some parameters, as ZeRO does group by group."""
    gradients, step = [each.grad for each in parameters], OneStep(trial)
    groups = [(group, group["params"]) for group in groups_in(trial)]
    for number, call in enumerate(calls):
        if number:
            step.again()
        own = {id(parameters[place]) for place in call}
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient if id(parameter) in own else None
        for group, members in groups:
            group["params"] = [each for each in members if id(each) in own]
        type(trial).step(trial)
    for group, members in groups:
        group["params"] = members


def _copied(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Copy an optimizer and those that it holds; ``copy.deepcopy`` would lose all attributes but state and groups."""
    found = optimizers_in(optimizer)
    for each in found:
        memo[id(each)] = object.__new__(type(each))
    for each in found:
        for name, value in vars(each).items():
            if name.startswith("_optimizer_") and name.endswith("hooks"):
                vars(memo[id(each)])[name] = type(value)()
            elif name != "step":  # a learning-rate schedule puts a function there that steps the original
                vars(memo[id(each)])[name] = copy.deepcopy(value, memo)
    copied: Optimizer = memo[id(optimizer)]
    return copied


def _states(optimizer: Optimizer, memo: dict[int, Any]) -> dict[int, Any]:
    """Return replacements for the tensors that an optimizer has made for each element of its parameters, by id."""
    found: dict[int, Any] = {}
    for each in optimizers_in(optimizer):
        tables = [value for value in vars(each).values() if isinstance(value, dict)]
        for parameter, state in (item for table in tables for item in table.items()):
            if (new := memo.get(id(parameter))) is None:
                continue
            for value in state.values() if isinstance(state, dict) else [state]:
                if isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter.shape:
                    is_copy = torch.equal(value, parameter)
                    found[id(value)] = new.detach().clone() if is_copy else _shaped_like(value, new).to(value.dtype)
    return found


def _representatives(optimizer: Optimizer, merges: bool) -> list[nn.Parameter]:
    """Return some parameters of each kind that an optimizer may treat differently.

    Args:
        optimizer: The optimizer that has them.
        merges: Whether groups that differ in numbers alone are of one kind: models have a rate for each layer.
    """
    seen: dict[Any, int] = {}
    chosen: dict[int, nn.Parameter] = {}
    for number, group in enumerate(groups_in(optimizer)):
        for parameter in group["params"]:
            marks = [
                (name, repr(value))
                for name, value in vars(parameter).items()
                if isinstance(value, bool | int | float | str) and name not in _NUMBERS
            ]
            kind = (
                _options(group) if merges else number,
                parameter.dim(),
                parameter.dtype,
                tuple(marks),
                marks_at(optimizer, parameter),
            )
            if parameter.requires_grad and seen.setdefault(kind, 0) < _REPRESENTATIVES:
                seen[kind] += 1
                chosen[id(parameter)] = parameter
    return list(chosen.values())


def _options(group: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    given = ((key, value) for key, value in group.items() if key not in ("params", "param_names"))
    return tuple((key, repr(value != 0 if isinstance(value, float) else value)) for key, value in given)


def _substitute(old: nn.Parameter, value: torch.Tensor, is_bare: bool = False) -> nn.Parameter:
    """Return a parameter with this value and the attributes of another; a bare one, as a flat range is, has none."""
    new = nn.Parameter(value.detach().to(old.dtype).clone())
    if is_bare:
        return new
    spec = shard_spec(old)
    shapes = [tuple(old.shape), *([] if spec is None else [tuple(spec.full_shape)])]
    for name, each in vars(old).items():
        vars(new)[name] = _shaped_like(each, new) if any(matches(each, shape) for shape in shapes) else each
    return new


def _shaped_like(mask: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return the first element of a mask in the shape of another tensor: whole and parts cannot have the same mask."""
    values = mask.detach().reshape(-1)[:1]
    return values.expand(new.numel()).reshape(new.shape).clone()


def _set_rate(group: dict[str, Any]) -> None:
    """Set a learning rate that changes the weights: a warm-up begins with zero."""
    rate = group.get("lr")
    if isinstance(rate, torch.Tensor):
        rate.fill_(_RATE)
    elif isinstance(rate, float | int):
        group["lr"] = _RATE


_RATE = 0.01


def _keeps_factors(optimizer: Optimizer) -> bool:
    """Return whether the state has tensors that are neither a number nor one for each element of a parameter."""
    for each in optimizers_in(optimizer):
        for parameter, state in each.state.items():
            shape = parameter.shape if isinstance(parameter, torch.Tensor) else None
            for value in state.values() if isinstance(state, dict) else ():
                found = value if isinstance(value, list | tuple) else [value]
                if any(isinstance(item, torch.Tensor) and item.numel() > 1 and item.shape != shape for item in found):
                    return True
    return False


def is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    largest = expected.abs().max().item() if expected.numel() else 0.0
    return found.shape == expected.shape and bool((found - expected).abs().le(_TOLERANCE * largest).all())


@contextmanager
def apart() -> Iterator[None]:
    """Leave no trace in the process: random states stay, warnings are not shown."""
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


def _all(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _half(tensor: torch.Tensor, dim: int, number: int) -> torch.Tensor:
    if tensor.dim() <= dim:
        return tensor
    return tensor.tensor_split(2, dim)[number]


def _flat_half(tensor: torch.Tensor, number: int) -> torch.Tensor:
    return _half(tensor.reshape(-1), 0, number) if tensor.dim() else tensor


def _corner(tensor: torch.Tensor, size: int) -> torch.Tensor:
    return tensor[tuple(slice(size) for _ in tensor.shape)]


_rows: tuple[Cut, Cut] = (lambda tensor: _half(tensor, 0, 0), lambda tensor: _half(tensor, 0, 1))
_columns: tuple[Cut, Cut] = (lambda tensor: _half(tensor, 1, 0), lambda tensor: _half(tensor, 1, 1))
_flat: tuple[Cut, Cut] = (lambda tensor: _flat_half(tensor, 0), lambda tensor: _flat_half(tensor, 1))
_corners: tuple[Cut, Cut] = (lambda tensor: _corner(tensor, _CORNER), lambda tensor: _corner(tensor, 4 * _CORNER))
