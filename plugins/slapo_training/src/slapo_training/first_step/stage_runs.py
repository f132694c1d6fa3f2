"""Runs of a program's stages in sequence, without an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from slapo_core import Boundary, Program, SlapoError, Stage, call_arguments, raise_on_all_ranks
from slapo_tracing.nodes import asks_for_gradients

from ..batches.nested_tensors import with_tensors
from ..distributed.ranks import all_reduce
from ..losses.microbatch_loss import CountedLoss
from ..losses.reductions import LabelMean
from ..model.state_rollback import StateSnapshot, state_rollback
from ..options.common_options import CommonOptions
from .deterministic_random import DeterministicRandom
from .row_mixing import written_buffers
from .row_subsets import Rows

Around = Callable[[bool], AbstractContextManager[Any]]
"""Function that makes the engine's context of a run, e.g. autocast; its argument is True if the run has a backward."""
Tensors = tuple[torch.Tensor, ...]
AfterStage = Callable[[Tensors, Tensors], bool]
"""Function called after each stage with its received and returned tensors, or its loss; flags of all stages are combined."""


class RunFailedError(Exception):
    """Error of a run that failed on this rank or on another one."""


class PlannedRows(NamedTuple):
    """Some rows, and the program planned for their shape."""

    program: Program
    rows: Rows


class Run(NamedTuple):
    """Results of a run.

    Args:
        rng_fingerprint: Fingerprint of this rank's random state after the run.
        found: True if ``after_stage`` returned True on any rank.
        written: Floating-point buffers that the run modified, see ``written_buffers``.
        rounding: Machine epsilon of the loss's dtype; 0 on ranks without a loss.
    """

    loss: float | None
    counted: LabelMean | None
    output: Any
    rng_fingerprint: int
    found: bool
    written: dict[str, torch.Tensor]
    rounding: float


class RunCache(NamedTuple):
    """Cached runs of a micro-batch and of its parts, None for a part that has not run.

    If the model ``draws`` random numbers on any rank, the runs of parts are deterministic.
    """

    whole: Run
    parts: list[Run | None]
    draws: bool


class StageRuns:
    """Runs stages in training mode, each on its rank. Every call is collective over the mesh.

    Args:
        accumulates: True if a run may accumulate gradients in parameters until its rollback.
        failed: Called with an error on its rank, before any reduction. It returns if the tensor-parallel ranks failed too;
            otherwise they would wait for this rank in a collective. With None, the first run raises its error at once.
    """

    def __init__(
        self,
        program: Program,
        options: CommonOptions,
        device: torch.device,
        around: Around,
        accumulates: bool = False,
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        self.accumulates, self._failed, self._has_run = accumulates, failed, False
        self._program, self._options, self.device, self._around = program, options, device, around

    def plan_rows(self, rows: Rows, has_backward: bool = True) -> PlannedRows:
        """Plan the stages for rows of this shape. A forward may test whether its run has gradients.

        Raises:
            RunFailedError: on all ranks, if one failed.
        """
        program, replan = self._program, self._program.replan
        if replan is None or len(program.stages) == 1:
            return PlannedRows(program, rows)
        with self.failing_on_all_ranks(), torch.enable_grad(), self._around(True):
            program = replan(True, rows.batch)
        if not has_backward and any(asks_for_gradients(stage.module) for stage in program.stages):
            with self.failing_on_all_ranks(), torch.no_grad(), self._around(False):
                program = replan(True, rows.batch)
        return PlannedRows(program, rows)

    def __call__(
        self, planned: PlannedRows, state: StateSnapshot, after_stage: AfterStage | None = None, fixed: bool = False
    ) -> Run:
        """Run rows through all stages, with gradients if there is an ``after_stage``, which is called after each.

        With ``fixed`` they run under ``DeterministicRandom``.

        Raises:
            RunFailedError: on all ranks, if the run failed on one.
        """
        state.restore()
        loss_of = None if has_loss_of_its_own(self._options) else CountedLoss(self._options.loss_fn, self._options.output_loss)
        one = _StageRun(planned, loss_of, after_stage)
        own = self._program.axis_rank("pp")
        values: Tensors = ()
        stages, has_backward = planned.program.stages, after_stage is not None
        for stage in stages:
            draws = DeterministicRandom() if fixed else nullcontext()
            with self.failing_on_all_ranks(), torch.set_grad_enabled(has_backward), self._around(has_backward), draws:
                if self._program.rank_of(stage.index) == own:
                    values = one.stage(stage, values)
            if stage.index + 1 < len(stages):
                values = self._send(values, stages[stage.index + 1].inputs, stage.index)
        found = self.any_rank(one.found) if has_backward else False
        self._has_run = True
        output, written = _detach_output(one.output), written_buffers(self._program.module, state)
        return Run(one.loss, one.counted, output, state.rng_fingerprint(), found, written, one.rounding)

    def own_modules(self, planned: PlannedRows) -> list[nn.Module]:
        own = self._program.axis_rank("pp")
        return [stage.module for stage in planned.program.stages if self._program.rank_of(stage.index) == own]

    def any_rank(self, flag: bool) -> bool:
        found = torch.tensor([int(flag)], device=self.device)
        return bool(all_reduce(found, self._program.mesh, dist.ReduceOp.MAX).item())

    @contextmanager
    def failing_on_all_ranks(self) -> Iterator[None]:
        """Context that raises ``RunFailedError`` on all ranks if one of them raises an error in it.

        Raises:
            SlapoError: the first run was refused; the step would be refused too.
        """
        error = None
        try:
            yield
        except Exception as err:
            error = err
            if self._failed is not None:
                self._failed(err)
            elif not self._has_run and self._program.axis_size("tp") > 1:
                raise
        if self.any_rank(error is not None):
            if not self._has_run and self.any_rank(isinstance(error, SlapoError)):
                raise_on_all_ranks(error if isinstance(error, SlapoError) else None, self._program.mesh)
            self._has_run = True
            raise RunFailedError(str(error) if error is not None else "it failed on another rank") from error

    def _send(self, values: Tensors, boundaries: tuple[Boundary, ...], source: int) -> Tensors:
        """Send a stage's outputs to the rank of the next stage; return them there."""
        ranks, own = [self._program.rank_of(source), self._program.rank_of(source + 1)], self._program.axis_rank("pp")
        if ranks[0] == ranks[1] or own not in ranks:
            return values
        assert self._program.mesh is not None
        group = self._program.mesh.get_group("pp")
        peer = dist.get_global_rank(group, ranks[1] if own == ranks[0] else ranks[0])
        if own == ranks[0]:
            for value in values:
                dist.send(_bytes(value.detach().contiguous()), peer, group=group)
            return values
        received = [torch.empty(each.shape, dtype=each.dtype, device=self.device) for each in boundaries]
        for value in received:
            dist.recv(_bytes(value), peer, group=group)
        return tuple(received)


class _StageRun:
    """One run of some rows through the stages of this rank."""

    def __init__(self, planned: PlannedRows, loss_of: CountedLoss | None, after_stage: AfterStage | None) -> None:
        self._stages, self._rows, self._loss_of, self._behind = planned.program.stages, planned.rows, loss_of, after_stage
        self.loss: float | None = None
        self.rounding = 0.0
        self.counted: LabelMean | None = None
        self.output: Any = None
        self.found = False

    def stage(self, stage: Stage, values: Tensors) -> Tensors:
        training = torch.is_grad_enabled()
        values = tuple(
            value.detach().requires_grad_(boundary.requires_grad and training)
            for value, boundary in zip(values, stage.inputs, strict=True)
        )
        args, kwargs = values, self._rows.batch
        if len(self._stages) > 1:
            kwargs = {name: kwargs[name] for name in stage.batch_inputs if name in kwargs}
        else:
            args, kwargs = call_arguments(stage.module, kwargs)
        is_last = stage.index + 1 == len(self._stages)
        given: Tensors = StageCall(stage.module, self._loss if is_last else _call)(*args, **kwargs)
        if not is_last:
            _check(given, self._stages[stage.index + 1].inputs)
        if self._behind is not None:
            self.found = self._behind(values, given) or self.found
        return given

    def _loss(self, module: nn.Module, args: Any, kwargs: Any) -> Tensors:
        def run() -> Any:
            self.output = module(*args, **kwargs)
            return self.output

        if self._loss_of is None:
            run()
            leaves = torch.utils._pytree.tree_leaves(self.output)
            return tuple(each for each in leaves if isinstance(each, torch.Tensor))
        loss, told = self._loss_of(run, self._rows.labels)
        self.counted = told if isinstance(told, LabelMean) else None
        self.loss, self.rounding = float(loss.detach()), torch.finfo(loss.dtype).eps
        return (loss,)


class StageCall(nn.Module):
    """A stage and the function of its output in one module, as engines call them: first-run checks watch the outermost call."""

    def __init__(self, module: nn.Module, call: Callable[[nn.Module, Any, Any], Tensors]) -> None:
        super().__init__()
        self.module, self._call = module, call

    def forward(self, *args: Any, **kwargs: Any) -> Tensors:
        return self._call(self.module, args, kwargs)


def _call(module: nn.Module, args: Any, kwargs: Any) -> Tensors:
    given: Tensors = module(*args, **kwargs)
    return given


def has_loss_of_its_own(options: CommonOptions) -> bool:
    """Return True if an option sets what the loss is a mean over, so that it is not assumed to be a mean over rows."""
    return any(getattr(options, name, None) is not None for name in ("loss_over", "loss_weights"))


@contextmanager
def runs_alone(program: Program, plans: Sequence[PlannedRows]) -> Iterator[StateSnapshot]:
    """Context that rolls back all changes of runs of these rows to model and process; see ``state_rollback``."""
    trees = [program.module, *(stage.module for each in plans for stage in each.program.stages)]
    with state_rollback(module for tree in trees for module in tree.modules()) as state:
        yield state


def _check(given: Tensors, boundaries: tuple[Boundary, ...]) -> None:
    """Raise ``RunFailedError`` if a stage returns other shapes or dtypes than planned."""
    for value, boundary in zip(given, boundaries, strict=True):
        if (tuple(value.shape), value.dtype) != (tuple(boundary.shape), boundary.dtype):
            raise RunFailedError(f"a stage gives {boundary.name!r} with another shape or type than planned")


def _detach_output(output: Any) -> Any:
    """Return the output without its graph, to free the graph before the next run."""

    def detach(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach()
        return with_tensors(leaf, lambda _, tensor: tensor.detach()) if dataclasses.is_dataclass(leaf) else leaf

    return tree_map(detach, output)


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(-1).view(torch.uint8)
