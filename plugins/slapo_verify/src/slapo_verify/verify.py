"""``slapo.verify`` and ``with slapo.Verify``: comparison of a scheduled model with the unmodified one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from types import TracebackType
from typing import Any

import torch
from torch import nn

from slapo_core import (
    BuildError,
    Schedule,
    Step,
    UnknownNameError,
    VerifyError,
    compare_across_ranks,
    is_sharded,
    mesh_groups,
    parameter_facts,
    split_inputs,
)

from .comparison.equivalence import Tolerance
from .comparison.model_results import LEVELS, ComparisonTask, Loss, OptimizerFactory
from .comparison.report import Report, short_repr
from .comparison.rounding import check_tolerance, tolerance_of
from .comparison.tensor_leaves import leaves_of
from .diagnosis.cause import ComparedModels
from .model_setup.meta_values import device_for, has_meta_parameters, materialize_from, materialize_models
from .model_setup.model_copies import copy_model, fresh_schedule
from .ranks.failure_propagation import Ranks
from .training_runs.reference_run import sgd
from .verification import compare_models


def verify(
    reference: nn.Module,
    sch: Schedule,
    inputs: Any = None,
    level: str = "grads",
    *,
    loss: Loss | None = None,
    optimizer: OptimizerFactory | None = None,
    tolerance: Tolerance | None = None,
    eval_mode: bool = True,
    blame: bool = True,
) -> Report:
    """Compare the results of the scheduled model with those of the unmodified one.

    Both run from one random state on copies of the same inputs, and are restored. Weights, gradients and updates are compared
    under original names, gathered over the shards' group. NaN is never equal. If something differs, the schedule's steps are
    replayed on copies to find the one that broke it.

    Collective over the ranks of the schedule: every rank passes the same arguments and gets the same report.

    Args:
        reference: The unmodified model, with the initial weights of the schedule's model. A model on the meta device is
            verified as a copy with the weights of the other; if both are, with those of the model's initialiser.
        sch: The schedule.
        inputs: Arguments of one call, as the example inputs of ``create_schedule``; default: these.
        level: ``"outputs"``; ``"grads"``: also the loss and all gradients; ``"step"``: also the weight updates of an
            optimizer's step.
        loss: ``loss(outputs)``; default: the outputs' own loss, or else a weighted sum of all.
        optimizer: ``parameters -> Optimizer`` for the step; default: SGD with a learning rate of 1, whose update is the
            gradient.
        tolerance: Allowed difference of numbers; default: by the dtype of the parameters.
        eval_mode: True to run both in evaluation mode, without dropout. In training mode both start from one random state;
            shards draw other masks than the full tensor.
        blame: True to search for the wrong step if something differs.

    Raises:
        VerifyError: there is nothing to compare: an unknown level, no inputs, no weights, or both models are the same object.
        Exception: an error of the models, with a note of the step to blame if the unmodified one runs.
    """
    top = _top(sch)
    ranks = Ranks.of(top.mesh, top.group)

    def prepare_models() -> tuple[nn.Module, Schedule, ComparisonTask]:
        is_model = isinstance(reference, nn.Module) and reference is not top.mod
        before, sch = materialize_models(reference, top, device_for(top.mod, None)) if is_model else (reference, top)
        return before, sch, _task(before, sch, inputs, level, loss, optimizer, tolerance, eval_mode)

    before, sch, task = ranks.run_on_all(prepare_models)
    _check_alike(before, sch, task, tolerance, blame)
    models = ComparedModels(before, sch, lambda: fresh_schedule(before, sch), sch.journal.steps, tolerance, ranks)
    return compare_models(models, task, blame)


class Verify:
    """Verify the steps that are taken in a ``with`` block; ``report`` has the result.

    Args:
        sch: The schedule; its results must be the same on entry and on exit.
        example_inputs: As ``inputs`` of ``verify``.
        device: Device of the inputs, which is that of the model: ``"cuda"`` is the model's GPU, or else its own device. A model
            on the meta device gets its values there, on a GPU if there is one.
        eval_mode: As for ``verify``.
        enable: False has no effect at all.
        level: As for ``verify``.
        loss: As for ``verify``.
        tolerance: As for ``verify``.

    Raises:
        VerifyError: on exit, if something differs; the message is the report.
    """

    def __init__(
        self,
        sch: Schedule,
        example_inputs: Any = None,
        device: torch.device | str | None = "cuda",
        eval_mode: bool = True,
        enable: bool = True,
        *,
        level: str = "grads",
        loss: Loss | None = None,
        tolerance: Tolerance | None = None,
    ) -> None:
        self._top, self._enable = _top(sch), enable
        self._level, self._loss, self._tolerance = level, loss, tolerance
        self._inputs, self._device, self._eval_mode = example_inputs, device, eval_mode
        self.report: Report | None = None
        self._before: Schedule | None = None
        self._place = torch.device("cpu")
        self._steps: Sequence[Step] = ()

    def __enter__(self) -> Verify:
        if self._enable:
            if self._before is not None:
                raise VerifyError("this Verify is entered already; make another one for the steps within it")
            self._place = device_for(self._top.mod, self._device)
            given = self._top.example_inputs if self._inputs is None else self._inputs
            self._inputs = torch.utils._pytree.tree_map_only(torch.Tensor, lambda each: each.to(self._place), given)
            with torch.inference_mode(False):
                before = copy_model(self._top)
                if has_meta_parameters(before.mod):
                    materialize_from(before.mod, self._top.mod, self._place)
                self._task(*materialize_models(before.mod, self._top, self._place))
            self._before, self._steps = before, tuple(self._top.journal.steps)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        before, self._before = self._before, None  # a copy of the model
        if before is None or error is not None:
            return
        ranks = Ranks.of(self._top.mesh, self._top.group)
        reference, top = ranks.run_on_all(lambda: materialize_models(before.mod, self._top, self._place))
        task = ranks.run_on_all(lambda: self._task(reference, top))
        _check_alike(reference, top, task, self._tolerance, True)
        steps = self._top.journal.steps
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(self._steps, steps, strict=False)))
        undone = None if kept == len(self._steps) else "a step from before the block was undone in it"
        fresh = lambda: copy_model(before)  # noqa: E731
        models = ComparedModels(reference, top, fresh, steps[kept:], self._tolerance, ranks, kept, unknown=undone)
        self.report = compare_models(models, task, True)
        self.report.check()

    def _task(self, before: nn.Module, top: Schedule) -> ComparisonTask:
        return _task(before, top, self._inputs, self._level, self._loss, None, self._tolerance, self._eval_mode)


def _check_alike(reference: nn.Module, top: Schedule, task: ComparisonTask, tolerance: Tolerance | None, blame: bool) -> None:
    """Raise ``VerifyError`` on all ranks if they verify different schedules, or with different arguments. Collective."""
    if not list(mesh_groups(top.mesh, top.group)):
        return
    functions = {"loss": task.loss, "optimizer": task.optimizer}
    said = {"level": task.level, "eval_mode": not task.training, "blame": blame, "tolerance": tolerance}
    said |= {what: getattr(each, "__qualname__", type(each).__qualname__) for what, each in functions.items()}
    inputs = leaves_of((task.args, dict(task.kwargs)), "")
    whole = [each for each in reference.parameters() if not is_sharded(each)]
    lines = [f"verify with {what}={value!r}" for what, value in said.items()]
    lines += [f"an input {_input_text(value)}" for _, value in inputs]
    lines.append(f"a reference whose weights have the sum {sum(map(_checksum, whole))}")
    try:
        compare_across_ranks([*lines, *top.journal.comparable_lines()], top.mesh, top.group)
    except BuildError as error:
        raise VerifyError(str(error)) from None


def _input_text(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value) if isinstance(value, (bool, int, float, str)) else type(value).__qualname__
    return f"of the shape {tuple(value.shape)} and with the sum {_checksum(value)}"


def _checksum(tensor: torch.Tensor) -> int:
    """Return the sum of a tensor's bits, which does not depend on the order of addition."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        return 0
    bits = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
    is_aligned = bits.numel() % 4 == bits.storage_offset() % 4 == 0
    return int((bits.view(torch.int32) if is_aligned else bits).sum(dtype=torch.int64))


def _top(sch: Any) -> Schedule:
    if not isinstance(sch, Schedule):
        raise VerifyError(f"sch is {short_repr(sch)}; give a schedule")
    return sch.get_top_schedule()


def _task(
    reference: nn.Module,
    top: Schedule,
    inputs: Any,
    level: str,
    loss: Loss | None,
    optimizer: OptimizerFactory | None,
    tolerance: Tolerance | None,
    eval_mode: bool,
) -> ComparisonTask:
    if level not in LEVELS:
        raise VerifyError(str(UnknownNameError.of("level", str(level), LEVELS)))
    if not isinstance(reference, nn.Module):
        raise VerifyError(f"the reference is {short_repr(reference)}; give the unmodified model")
    if reference is top.mod:
        raise VerifyError("the reference is the scheduled model itself; schedule a copy.deepcopy of it")
    given = top.example_inputs if inputs is None else inputs
    if given is None:
        raise VerifyError("no inputs to run the models on; give inputs, or example_inputs to create_schedule")
    for what, model in (("reference", reference), ("scheduled model", top.mod)):
        for name, each in model.named_parameters():
            if each.is_meta:
                raise VerifyError(f"{name!r} of the {what} has no values yet; load or initialise the weights first")
            if each.is_inference():
                raise VerifyError(f"{name!r} of the {what} was made in inference mode, and has no gradients; make it outside")
    shared = {id(each) for each in reference.parameters()}
    twice = [name for name, each in top.mod.named_parameters() if id(each) in shared]
    if twice:
        what = f"the reference and the scheduled model share {twice[0]!r}"
        raise VerifyError(f"{what}; schedule a copy.deepcopy of the reference")
    own = reference.named_parameters(remove_duplicate=False)
    names = {known for name, parameter in own for known in (name, *parameter_facts(parameter).names)}
    lacking = [name for own in top.original_names.values() for name in own if name not in names]
    if lacking:
        raise VerifyError(f"the reference has no parameter {lacking[0]!r}; give the model that the schedule began with")
    for what, function, kind in (("loss", loss, "the outputs"), ("optimizer", optimizer, "the parameters")):
        if function is not None and not callable(function):
            raise VerifyError(f"{what} is {short_repr(function)}; give a function of {kind}")
    if optimizer is not None and level != "step":
        raise VerifyError(f"an optimizer steps at level='step', and level is {level!r}; give that level, or no optimizer")
    if not isinstance(eval_mode, bool):
        raise VerifyError(f"eval_mode is {short_repr(eval_mode)}; give True or False")
    check_tolerance(tolerance)
    args, kwargs = split_inputs(given, reference)
    chosen = tolerance or tolerance_of(reference)
    return ComparisonTask(args, kwargs, level, loss, optimizer or sgd, not eval_mode, chosen)
