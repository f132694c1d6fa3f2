"""``slapo.verify_engine``: comparison of an engine's steps with those of the unmodified model in plain torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import BuildError, Schedule, VerifyError, forward_signature, named_inputs, split_inputs

from .comparison.equivalence import Difference, Tolerance, difference, named_differences
from .comparison.model_results import OptimizerFactory, autocast, default_modes
from .comparison.parameter_values import EXACT
from .comparison.report import Blame, Report, short_repr
from .comparison.rounding import check_tolerance, rounding_error, tolerance_of
from .diagnosis.hints import local_hints
from .model_setup.model_copies import copy_model
from .model_setup.model_rollback import disable_dropout
from .ranks.failure_propagation import StrandedError
from .training_runs.engine_run import EngineRun, Scheduled, gather_over_schedule, schedule_factory
from .training_runs.reference_run import LossFn, TrainingResults, own_loss, sgd, sum_of_terms
from .verify import verify

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_ADAPTIVE_FACTOR = 2.0
"""Multiple of the rounding error that is allowed for optimizers that divide by the size of gradients, such as Adam."""


def verify_engine(
    reference: nn.Module,
    schedule: Schedule | Scheduled,
    batch: Any,
    target: str = "torch",
    *,
    against: str | TrainingResults | None = None,
    steps: int = 1,
    loss_fn: LossFn | None = None,
    optimizer: OptimizerFactory | None = None,
    tolerance: Tolerance | None = None,
    blame: bool = True,
    **options: Any,
) -> Report:
    """Compare what an engine trains with what the unmodified model does in plain torch, in one process, on the whole batch.

    Compared are the loss of an evaluation before and after, the loss of each step, and what the steps add to every parameter,
    by original name: of each copy that a rank holds, gathered where it is sharded. With SGD at a rate of 1, the default, that
    is the gradient. Dropout is off in both. Where something differs, the schedule is verified without the engine, in stages and
    in one process, and blamed if it is wrong; else the engine is, or the option without which it is right.

    Collective over the ranks of the schedule: every rank gives the same arguments and gets the same report. Neither the
    reference nor a schedule that is given is changed: the engine gets a copy.

    Args:
        reference: The unmodified model, with the same weights on every rank.
        schedule: A function that schedules the copy of the model it is given; or a schedule, whose steps are taken again.
        batch: The whole batch, of all data-parallel ranks, of which each gets its rows: a tensor, a tuple of positional
            arguments, a dict of keyword ones, or ``(args, kwargs)``. The labels for ``loss_fn`` are called ``labels``, or are
            the last positional argument, or the one keyword argument that the forward does not take.
        target: Name of a dialect.
        against: Another one, whose engine is built first, in the same processes, and compared with both; or what an engine
            has trained, the ``trained`` of an earlier report.
        steps: Training steps, all on the batch.
        loss_fn: As for ``build``.
        optimizer: ``parameters -> Optimizer``, of the engine and the unmodified model.
        tolerance: How far apart numbers may be; default: by the type of the parameters, and in half precision by how far the
            unmodified model is from itself in fp32.
        blame: Whether to look for what is to blame, where something differs.
        **options: Of ``build``, e.g. ``microbatches=4, precision="bf16"``; ``clip`` and a factory ``lr_scheduler`` go for the
            unmodified model, too.

    Raises:
        VerifyError: there is nothing to compare, or the steps of the schedule cannot be taken again.
        Exception: whatever the engine raises.
    """
    if type(steps) is not int or steps < 1:
        raise VerifyError(f"steps is {steps!r}; give a whole number from 1 on")
    if not isinstance(reference, nn.Module):
        raise VerifyError(f"the reference is {short_repr(reference)}; give the unmodified model")
    batch = _by_name(reference, batch, has_labels=loss_fn is not None and options.get("loss_over") is None)
    check_tolerance(tolerance)
    if against is not None and not isinstance(against, (str, TrainingResults)):
        raise VerifyError(f"against is {against!r}; give the name of an engine, or the `trained` of a report")
    for what, function in (("loss_fn", loss_fn), ("optimizer", optimizer)):
        if function is not None and not callable(function):
            raise VerifyError(f"{what} is {short_repr(function)}; give a function")
    if loss_fn is not None and "labels" not in batch and options.get("loss_over") is None:
        raise VerifyError(
            "loss_fn is given labels, and the batch has none; give 'labels' in the batch, or loss_over='replicas' where the "
            "loss is made of the outputs alone"
        )
    with default_modes(with_gradients=True):
        quiet = copy_model(reference)
        given = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        run = EngineRun(quiet, schedule_factory(schedule, quiet), given, steps, loss_fn, optimizer or sgd, options)
        report = _engine_report(run, target, against, tolerance, blame)
    kinds = [f"autocast is off, for {kind}" for kind in autocast()]
    return replace(report, notes=(*report.notes, *kinds))


def _by_name(reference: nn.Module, batch: Any, has_labels: bool) -> dict[str, Any]:
    """Return the arguments by name; with ``has_labels``, the labels for a loss function under ``labels``."""
    if not any(isinstance(leaf, torch.Tensor) for leaf in torch.utils._pytree.tree_leaves(batch)):
        raise VerifyError(f"batch is {short_repr(batch)}; give the arguments of the model's forward, with tensors")
    args, kwargs = split_inputs(batch)
    if has_labels and "labels" not in kwargs:
        parameters = forward_signature(reference).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        others = [name for name in kwargs if name not in parameters and not takes_any]
        if len(others) == 1:
            kwargs["labels"] = kwargs.pop(others[0])
        elif len(args) > 1:
            args, kwargs["labels"] = args[:-1], args[-1]
    try:
        return named_inputs(reference, args, kwargs)
    except BuildError as err:
        raise VerifyError(f"the batch does not fit: {err}") from err


def _engine_report(
    run: EngineRun, target: str, against: str | TrainingResults | None, tolerance: Tolerance | None, blame: bool
) -> Report:
    dropouts = len(disable_dropout(run.reference))
    expected = run.reference_results()
    other = run.train(against)[0] if isinstance(against, str) else against
    found, sch, notes = run.train(target)
    judged = _compare_with_reference(run, expected, found, other, sch, tolerance)
    if judged.unseen:
        more = f" and {len(judged.unseen) - 1} more" if judged.unseen[1:] else ""
        what = f"by this optimizer the {judged.unseen[0]}{more} is rounding and nothing else"
        notes.append(f"{what}; only SGD shows whether it is right")
    notes = [*notes, "dropout is off in both models" if dropouts else "dropout: the model has none, or it is off"]
    if expected.draws:
        notes.append("the unmodified model draws random numbers in training: another run gives others")
    if judged.ranks:
        notes.append(f"it differs on rank{'s' if judged.ranks[1:] else ''} {', '.join(map(str, judged.ranks))}")
    cause = _blame(run, target, judged, expected, found) if judged.wrong and blame else None
    compared = {"evaluations": 2, "losses": run.steps, "updates": len(expected.updates)}
    subject = " against ".join([target, *([other.target] if other else [])])
    return Report("step", compared, tuple(judged.wrong), judged.largest, cause, tuple(notes), subject, found)


class _EngineComparison(NamedTuple):
    """Results of an engine, beside those of the unmodified model.

    Args:
        wrong: What differs on the first rank where something does.
        largest: The largest error.
        ranks: All where something differs.
        allowed: How far apart numbers may be.
        unseen: Updates that are rounding and nothing else.
    """

    wrong: list[Difference]
    largest: Difference | None
    ranks: list[int]
    allowed: Tolerance
    unseen: list[str]


def _compare_with_reference(
    run: EngineRun,
    expected: TrainingResults,
    found: TrainingResults,
    other: TrainingResults | None,
    sch: Schedule,
    given: Tolerance | None = None,
) -> _EngineComparison:
    """Compare an engine's results with those of the unmodified model. Collective."""
    allowed = given or _default_tolerance(run, expected)
    judged = _EngineComparison(*_compare_results(expected, found, other, allowed, sch), allowed, [])
    closely = _float32_tolerance(run, expected, allowed) if judged.wrong and given is None else None
    if not all(gather_over_schedule(closely is not None, sch)) or closely is None:
        return judged
    return _EngineComparison(*_compare_results(expected, found, other, closely[0], sch), *closely)


def _default_tolerance(run: EngineRun, expected: TrainingResults) -> Tolerance:
    """Return the tolerance: by dtype, the rounding of a weight's update, and the precision's cost for the unmodified model."""
    precision = run.options.get("precision", "fp32")
    half = _HALF.get(precision)
    noise: dict[str, float] = {}
    eps = torch.finfo(half or torch.float32).eps
    for name, parameter in run.reference.named_parameters(remove_duplicate=False):
        largest = float(parameter.detach().abs().max()) if parameter.numel() else 0.0
        noise[f"update of {name!r}"] = (run.steps + 1) * eps * largest if parameter.dtype is not torch.float64 else 0.0
    if half is None:
        return replace(tolerance_of(run.reference), noise=noise)
    low = run.reference_results(half).values()
    for what, one in expected.values().items():
        noise[what] = noise.get(what, 0.0) + rounding_error(low[what], one)
    return replace(tolerance_of(nn.Linear(1, 1, dtype=half)), noise=noise)


def _float32_tolerance(run: EngineRun, expected: TrainingResults, allowed: Tolerance) -> tuple[Tolerance, list[str]] | None:
    """The tolerance with what rounding in float32 does to the unmodified model, and the updates that are no more than that.

    An optimizer that divides by the size of a gradient, as Adam, makes large numbers of small ones that are all rounding. None
    where the model does not run in float64, or needs no such look.
    """
    if run.options.get("precision", "fp32") in _HALF or any(each.dtype != torch.float32 for each in run.reference.parameters()):
        return None
    try:
        exact = run.reference_results(torch.float64).values()
    except Exception:  # a forward that makes float32 of its own, say
        return None
    noise, unseen = dict(allowed.noise), []
    for what, one in expected.values().items():
        error = _ADAPTIVE_FACTOR * rounding_error(one, exact[what])
        noise[what] = noise.get(what, 0.0) + error
        if error and error >= float(one.abs().max()):
            unseen.append(what)
    return replace(allowed, noise=noise), unseen


def _differences(
    expected: TrainingResults, found: TrainingResults, tolerance: Tolerance, prefix: str = ""
) -> Iterator[Difference]:
    for what, one in expected.numbers().items():
        yield from _prefix_names(prefix, difference(what, one, found.numbers()[what], tolerance))
    if prefix:
        yield from _prefix_names(prefix, named_differences("update", expected.updates, found.updates, tolerance))
        return
    for copy_ in found.copies:
        known = {name: value for name, value in expected.updates.items() if name in copy_}
        yield from named_differences("update", known, copy_, tolerance)


def _prefix_names(prefix: str, found: Iterator[Difference]) -> Iterator[Difference]:
    return (replace(each, what=prefix + each.what, message=prefix + each.message) for each in found)


def _compare_results(
    expected: TrainingResults, found: TrainingResults, other: TrainingResults | None, allowed: Tolerance, sch: Schedule
) -> tuple[list[Difference], Difference | None, list[int]]:
    """Return the differences on the first rank that has any, the largest error, and all ranks with differences."""
    held = {name for names in gather_over_schedule([*{n for c in found.copies for n in c}], sch) for name in names}
    lacking = {name: value for name, value in expected.updates.items() if name not in held}

    def differences_within(tolerance: Tolerance) -> list[Difference]:
        wrong = [*_differences(expected, found, tolerance), *named_differences("update", lacking, {}, tolerance)]
        if other is not None:
            wrong += _differences(other, found, _double_tolerance(tolerance), f"against {other.target}: ")
        return wrong

    looks = gather_over_schedule((dist.get_rank() if dist.is_initialized() else 0, differences_within(allowed)), sch)
    known = (each for each in differences_within(EXACT) if each.absolute is not None)
    far = max(known, key=lambda each: each.absolute or 0.0, default=None)
    furthest = max(filter(None, gather_over_schedule(far, sch)), key=lambda each: each.absolute or 0.0, default=None)
    ranks = [rank for rank, wrong in looks if wrong]
    return next((wrong for _, wrong in looks if wrong), []), furthest, ranks


def _double_tolerance(tolerance: Tolerance) -> Tolerance:
    """Return twice a tolerance, for two engines that may each differ so much from the unmodified model."""
    noise = {what: 2 * size for what, size in tolerance.noise.items()}
    return Tolerance(2 * tolerance.atol, 2 * tolerance.rtol, 2 * tolerance.scale, noise)


def _blame(run: EngineRun, target: str, judged: _EngineComparison, expected: TrainingResults, found: TrainingResults) -> Blame:
    """Run the schedule without the engine, and the engine without each of its options, to find the cause. Collective."""
    sch = run.schedule()
    disable_dropout(sch.mod)
    alone_report = verify(run.reference, sch, _inputs(run), "grads", loss=_loss(run), eval_mode=False)
    if not alone_report.ok and alone_report.blame is not None:
        return alone_report.blame
    named = dict(run.reference.named_parameters(remove_duplicate=False))
    times = Counter(map(id, named.values()))
    names = [name for name in reversed(named) if any(each.what.endswith(f"update of {name!r}") for each in judged.wrong)]
    parameter = min(names, key=lambda name: times[id(named[name])], default=None)  # tied ones after the others
    hint = None
    for copy_ in found.copies:
        if parameter in copy_ and copy_[parameter].shape == expected.updates[parameter].shape:
            hint = next(local_hints(expected.updates[parameter], copy_[parameter], run.reference, judged.allowed), None)
    hints = [each for each in gather_over_schedule(hint, sch) if each]
    refusal = next(filter(None, gather_over_schedule(_refusal(run, target), sch)), None)
    suspect = "check=False" if refusal else f"target {target!r}"
    right = f"the schedule alone, in stages and in one process, is right: {suspect} is to blame"
    fewer = {left_out: {name: run.options[name] for name in run.options if name != left_out} for left_out in run.options}
    others = (name for name in fewer if name != "precision")
    option = next((name for name in others if _is_right(replace(run, options=fewer[name]), target)), None)
    if option is not None:
        right += f", or {option}={run.options[option]!r}, without which it is right"
    elif run.optimizer is not sgd and _is_right(replace(run, optimizer=sgd), target):
        right += f", or optimizer={run.optimizer_name}, as with SGD it is right"
    if refusal:
        right += f"; the checks of the first step, which check=False switches off, refuse this: {refusal}"
    return Blame(parameter=parameter, hint=next(iter(hints), None), engine=right)


def _refusal(run: EngineRun, target: str) -> str | None:
    """Return the sentence with which the first step's checks, which were off, refuse the batch. Collective."""
    if run.options.get("check") is not False:
        return None
    try:
        replace(run, steps=1, options={**run.options, "check": True}).train(target)
    except StrandedError:
        raise
    except BuildError as err:
        return str(err)
    except Exception:  # on all ranks: of what the engine needs
        return None
    return None


def _is_right(run: EngineRun, target: str) -> bool:
    """Return True if a new engine is right. Collective."""
    try:
        found, sch, _ = run.train(target)
        return not _compare_with_reference(run, run.reference_results(), found, None, sch).wrong
    except StrandedError:
        raise
    except Exception:  # on all ranks: of what the engine needs
        return False


def _inputs(run: EngineRun) -> dict[str, Any]:
    """Return the model's arguments, without the labels of a loss function."""
    return {name: value for name, value in run.batch.items() if run.loss_fn is None or name != "labels"}


def _loss(run: EngineRun) -> Callable[[Any], torch.Tensor | None] | None:
    loss_fn, chosen = run.loss_fn, run.options.get("loss")
    if chosen is not None:
        return lambda outputs: own_loss(outputs, chosen)
    return None if loss_fn is None else lambda outputs: sum_of_terms(loss_fn(outputs, run.batch.get("labels")))
