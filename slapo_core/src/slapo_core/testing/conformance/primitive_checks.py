"""What a primitive promises, as checks of one example each."""

from __future__ import annotations

import copy
import inspect
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...errors import ScheduleError, SlapoError
from ...hookspecs import hookimpl
from ...parameters import facts, shard_spec
from ...replay import load_schedule
from ...schedule import Schedule
from ...wrapping import wrap_forward
from ..equivalence import Leaves
from ..stages import Staged, as_built
from .case import LEFT, Case, ConformanceError, check_sentence
from .examples import Refused
from .injection import Calls, folder_of, spread
from .snapshot import Snapshot

INJECTIONS = 6
"""Places at which a step is made to fail."""
RUNS = 200
"""Of which the means are compared, where masks are other ones."""


def refusals(case: Case) -> None:
    """A wrong call is refused in one sentence, and nothing has changed."""
    example = case.example
    takes = inspect.signature(case.primitive.apply).parameters.values()
    unknown = [name for name in ["no_such_argument"] if any(each.kind is each.VAR_KEYWORD for each in takes)]
    more = [Refused(name, example.args, {**example.kwargs, name: 0}) for name in unknown]  # of others the signature refuses it
    for refused in [*example.refused, *more]:
        _refuse(case, refused, f"{case.name}({_shown(refused)})")


def _refuse(case: Case, refused: Refused, what: str) -> None:
    schedule = case.begin()
    args = refused.args(schedule) if callable(refused.args) else refused.args
    with case.unchanged(schedule, f"after {what} was refused"):
        try:
            case.at(schedule, refused).apply(case.name, *args, **refused.kwargs)
        except Exception as error:
            check_sentence(error, what, case.name)
            if not re.search(refused.match, str(error)):
                raise ConformanceError(f"{what} is refused by {str(error)!r}, without {refused.match!r}") from error
        else:
            raise ConformanceError(f"{what} is taken; it is to be refused with {refused.match!r}")


def transactional(case: Case) -> None:
    """A step that fails, wherever, leaves the model as it was, and can be taken afterwards."""
    case.step(case.begin())  # what is imported or kept by the process now is not in the way of counting
    schedule = case.begin()
    with _observer_that_raises(case), case.unchanged(schedule, "after an error of slapo_after_apply"):
        _fails(partial(case.step, schedule))
    if case.example.ranks == 1:
        _fails_in_the_middle(case, schedule)
    case.step(schedule)
    wanted, found = _structure(case.scheduled()), _structure(case.finish(schedule))
    if wanted != found:
        raise ConformanceError(f"the step taken after failed ones is another one: {_first_difference(wanted, found)}")


def _fails_in_the_middle(case: Case, schedule: Schedule) -> None:
    folder = folder_of(case.primitive.apply)
    calls = Calls(folder)
    with calls.watching():
        case.step(schedule)
    wanted = _structure(schedule)
    schedule.undo()
    for number in spread(calls.count, INJECTIONS):
        calls, before = Calls(folder, number), Snapshot(schedule)
        try:
            with calls.watching():
                case.step(schedule)
        except Exception as error:
            changed = before.differences(Snapshot(schedule))
            if changed or not calls.failed:
                raise ConformanceError(f"after {calls.failed or repr(error)} failed, {'; '.join(changed[:3])}") from error
        else:
            found = _structure(schedule)
            schedule.undo()
            # it may have another way to the same, or have made fewer calls this time
            if calls.failed and found != wanted and not case.example.tries:
                raise ConformanceError(
                    f"the step hides that {calls.failed} failed, and does another thing: {_first_difference(wanted, found)}"
                )


class _ObserverError(SlapoError):
    """What a hook raises."""


@contextmanager
def _observer_that_raises(case: Case) -> Iterator[None]:
    class Observer:
        @hookimpl
        def slapo_after_apply(self, schedule: Schedule) -> None:
            raise _ObserverError("slapo_after_apply")

    observer, manager = Observer(), case.registry._plugins.manager
    manager.register(observer)
    try:
        yield
    finally:
        manager.unregister(observer)


def _fails(action: Callable[[], Any]) -> None:
    try:
        action()
    except _ObserverError:
        return
    raise ConformanceError("the step hides the error of a hook")


def undone(case: Case) -> None:
    """``undo`` leaves the model as it was."""
    schedule = case.begin()
    with case.unchanged(schedule, "after undo()"):
        case.step(schedule)
        schedule.undo()


def journal(case: Case) -> None:
    """The steps, written down and taken again on a fresh model, give the same model."""
    schedule = case.begin()
    steps = len(schedule.journal)
    case.step(schedule)
    if len(schedule.journal) != steps + 1:
        raise ConformanceError(f"the call is {len(schedule.journal) - steps} steps of the journal, not one")
    case.finish(schedule)
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("json", "py"):
            _round_trip(case, schedule, Path(folder, f"schedule.{kind}"))


def _round_trip(case: Case, schedule: Schedule, file: Path) -> None:
    try:
        schedule.save(file)
    except ScheduleError as error:
        check_sentence(error, "save()")
        if case.example.writable:
            raise ConformanceError(f"save() refuses the step: {error}") from error
        return
    if not case.example.writable:
        raise ConformanceError("the example says that the step cannot be written down, but save() does")
    options = {"example_inputs": case._inputs(), "plugins": case.registry}
    again = load_schedule(case.model(), file, trust=[*case.example.trust], **options)
    if str(again.journal) != str(schedule.journal):
        raise ConformanceError(f"the journal of {file.suffix} reads {again.journal!s}, not {schedule.journal!s}")
    wanted, found = _structure(schedule), _structure(again)
    if wanted != found:
        raise ConformanceError(f"the model made from {file.suffix} is another one: {_first_difference(wanted, found)}")
    if "values" not in case.example.changes:  # what a step draws at random is another one
        case.compare(case.scheduled().mod, again.mod, f"the model made from {file.suffix}")


def _structure(schedule: Schedule) -> dict[str, Any]:
    """Modules and tensors by path, as far as two models of the same steps have them in common."""
    found: dict[str, Any] = {}
    for path, module in schedule.mod.named_modules(remove_duplicate=False):
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        found[f"module {path!r}"] = (type(module).__qualname__, module.training, *map(len, hooks), "forward" in module.__dict__)
    for kind, tensors in (("parameter", schedule.mod.named_parameters), ("buffer", schedule.mod.named_buffers)):
        for name, tensor in tensors(remove_duplicate=False):
            spec = shard_spec(tensor)
            where = None if spec is None else (spec.dim, spec.full_shape, spec.sizes)
            known = (tuple(tensor.shape), tensor.dtype, tensor.requires_grad, facts(tensor).names, facts(tensor).tags)
            found[f"{kind} {name!r}"] = (*known, where)
    return found


def _first_difference(wanted: dict[str, Any], found: dict[str, Any]) -> str:
    what = next(key for key in {**wanted, **found} if wanted.get(key) != found.get(key))
    return f"{what} is {found.get(what, 'missing')}, not {wanted.get(what, 'there')}"


def hooks(case: Case) -> None:
    """Hooks on the module, on the model and on its parameters fire as often as before."""
    expected: dict[str, int] = {}
    plain = case.begin(plain=True)
    _hook(case, plain, expected)
    case.run(plain.mod)
    fired: dict[str, int] = {}
    schedule = case.begin()
    _hook(case, schedule, fired)
    if not case.takes(schedule, "the step on a module with hooks", partial(case.step, schedule)):
        return
    if not case.takes(schedule, "a step after that on a module with hooks", partial(case.finish, schedule)):
        return
    case.run(schedule.mod)
    for what, count in expected.items():
        if fired.get(what, 0) != count:
            raise ConformanceError(f"{what} fires {fired.get(what, 0)} times in a step of training, {count} before")


def _hook(case: Case, schedule: Schedule, fired: dict[str, int]) -> None:
    module = case.at(schedule).mod
    for label, hooked in {"the model": schedule.mod, "the module": module}.items():
        hooked.register_forward_pre_hook(_Counting(fired, f"the forward pre-hook of {label}"))
        hooked.register_forward_hook(_Counting(fired, f"the forward hook of {label}"))
    if {"values", "names", "requires_grad"} & {*case.example.changes}:
        return
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            what = f"the gradient hook of {name!r}"
            parameter.register_hook(_Counting(fired, what))  # type: ignore[no-untyped-call]


class _Counting:
    """A hook that counts, by name; copies of it count there too.

    Args:
        fired: Where.
        what: The name.
    """

    def __init__(self, fired: dict[str, int], what: str) -> None:
        self.fired, self.what = fired, what

    def __call__(self, *_: Any) -> None:
        self.fired[self.what] = self.fired.get(self.what, 0) + 1


def deepcopied(case: Case) -> None:
    """A deep copy of the scheduled model computes the same, and keeps the facts of parameters."""
    schedule = case.scheduled()
    copied = copy.deepcopy(schedule.mod)
    tensors = dict(schedule.mod.named_parameters(remove_duplicate=False))
    for name, parameter in copied.named_parameters(remove_duplicate=False):
        if facts(parameter).names != facts(tensors[name]).names or shard_spec(parameter) != shard_spec(tensors[name]):
            raise ConformanceError(f"a deep copy loses the facts of {name!r}")
        if parameter is tensors[name]:
            raise ConformanceError(f"a deep copy shares {name!r} with the model")
    case.compare(schedule.mod, copied, "a deep copy of the model")


def traced_before(case: Case) -> None:
    """The step on a traced model does what it does on the model, or is refused."""
    _beside(case, "trace", _trace, first=True)


def traced_after(case: Case) -> None:
    """The scheduled model is traced, or that is refused."""
    _beside(case, "trace", _trace, first=False)


def checkpointed_before(case: Case) -> None:
    """The step on a module that is recomputed does what it does on the module, or is refused."""
    _beside(case, "checkpoint", _checkpoint, first=True)


def checkpointed_after(case: Case) -> None:
    """The module is recomputed after the step, or that is refused."""
    _beside(case, "checkpoint", _checkpoint, first=False)


def _beside(case: Case, word: str, other: Callable[[Case, Schedule], Any], *, first: bool) -> None:
    schedule = case.begin(plain=first)
    actions: list[tuple[str, Callable[[], Any]]] = [
        (f"the step after {word}()" if first else "the step", partial(case.step, schedule)),
        ("what comes after it", partial(case.finish, schedule)),
    ]
    if first and case.example.before is not None:
        actions.insert(0, (f"what comes before it, after {word}()", partial(case.example.before, schedule)))
    actions.insert(0 if first else 2, (f"{word}() {'alone' if first else 'after the step'}", partial(other, case, schedule)))
    for what, action in actions:
        if not _taken(case, schedule, what, action):
            return
    try:
        case.compare(case.scheduled().mod, schedule.mod, f"with {word}() {'before' if first else 'after'} the step")
    except SlapoError as error:  # a model may also say when it runs that the two do not go together
        check_sentence(error, f"{word}() {'before' if first else 'after'} the step")


def _taken(case: Case, schedule: Schedule, what: str, action: Callable[[], Any]) -> bool:
    """As ``Case.takes``; of several steps the first may have been taken, so these are not compared."""
    if what.startswith("what comes"):
        try:
            action()
        except SlapoError:
            return False
        return True
    return case.takes(schedule, what, action)


def _trace(case: Case, schedule: Schedule) -> None:
    schedule.trace()


def _checkpoint(case: Case, schedule: Schedule) -> None:
    at = case.at(schedule)
    if "checkpoint" in case.registry.primitive_names():
        at.apply("checkpoint")
    elif type(at.mod).forward is not nn.Module.forward:
        wrap_forward(at.mod, _recomputed)


def _recomputed(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(call, *args, use_reentrant=False, **kwargs) if torch.is_grad_enabled() else call(*args, **kwargs)


def numerics(case: Case) -> None:
    """Outputs and gradients are those of the unmodified model."""
    if case.example.numerics == "none":
        return
    schedule, reference = case.scheduled(), case.model()
    keep = case.keep(schedule.mod)
    case.compare(reference, schedule.mod, "beside the unmodified model", keep)
    if not case.training:
        case.compare(reference, schedule.mod, "the second time, beside the unmodified model", keep)
        with torch.no_grad():
            case.compare(reference, schedule.mod, "without gradients, beside the unmodified model", keep)
    _stages(case, reference, schedule)


def _stages(case: Case, reference: nn.Module, schedule: Schedule) -> None:
    """Where the steps make stages, these too compute what the model does."""
    runs = as_built(schedule)
    if isinstance(runs, Staged):
        case.compare(reference, runs, f"in {runs.count} stages")


def means(case: Case) -> None:
    """Where masks are other ones, the means of many runs in training, and of the squares, are within six standard errors."""
    wanted, found = _moments(case, case.model()), _moments(case, case.scheduled().mod)
    for (path, mean, error), (_, other, error_of_other) in zip(wanted, found, strict=True):
        allowed = 6 * (error.square() + error_of_other.square()).sqrt() + case.example.atol
        if bool(((mean - other).abs() > allowed).any()):
            apart = float(((mean - other).abs() / allowed).max()) * 6
            raise ConformanceError(f"the mean of {path} over {RUNS} runs in training is {apart:.1f} standard errors off")


def _moments(case: Case, model: nn.Module) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    torch.manual_seed(2)
    runs: list[Leaves] = [case.run(model).outputs for _ in range(RUNS)]
    found = []
    for index, (path, leaf) in enumerate(runs[0]):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and not path.startswith(LEFT):
            values = torch.stack([run[index][1] for run in runs]).double()
            for what, numbers in ((f"output{path}", values), (f"the squares of output{path}", values.square())):
                found.append((what, numbers.mean(0), numbers.std(0) / math.sqrt(RUNS)))
    return found


def _shown(refused: Refused) -> str:
    args = ["..."] if callable(refused.args) else [_short(value) for value in refused.args]
    return ", ".join([*args, *(f"{key}={_short(value)}" for key, value in refused.kwargs.items())])


def _short(value: Any) -> str:
    text = str(getattr(value, "__name__", None) or repr(value))
    return text if len(text) < 40 and " at 0x" not in text else type(value).__name__
