"""The check ``injected``: gradients that a model injects into its backward beside those of its loss.

For example, a router's balance loss may be an ``autograd.Function`` that returns its input and adds a gradient of its own. The
backward of ``s`` times a micro-batch's loss then gives ``s * dL + I``. If an engine divided each loss by the number of
micro-batches, ``I`` would count once per micro-batch. So the engine does not divide the loss, but the gradients of parameters.
The check finds such gradients by a backward from zero, and tests that they are means over rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from slapo_core import BuildError, Program, get_logger

from ..distributed._torch_private import has_custom_functions, has_inner_backward, leaves_of, register_first, without_hooks
from ..options.common_options import CommonOptions
from .diagnostics import IN_FP16, INNER_BACKWARD, Partition, injected_is_no_mean, warn_or_refuse
from .row_mixing import tolerance_of
from .row_subsets import Rows, dissimilar_quarters, join_rows
from .stage_runs import AfterStage, PlannedRows, Run, RunCache, RunFailedError, StageRuns, runs_alone


class InjectionProbe:
    """Runs backwards of stages from zero gradients; each nonzero gradient was injected.

    Args:
        accumulates: True if a backward may accumulate gradients in parameters; False if the engine waits for these.

    Attributes:
        probes: A linear probe and the norm of each injected gradient, by id of its tensor.
        is_hidden: True if a backward was skipped because it would accumulate gradients.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], accumulates: bool) -> None:
        self._parameters, self._accumulates = list(parameters), accumulates
        self.probes: dict[int, torch.Tensor] = {}
        self.is_hidden = False

    def __call__(self, received: tuple[torch.Tensor, ...], given: tuple[torch.Tensor, ...]) -> bool:
        """Return True if a stage's backward injects gradients; those of the tensors that it received count, too."""
        ends = [tensor for tensor in given if tensor.requires_grad]
        inputs = [tensor for tensor in received if tensor.requires_grad]
        if not ends:
            return False
        if not has_inner_backward(ends):
            leaves = [*{id(each): each for each in [*leaves_of(ends), *inputs]}.values()]
            gradients = self._gradients(ends, leaves)
        elif self._accumulates:
            leaves = [*self._parameters, *inputs]
            gradients = self._accumulated_gradients(ends, leaves)
        else:
            self.is_hidden = True
            return False
        found = [(leaf, gradient) for leaf, gradient in zip(leaves, gradients, strict=True) if gradient is not None]
        flags = [_is_nonzero(gradient).to(ends[0].device) for _, gradient in found]
        if not flags or not bool(torch.stack(flags).any()):
            return False
        self.probes.update({id(leaf): _probe(gradient) for leaf, gradient in found if isinstance(leaf, nn.Parameter)})
        return True

    def _gradients(self, ends: list[torch.Tensor], leaves: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        if not leaves:
            return ()
        with without_hooks(leaves):
            return torch.autograd.grad(ends, leaves, [torch.zeros_like(each) for each in ends], allow_unused=True)

    def _accumulated_gradients(self, ends: list[torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor | None]:
        for leaf in leaves:
            leaf.grad = None
        with without_hooks(leaves):
            torch.autograd.backward(ends, [torch.zeros_like(each) for each in ends])
        found = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return found


def is_mean_over_rows(
    whole: InjectionProbe, parts: Sequence[InjectionProbe], weights: Sequence[float], tolerance: float
) -> bool:
    """Return True if the gradients injected for all rows are the mean of those injected for their parts.

    ``weights`` are the fractions of the rows in each part, ``tolerance`` the largest relative difference that counts as
    equal.
    """
    for key, one in whole.probes.items():
        others = [each.probes.get(key, torch.zeros_like(one)) for each in parts]
        mean = sum(other[0].item() * weight for other, weight in zip(others, weights, strict=True))
        size = max(each[1].item() for each in (one, *others))
        if abs(one[0].item() - mean) > tolerance * size:
            return False
    return True


def _probe(gradient: torch.Tensor) -> torch.Tensor:
    values = (gradient.to_dense() if gradient.is_sparse else gradient).detach().reshape(-1)
    values = (torch.view_as_real(values).reshape(-1) if values.is_complex() else values).float()
    return torch.stack([values.sum() + values[::3].sum(), values.norm()]).nan_to_num()


def _is_nonzero(gradient: torch.Tensor) -> torch.Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return (values.isfinite() & (values != 0)).any()  # 0 * inf = nan is not an injected gradient


class _ScaleGradient(torch.autograd.Function):
    """Autograd node that returns a loss and multiplies its gradient."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return loss.clone()  # the pipeline runtime calls detach_(), which views refuse

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None


def scaled_gradient(loss: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the same loss; its backward multiplies the gradient by ``factor``."""
    if factor == 1.0 or not loss.requires_grad:
        return loss
    scaled: torch.Tensor = _ScaleGradient.apply(loss, factor)  # type: ignore[no-untyped-call]
    return scaled


@contextmanager
def divide_gradients(parameters: Iterable[nn.Parameter], number: float) -> Iterator[None]:
    """Context in which backwards divide gradients of parameters by ``number``, before an engine reads or reduces them."""
    with ExitStack() as hooks:
        for parameter in parameters if number != 1.0 else ():
            if parameter.requires_grad:
                hooks.enter_context(register_first(parameter, lambda gradient: gradient / number))
        yield


class Part(NamedTuple):
    """Rows that run backward.

    Args:
        parts: Two parts that together are the rows; empty for one row.
        half: Index among the halves of the micro-batch; None if the rows are no half on some rank.
        injected: Probe of the gradients injected for the rows; of a deterministic run if the model samples random numbers.
    """

    planned: PlannedRows
    parts: Sequence[Rows]
    half: int | None = None
    injected: InjectionProbe | None = None


class InjectedCheck:
    """The check of one step. Every method is collective over the mesh.

    All rows of a micro-batch run forward, and half of them run backward, which costs twice as much. If none are found but the
    model has custom autograd functions, the other half runs backward too: injection may depend on the rows.
    """

    def __init__(self, program: Program, options: CommonOptions, runs: StageRuns) -> None:
        self._program, self._options, self._runs = program, options, runs
        self._is_hidden = False

    def run(self, whole: PlannedRows, halves: Sequence[Rows], cut: Partition | None) -> tuple[RunCache, bool] | None:
        """Return runs of the rows, and whether gradients are injected; None if the micro-batch does not run.

        ``cut`` is None if the micro-batch must not run in parts.

        Raises:
            BuildError: gradients are injected with fp16; or, with ``strict=True``, they are not means over rows.
        """
        in_parts = cut is not None and halves[0].number > 1
        injected = self._injection_probe(whole)
        try:
            base, draws = self._run(whole, _runs_functions if in_parts else injected)
        except RunFailedError as err:
            get_logger().debug("whether the model injects gradients was not seen: %s", err)
            return None
        known = RunCache(base, [None] * len(halves), self._runs.any_rank(draws))
        if in_parts:
            found = self._find_part(whole, halves, known)
        else:
            self._is_hidden = injected.is_hidden
            found = Part(whole, halves, injected=None if known.draws else injected) if base.found else None
        if self._runs.any_rank(self._is_hidden):
            get_logger().info("%s", INNER_BACKWARD)
        if found is not None and self._options.precision == "fp16":
            raise BuildError(IN_FP16)
        if found is not None and cut is not None:
            self._compare(found, whole, cut, known)
            self._run_remaining_halves(halves, known)
        return known, found is not None

    def _find_part(self, whole: PlannedRows, halves: Sequence[Rows], known: RunCache) -> Part | None:
        """Return rows of a micro-batch for which gradients are injected, or None."""
        try:
            found = self._find_part_of_halves(halves, known)
            return Part(whole, halves) if found is not None and not found.parts else found
        except RunFailedError as err:
            get_logger().debug("the model does not run some rows of a micro-batch: %s", err)
        try:
            return self._find_injection(Part(whole, halves), known)
        except RunFailedError as err:
            get_logger().debug("whether the model injects gradients was not seen: %s", err)
            return None

    def _find_part_of_halves(self, halves: Sequence[Rows], known: RunCache) -> Part | None:
        quarters, is_half = dissimilar_quarters(halves, self._options.ignored_label)
        half = None if self._runs.any_rank(not is_half) else 0
        rows = join_rows(quarters) if half is None else halves[0]
        found = self._find_injection(Part(self._runs.plan_rows(rows), quarters, half), known)
        if found is not None or not known.whole.found:
            return found
        for index, each in enumerate(halves):
            if index != half:
                parts = dissimilar_quarters([each], self._options.ignored_label)[0] if each.number > 1 else []
                found = self._find_injection(Part(self._runs.plan_rows(each), parts, index), known, fixed=known.draws)
                if found is not None:
                    return found
        return None

    def _find_injection(self, part: Part, known: RunCache, fixed: bool = False) -> Part | None:
        """Run rows backward from zero; return them if gradients are injected."""
        found, injected = self._backward(part, known, fixed)
        return part._replace(injected=injected if fixed == known.draws else None) if found else None

    def _backward(self, part: Part, known: RunCache, fixed: bool) -> tuple[bool, InjectionProbe]:
        """Run rows backward from zero; return whether gradients are injected on any rank, and this rank's probe."""
        injected = self._injection_probe(part.planned)
        run, _ = self._run(part.planned, injected, fixed)
        self._is_hidden = self._is_hidden or injected.is_hidden
        if part.half is not None and fixed == known.draws:
            known.parts[part.half] = run
        return run.found, injected

    def _compare(self, found: Part, whole: PlannedRows, cut: Partition, known: RunCache) -> None:
        """Warn, or raise with ``strict=True``, if gradients injected for rows are not the mean of those for their parts."""
        number, others = found.planned.rows.number, list[InjectionProbe]()
        try:
            one = found.injected or self._backward(found, known, known.draws)[1]
            for index, rows in enumerate(found.parts):
                part = Part(self._runs.plan_rows(rows), (), index if found.planned is whole else None)
                others.append(self._backward(part, known, known.draws)[1])
        except RunFailedError as err:
            get_logger().debug("whether injected gradients are means over rows was not seen: %s", err)
            return
        weights = [each.number / number for each in found.parts]
        tolerance = 10 * tolerance_of(self._runs.own_modules(whole), self._options.precision).values
        if self._runs.any_rank(not is_mean_over_rows(one, others, weights, tolerance)):
            warn_or_refuse(injected_is_no_mean(cut), self._program, self._options.strict)

    def _run_remaining_halves(self, halves: Sequence[Rows], known: RunCache) -> None:
        """Run the halves that have not run, with a graph, which may show the reduction of the loss."""
        if known.draws:
            return
        try:
            for index, rows in enumerate(halves):
                if known.parts[index] is None:
                    known.parts[index] = self._run(self._runs.plan_rows(rows), _runs_functions)[0]
        except RunFailedError as err:
            get_logger().debug("the model does not run some rows of a micro-batch: %s", err)

    def _run(self, planned: PlannedRows, after_stage: AfterStage, fixed: bool = False) -> tuple[Run, bool]:
        """Run rows; return the run, and whether this rank used random numbers."""
        with runs_alone(self._program, [planned]) as state:
            run = self._runs(planned, state, after_stage=after_stage, fixed=fixed)
            return run, run.rng_fingerprint != state.start

    def _injection_probe(self, planned: PlannedRows) -> InjectionProbe:
        parameters = [parameter for module in self._runs.own_modules(planned) for parameter in module.parameters()]
        return InjectionProbe([each for each in parameters if each.requires_grad], self._runs.accumulates)


def _runs_functions(received: tuple[torch.Tensor, ...], given: tuple[torch.Tensor, ...]) -> bool:
    """Return True if the backward of a stage has custom autograd functions."""
    return has_custom_functions(given)
