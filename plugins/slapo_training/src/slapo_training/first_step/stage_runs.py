"""Runs of a program's stages one after the other, without an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from slapo_core import Boundary, Program, SlapoError, Stage, all_reduce, call_arguments, raise_on_all_ranks
from slapo_tracing.nodes import asks_for_gradients

from ..batches.nested_tensors import with_tensors
from ..losses.microbatch_loss import CountedLoss
from ..losses.reductions import LabelMean
from ..model.state_rollback import StateSnapshot, state_rollback
from ..options.common_options import CommonOptions
from .deterministic_random import DeterministicRandom
from .row_mixing import written_buffers
from .row_subsets import Rows

Around = Callable[[bool], AbstractContextManager[Any]]
"""Makes the context that an engine puts around a run, such as autocast; gets whether the run has a backward."""
Tensors = tuple[torch.Tensor, ...]
AfterStage = Callable[[Tensors, Tensors], bool]
"""Called after_stage a stage with the tensors it received and returned, or its loss; the flags of all stages are combined."""


class RunFailedError(Exception):
    """A run failed, on this rank or on another one."""


class Planned(NamedTuple):
    """Some rows, and the program in stages for as many.

    Args:
        program: For that shape.
        rows: The rows that run through it.
    """

    program: Program
    rows: Rows


class Run(NamedTuple):
    """Results of a run.

    Args:
        loss: On ranks with the last stage; None on others.
        counted: Its reduction, where it is a known mean over labels.
        output: The model's output there, without its graph.
        rng_fingerprint: Where this rank's random numbers are after_stage the run.
        found: Whether ``after_stage`` said so on any rank.
        written: Floating-point buffers that the run has written, see ``written_buffers``.
        rounding: Relative spacing of numbers of the loss's type; 0 on ranks without one.
    """

    loss: float | None
    counted: LabelMean | None
    output: Any
    rng_fingerprint: int
    found: bool
    written: dict[str, torch.Tensor]
    rounding: float


class RunCache(NamedTuple):
    """Runs of a micro-batch and of its parts that need not be repeated.

    Args:
        whole: The run of all rows.
        parts: A run of each part, with fixed draws where the model draws random numbers; None for a part that has not run.
        draws: Whether the model draws random numbers on any rank.
    """

    whole: Run
    parts: list[Run | None]
    draws: bool


class StageRuns:
    """Runs stages in training mode, each on the rank that has it. Every call is collective over the mesh.

    Args:
        program: In stages, or one.
        options: Options of the engine; with ``loss_over`` or ``loss_weights`` backwards start at the outputs, without a loss.
        device: Device of the messages between ranks.
        around: Makes the context that an engine puts around a run.
        accumulates: Whether a run may leave gradients with parameters until it is put back, without an engine that takes them.
        failed: Called with an error on the rank that has it, before ranks meet: comes back where the tensor-parallel ranks have
            one as well, which else wait for this rank in a collective. None raises the error of the first run there.
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

    def planned(self, rows: Rows, has_backward: bool = True) -> Planned:
        """Plan the stages for rows of this shape.

        Args:
            rows: That are to run.
            has_backward: Whether runs of these have gradients, which a forward may ask for.

        Raises:
            RunFailedError: on a rank that failed; raised on all.
        """
        program, replan = self._program, self._program.replan
        if replan is None or len(program.stages) == 1:
            return Planned(program, rows)
        with self.failing_on_all_ranks(), torch.enable_grad(), self._around(True):
            program = replan(True, rows.batch)
        if not has_backward and any(asks_for_gradients(stage.module) for stage in program.stages):
            with self.failing_on_all_ranks(), torch.no_grad(), self._around(False):
                program = replan(True, rows.batch)
        return Planned(program, rows)

    def __call__(
        self, planned: Planned, state: StateSnapshot, after_stage: AfterStage | None = None, fixed: bool = False
    ) -> Run:
        """Run rows through all stages, with gradients where ``after_stage`` wants them.

        Args:
            planned: The rows.
            state: State that the run starts from.
            after_stage: Called after_stage each stage.
            fixed: Whether dropout is off, and other draws give fixed numbers.

        Raises:
            RunFailedError: the run broke off on a rank; raised on all.
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
        output, written = _detached(one.output), written_buffers(self._program.module, state)
        return Run(one.loss, one.counted, output, state.rng_fingerprint(), found, written, one.rounding)

    def own_modules(self, planned: Planned) -> list[nn.Module]:
        """Return the modules of this rank's stages."""
        own = self._program.axis_rank("pp")
        return [stage.module for stage in planned.program.stages if self._program.rank_of(stage.index) == own]

    def any_rank(self, flag: bool) -> bool:
        """Return whether a flag is set on any rank."""
        found = torch.tensor([int(flag)], device=self.device)
        return bool(all_reduce(found, self._program.mesh, dist.ReduceOp.MAX).item())

    @contextmanager
    def failing_on_all_ranks(self) -> Iterator[None]:
        """Raise ``RunFailedError`` on all ranks where one of them raises an error inside.

        Raises:
            SlapoError: the first run was refused, as the step would be.
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
        """Bring what one stage gave to the rank of the next."""
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

    def __init__(self, planned: Planned, loss_of: CountedLoss | None, after_stage: AfterStage | None) -> None:
        self._stages, self._rows, self._loss_of, self._behind = planned.program.stages, planned.rows, loss_of, after_stage
        self.loss: float | None = None
        self.rounding = 0.0
        self.counted: LabelMean | None = None
        self.output: Any = None
        self.found = False

    def stage(self, stage: Stage, values: Tensors) -> Tensors:
        """Run one stage; what it gives for the next."""
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
    """A stage and what is made of its output, in one module, as an engine calls them: others look at the outermost call."""

    def __init__(self, module: nn.Module, call: Callable[[nn.Module, Any, Any], Tensors]) -> None:
        super().__init__()
        self.module, self._call = module, call

    def forward(self, *args: Any, **kwargs: Any) -> Tensors:
        """Run the stage."""
        return self._call(self.module, args, kwargs)


def _call(module: nn.Module, args: Any, kwargs: Any) -> Tensors:
    given: Tensors = module(*args, **kwargs)
    return given


def has_loss_of_its_own(options: CommonOptions) -> bool:
    """Return whether options say what the loss is a mean over, so that the engine does not take it for one over rows."""
    return any(getattr(options, name, None) is not None for name in ("loss_over", "loss_weights"))


@contextmanager
def runs_alone(program: Program, plans: Sequence[Planned]) -> Iterator[StateSnapshot]:
    """Put back what runs of these rows change in the model and in the process; see ``state_rollback``."""
    trees = [program.module, *(stage.module for each in plans for stage in each.program.stages)]
    with state_rollback(module for tree in trees for module in tree.modules()) as state:
        yield state


def _check(given: Tensors, boundaries: tuple[Boundary, ...]) -> None:
    """Raise where a stage gives something else than the next one is going to receive."""
    for value, boundary in zip(given, boundaries, strict=True):
        if (tuple(value.shape), value.dtype) != (tuple(boundary.shape), boundary.dtype):
            raise RunFailedError(f"a stage gives {boundary.name!r} with another shape or type than planned")


def _detached(output: Any) -> Any:
    """Return the output without its graph, which else would stay in memory beside that of the next run."""

    def detach(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach()
        return with_tensors(leaf, lambda _, tensor: tensor.detach()) if dataclasses.is_dataclass(leaf) else leaf

    return tree_map(detach, output)


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(-1).view(torch.uint8)
