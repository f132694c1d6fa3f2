"""The engine of the dialect ``torch``: one rank's part of training a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core.agreement import agree, all_reduce
from slapo_core.engine import Engine
from slapo_core.errors import BuildError
from slapo_core.program import Program

from .batches import Batch, check_labels, content, counted_labels, fingerprint, signature, split
from .checkpoint import load_checkpoint, save_checkpoint
from .failures import Peers
from .holdings import Holdings
from .merged import merged
from .modes import Modes
from .options import Options
from .replicas import Replicas, check_dense
from .schedules import kind_of
from .stage_call import StageCall, precision
from .step import StepResult, run_whole

_KEPT_PLANS = 16  # shapes of micro-batches, each with its receive buffers

Runner = Callable[[list[Batch], list[Any]], StepResult]


class TorchEngine(Engine):
    """Trains or evaluates this rank's stages, or the whole model.

    Parameters may be frozen and unfrozen between steps, alike on all ranks that hold them; the optimizer is told of unfrozen
    ones by ``add_param_group``. On a rank that had none to train it is made of them in the next step.

    Every method is collective over the mesh. An error on one rank is raised on all of them, and the engine can go on with
    the next batch; after one in the optimizer's step, though, the other ranks have stepped: load a checkpoint. An error in the
    model that some tensor-parallel ranks only have ends the engine: these raise it, and the others, which wait for them in a
    collective, when the process of one has ended.

    Attributes:
        module: This rank's stage, all its stages in one tree, or the model.
        optimizer: Of this rank's trainable parameters; None when there are none, or no factory was given.
        timeline: With ``record_timeline``: the forwards (``"F"``) and backwards (``"B"``, or in two parts ``"I"`` and ``"W"``)
            of this rank in its last step, as dicts of ``rank``, ``stage``, ``kind``, ``microbatch``, ``start`` and ``end``
            (seconds since the epoch).
        grad_norm: Norm of all gradients of the last step before clipping; None without ``clip``.
    """

    def __init__(self, program: Program, options: Options) -> None:
        self._program = program
        self._options = options
        self._mesh = program.mesh
        self._modes = Modes(program.module)
        self._peers = (
            Peers(program.mesh["tp"].get_group()) if program.mesh is not None and program.axis_size("tp") > 1 else None
        )
        self._plans: dict[Any, Any] = {}
        self._device = _device(program)
        self.timeline: list[dict[str, Any]] = []
        self.grad_norm: float | None = None
        self._mine = tuple(stage.index for stage in program.stages if program.rank_of(stage.index) == program.axis_rank("pp"))
        self.module: nn.Module = merged([program.stages[index].module for index in self._mine])
        self.optimizer: torch.optim.Optimizer | None = None
        self._holdings = Holdings(program, self.module)
        self._replicas: Replicas | None = None
        self._unused = False
        self._outdated = False
        self._is_closed = False
        self._unchecked: torch.Tensor | int = 0
        try:
            self._holdings.check_same_start()
            self._together(self._make_optimizer)
            self._holdings.release_others()
            self._together(self._make_replicas)
        except Exception:
            self._release()
            raise

    # ---- what users call

    def train_batch(self, **batch: Any) -> torch.Tensor:
        """Forward, backward and one optimizer step; see ``Engine.train_batch``.

        Raises:
            BuildError: no optimizer factory was given; the batch cannot be cut into equal micro-batches; the micro-batches or
                ranks have different numbers of labels; the engine was closed; another rank failed.
        """
        if self._options.optimizer is None:
            raise BuildError("this engine was built without an optimizer and only evaluates; pass optimizer= to build")
        self.module.zero_grad(set_to_none=True)
        loss = self._step(batch, training=True)
        self._check_gradients()
        self._reduce()
        if self._options.clip:
            self._together(self._holdings.check_clippable)
        self._together(self._update)
        return loss

    def eval_batch(self, **batch: Any) -> torch.Tensor:
        """The mean loss in evaluation mode, without gradients; see ``Engine.eval_batch``."""
        return self._step(batch, training=False)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the model under original names, the optimizer and the random states to the directory ``path``."""
        save_checkpoint(path, self._program, self.module, self.optimizer)

    def load(self, path: str | PathLike[str]) -> None:
        """Go on exactly from what ``save`` wrote.

        Raises:
            BuildError: no complete checkpoint, or one of another layout.
        """
        load_checkpoint(path, self._program, self.module, self.optimizer)

    def close(self) -> None:
        """Take the engine's hooks off the parameters and forget its plans; it only evaluates and saves from now on."""
        self._is_closed = True
        self._release()

    def _release(self) -> None:
        self._plans.clear()
        if self._replicas is not None:
            self._replicas.close()
            self._replicas = None

    # ---- one step

    def _step(self, batch: Mapping[str, Any], training: bool) -> torch.Tensor:
        if self._peers is not None:
            self._peers.begin()
        self._modes.set(training)
        prepared = self._together(lambda: self._prepare(dict(batch), training), self._facts_of)
        if self._outdated:
            self._take_in_unfrozen()
            prepared = self._together(lambda: self._prepare(dict(batch), training), self._facts_of)
        runner, parts, labels = prepared
        result = runner(parts, labels)
        loss = self._settle(result, training)
        if self._options.record_timeline:
            rank = dist.get_rank() if dist.is_initialized() else 0
            self.timeline = [{"rank": rank, **action} for action in result.actions]
        return loss

    def _prepare(self, batch: Batch, training: bool) -> tuple[Runner, list[Batch], list[Any]]:
        """Cut the batch and find what runs it; touches no other rank."""
        if training and self._is_closed:
            raise BuildError("this engine was closed and trains no more; build another one, or close it later")
        self._outdated = training and self._holdings.is_outdated()
        self._content = content(batch) if self._shares_batches else 0
        parts = split(batch, self._options.microbatches)
        self._facts = [
            fingerprint([signature(part) for part in parts[:1]]),
            *counted_labels(parts, self._options.ignored_label),
        ]
        check_labels(batch, self._program.module, self._options.loss_fn)
        labels: list[Any] = [None] * len(parts)
        if self._options.loss_fn is not None:
            labels = [part.pop("labels") for part in parts]
        return self._runner(parts[0], training), parts, labels

    def _runner(self, part: Batch, training: bool) -> Runner:
        if len(self._program.stages) == 1:
            call = StageCall(self._program.stages[0], None, self._options, self._device.type)
            return lambda parts, labels: run_whole(call, parts, labels, training, self._replicas)
        from .pipeline import StagePlan  # noqa: PLC0415  importing torch.distributed.pipelining costs a second

        key = (training, signature(part))
        assert self._program.replan is not None
        with torch.set_grad_enabled(training), precision(self._options, self._device.type):
            program = self._program.replan(training, part)  # the same one, unless the model has changed
        plan: StagePlan | None = self._plans.get(key)
        if plan is None or plan.program is not program:
            plan = self._plans[key] = StagePlan(program, self._options, self._mine, training, self._replicas)
            if len(self._plans) > _KEPT_PLANS:
                self._plans.pop(next(iter(self._plans)))
        self._facts.append(fingerprint([stage.inputs for stage in plan.program.stages]))
        return plan.run

    def _facts_of(self) -> list[int]:
        return self._facts

    def _together(self, work: Callable[[], Any], facts: Callable[[], list[int]] | None = None) -> Any:
        """Do what one rank can do alone; go on only if all could, and if what they got is of one kind.

        One small reduction where all is well; messages travel only when not.
        """
        error, value = None, None
        try:
            value = work()
        except Exception as err:
            error = err
        mine = facts() if facts is not None and error is None else []
        mine = [*mine, *[0] * (4 - len(mine))]
        slots = self._slots(error is None) if facts is not None else []
        row = [error is not None, self._outdated, *mine, *(-fact for fact in mine), *slots]
        largest = torch.tensor(row, dtype=torch.int64, device=self._device)
        failed, self._outdated, *bounds = all_reduce(largest, self._mesh, dist.ReduceOp.MAX).tolist()
        if failed:
            agree(error, self._mesh)
        high, low = bounds[:4], [-bound for bound in bounds[4:8]]
        if high != low:
            raise BuildError(_difference(high, low, self._options.ignored_label))
        _check_contents(bounds[8:])
        return value

    @property
    def _averages_late(self) -> bool:
        """Whether gradients are averaged over replicas after the last backward: a backward in two parts runs no hooks."""
        kind = kind_of(self._options.pipeline_schedule)
        return self._program.axis_size("dp") > 1 and len(self._program.stages) > 1 and kind.stages_per_rank != 1

    @property
    def _shares_batches(self) -> bool:
        """Whether several ranks have to be given the same batch."""
        return self._program.axis_size("pp") * self._program.axis_size("tp") > 1

    def _slots(self, known: bool) -> list[int]:
        """For each replica the largest and, negated, the smallest content of its ranks' batches; this rank knows its own."""
        if not self._shares_batches:
            return []
        slots = [_NOTHING] * (2 * self._program.axis_size("dp"))
        if known:
            own = 2 * self._program.axis_rank("dp")
            slots[own : own + 2] = self._content, -self._content
        return slots

    def _take_in_unfrozen(self) -> None:
        """Train with what is trainable now. Collective."""
        holdings = Holdings(self._program, self.module)
        holdings.check_same_start()
        self._holdings, self._outdated = holdings, False
        self._together(self._make_optimizer)
        self._together(self._make_replicas)

    def _settle(self, result: StepResult, training: bool) -> torch.Tensor:
        """The mean loss over micro-batches and replicas, on every rank; or the error of any rank, on every rank."""
        own = torch.stack(result.losses).sum().double() if result.losses else torch.zeros((), dtype=torch.float64)
        if self._program.axis_rank("tp") != 0:  # tensor-parallel ranks all have the same loss
            own = torch.zeros((), dtype=torch.float64)
        unchecked = self._holdings.num_unchecked() if training else 0
        if training and result.failure is None:
            result.failure = self._holdings.sparse_tie()
        if result.failure is not None and self._peers is not None:
            self._peers.meet(result.failure)
        is_double = any(loss.dtype is torch.float64 for loss in result.losses)
        counts = torch.tensor([result.failure is not None, result.unused, unchecked, is_double], dtype=torch.float64)
        total, failures, unused, self._unchecked, doubles = all_reduce(
            torch.cat([own.cpu().reshape(1), counts]).to(self._device), self._mesh
        )
        self._unused = bool(unused.item())
        if failures.item():
            self._start_over()
            agree(result.failure, self._mesh)
        mean: torch.Tensor = total / self._program.axis_size("dp")
        return mean if doubles.item() else mean.float()

    def _check_gradients(self) -> None:
        """Refuse a step in which ranks have parts of a gradient and take each for the whole."""
        if self._unchecked:
            try:
                self._holdings.check_gradients(low_precision=self._options.precision == "bf16")
            except Exception:
                self._start_over()
                raise

    def _start_over(self) -> None:
        self.module.zero_grad(set_to_none=True)
        if self._replicas is not None:  # a backward that broke off may have left its bookkeeping incomplete
            self._make_replicas()

    def _reduce(self) -> None:
        """What is left to do about gradients once the backwards have averaged them over replicas."""
        if self._replicas is not None and self._unused:
            self._replicas.drop_unused()
        if self._averages_late:
            self._holdings.average_over_replicas()
        self._holdings.reduce_ties()

    def _clip(self) -> float | None:
        return float(self._holdings.clip(self._options.clip)) if self._options.clip else None

    def _update(self) -> None:
        self.grad_norm = self._clip()
        if self.optimizer is not None:
            self.optimizer.step()

    def _make_replicas(self) -> None:
        self._release()
        # DistributedDataParallel refuses a stage without trainable parameters, which has nothing to reduce
        if self._program.axis_size("dp") == 1 or not self._holdings.trainable or self._options.optimizer is None:
            return
        check_dense(self.module)
        if not self._averages_late:
            assert self._mesh is not None
            self._replicas = Replicas(self.module, self._mesh["dp"].get_group())

    def _make_optimizer(self) -> None:
        trainable = self._holdings.trainable
        if self._options.optimizer is not None and trainable and self.optimizer is None:
            made = self._options.optimizer(trainable)
            if not isinstance(made, torch.optim.Optimizer):
                raise BuildError(f"optimizer= gave a {type(made).__name__}; it must return a torch.optim.Optimizer")
            self.optimizer = made


def _device(program: Program) -> torch.device:
    kind = program.mesh.device_type if program.mesh is not None else _parameter_device(program.module)
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _parameter_device(module: nn.Module) -> str:
    first = next(module.parameters(), None)
    return first.device.type if first is not None else "cpu"


_NOTHING = -(2**40)


def _check_contents(slots: list[int]) -> None:
    for replica, (high, low) in enumerate(zip(slots[::2], slots[1::2], strict=True)):
        if high != -low:
            raise BuildError(
                f"the ranks of replica {replica} were given different batches; give all pipeline stages and tensor-parallel "
                "ranks of one replica the same rows in the same order, e.g. by one seed for their data loaders"
            )


def _difference(high: list[int], low: list[int], ignored: int) -> str:
    if high[1:3] != low[1:3]:
        return (
            f"the ranks have different numbers of labels that are not {ignored} in a micro-batch, from {low[1]} to {high[1]}; "
            "pad so that they are equal"
        )
    if high[0] != low[0]:
        return "the ranks were given batches of different names, shapes or types; give each rank a batch of the same shape"
    return "the ranks planned different stage boundaries; the model's code must not depend on the rank"
