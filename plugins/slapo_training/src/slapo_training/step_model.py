"""Interface by which planners read about a training step of a dialect, without processes, weights or an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from slapo_core import Program, Stage

from .batches import Batch
from .optimizers.fake_whole_tensors import FakeWholeTensors
from .stage_memory import CollectiveRecord, MessageSizes, StageMemory
from .stage_parameters import GradientSize, StageParameters

MessageMode = Literal["overlapped", "on_demand", "blocking"]
"""Way in which an engine sends tensors between stages.

``"overlapped"``: a message leaves when its tensor is ready, while both ranks go on computing.
``"on_demand"``: the sender goes on; the transfer begins when the receiver waits for it.
``"blocking"``: as ``"on_demand"``, and the sender waits for the transfer before its next action of the other direction, or
after its next action of the same direction.
"""

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class PipelineAction(NamedTuple):
    """One computation of a rank of a pipeline.

    Args:
        kind: ``"F"`` forward, ``"B"`` backward; ``"I"`` and ``"W"`` are the parts of a backward for inputs and for weights.
        stage: Index of the stage.
        microbatch: Index of the micro-batch.
    """

    kind: str
    stage: int
    microbatch: int


class StepFacts(NamedTuple):
    """Facts about a step from the runs of one rank's stages.

    Args:
        stages: All stages of the program for a micro-batch.
        actions: Computations of the rank.
        arrivals: Gradients of its parameters in the order in which a backward finishes them, those of unused ones behind.
        unused: Number of its trainable parameters without a gradient.
    """

    stages: Sequence[Stage]
    actions: Sequence[PipelineAction]
    arrivals: Sequence[GradientSize] = ()
    unused: int = 0


class MemoryRules(NamedTuple):
    """Memory that an engine uses beside parameters, optimizer state, and what forwards and backwards allocate.

    Args:
        buckets: True if gradients have buckets that stay between steps. With one micro-batch gradients are views of them, with
            several they are copied there in the last one.
        receive_buffers: True if each micro-batch has buffers of its own for the tensors that its stages receive.
        keeps_sent: True if tensors that were sent stay allocated until the end of the step; otherwise until the next message.
        holds_received: True if a received tensor is allocated before its forward and freed after its backward.
        fixed_buffers: True if a stage has one buffer for what it receives and one for the gradient of what it sends, which stay
            between steps; otherwise that gradient is allocated for its backward.
        kept_losses: Number of losses that the last stage keeps, also between steps, each with what its micro-batch received
            and the gradient of that.
        flattens_gradients: True if flat copies of all gradients are reduced over replicas after the last backward.
        tie_bucket: Bytes from which gradients of tied parameters are summed apart. After the last backward a rank has a flat
            copy of them from each rank that shares them, and the sum of one bucket. 0 without.
        main_itemsize: Bytes of each element of the copies that the optimizer steps in place of fp32 parameters; 0 without.
        gradient_itemsize: Bytes of each element of gradient buffers that stay between steps, beside which there are no other
            gradients; 0 without.
        step_itemsize: Bytes of each element that the optimizer steps, during its step, where it steps all as one flat tensor.
        backward_bytes: Bytes of buffers from which gradients are reduced during a backward.
        messages: Computes the bytes of messages that exist during each action of a rank, given its actions and the sizes of its
            stages' messages; None if the other rules say so.
    """

    buckets: bool = False
    receive_buffers: bool = False
    keeps_sent: bool = False
    holds_received: bool = False
    fixed_buffers: bool = False
    kept_losses: int = 0
    flattens_gradients: bool = False
    tie_bucket: int = 0
    main_itemsize: int = 0
    gradient_itemsize: int = 0
    step_itemsize: int = 0
    backward_bytes: int = 0
    messages: Callable[[Sequence[PipelineAction], Mapping[int, MessageSizes]], Sequence[int]] | None = None


class PipelineChoice(NamedTuple):
    """One pipeline schedule that planners may choose.

    Args:
        options: Options of ``build`` that choose it.
        stages_per_rank: Number of stages of each rank.
        is_default: False if planners try it only when asked to.
        splits_backward: True if it runs backwards for inputs and for weights apart.
    """

    options: Mapping[str, Any]
    stages_per_rank: int = 1
    is_default: bool = True
    splits_backward: bool = False


class ReplicaChoice(NamedTuple):
    """One way to run data-parallel replicas that planners may choose.

    Args:
        options: Options of ``build`` that choose it; nested mappings are joined with those of the user.
        divided: Kinds of memory that replicas divide among them: ``"parameters"``, ``"gradients"``, ``"optimizer"``.
        allows_pipeline: False if it needs a model in one stage.
    """

    options: Mapping[str, Any]
    divided: Collection[str] = ()
    allows_pipeline: bool = True


class StageRunner(ABC):
    """Calls the stages of a program as an engine does, in a process without real ranks.

    Nothing here communicates, and the model does not change. Weights may be on meta or fake.
    """

    @abstractmethod
    def split(self, batch: Mapping[str, Any]) -> list[Batch]:
        """Return the micro-batches of one data-parallel rank's batch, each as arguments of the forward by name."""

    def plan(self, program: Program, part: Batch) -> Program:
        """Return the program for one micro-batch in training."""
        return program.replan(True, part) if program.replan is not None else program

    @abstractmethod
    def run(self, program: Program, stage: int, received: Sequence[torch.Tensor], part: Batch) -> Any:
        """Run the forward of a stage; return the tensors it sends, or the loss in the last stage.

        Args:
            program: The program for this micro-batch.
            stage: Index of the stage.
            received: Values of the stage's ``inputs``.
            part: The micro-batch, with ``labels`` where the engine was given ``loss_fn``.
        """

    def weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model's tensors have the types that the engine gives them; nothing runs outside."""
        return nullcontext()

    def memories(self, optimizer: OptimizerFactory | None) -> Sequence[Callable[[nn.Module], StageMemory]]:
        """Return what makes the engine's own tensors for a stage, for each replica that may need the most memory.

        None are returned if the engine's optimizer steps parameters and their gradients. Each gets the module of the stage,
        with fake tensors, whose parameters it may replace.

        Args:
            optimizer: Makes the optimizer of some parameters.
        """
        return ()

    def parameters(self, program: Program, stage: int) -> StageParameters:
        """Return the parameters of a stage as the engine holds them over a step."""
        return StageParameters()

    def whole_tensors(self, program: Program, stage: int, optimizer: OptimizerFactory) -> FakeWholeTensors | None:
        """Return the step of an optimizer that steps whole tensors of which a rank holds parts; None for any other one."""
        return None

    repeats_forward = False
    """True if all micro-batches run forward without a backward before the step runs them again."""
    loss_collectives: Sequence[CollectiveRecord] = ()
    """Collectives of a loss of all replicas in one step of the last stage, after this stage has run."""

    def adapts_to(self, error: Exception) -> bool:
        """Change how stages run after an error, if the engine would; return False if the engine raises the error."""
        return False


class StepModel:
    """Facts about a training step of one dialect, computed from its options alone.

    A dialect publishes a subclass as ``classes["step_model"]``. ``config`` holds the options of ``build``; missing ones have
    their defaults.
    """

    @classmethod
    def action_order(
        cls, config: Mapping[str, Any], stages: int, ranks: int, microbatches: int
    ) -> dict[int, list[PipelineAction]]:
        """Return the computations of each rank of one pipeline in the order in which the engine runs them.

        Args:
            config: Options of ``build``.
            stages: Number of stages.
            ranks: Number of ranks along ``pp``.
            microbatches: Number of micro-batches of a step.

        Returns:
            For each rank along ``pp`` its actions; without a pipeline, rank 0 alternates forwards and backwards. Callers must
            not change the lists.

        Raises:
            BuildError: the schedule cannot run so many stages or micro-batches.
        """
        raise NotImplementedError

    @classmethod
    def stage_runner(cls, program: Program, config: Mapping[str, Any]) -> StageRunner:
        """Return what runs the stages of a program as the engine does.

        Args:
            program: The program, as ``Dialect.check`` returned it.
            config: Options of ``build``.
        """
        raise NotImplementedError

    @classmethod
    def pipeline_choices(cls) -> Mapping[str, PipelineChoice]:
        """Return the pipeline schedules that planners may choose, by name; by default the only one, ``"1f1b"``."""
        return {"1f1b": PipelineChoice({})}

    @classmethod
    def replica_choices(cls) -> Mapping[str, ReplicaChoice]:
        """Return the ways to run replicas that planners may choose, by name; by default the only one, ``"ddp"``."""
        return {"ddp": ReplicaChoice({})}

    @classmethod
    def memory_rules(cls, config: Mapping[str, Any], stages: int, ranks: int, replicas: int) -> MemoryRules:
        """Return what the engine allocates beside the model.

        Args:
            config: Options of ``build``.
            stages: Number of stages.
            ranks: Number of ranks along ``pp``.
            replicas: Number of ranks along ``dp``.
        """
        return MemoryRules()

    @classmethod
    def named_optimizer(cls, config: Mapping[str, Any]) -> OptimizerFactory | None:
        """Return a factory like the optimizer that the engine's own configuration names; None if it names none."""
        return None

    @classmethod
    def collectives(cls, program: Program, config: Mapping[str, Any], rank: int, facts: StepFacts) -> list[CollectiveRecord]:
        """Return the collectives and messages of a step that are not in the forwards and backwards of the model.

        These are messages between stages, recorded at both ends, reductions of gradients, gathers of parameters, and the small
        reductions by which ranks agree. The step is not the first.

        Args:
            program: The program, as ``Dialect.check`` returned it.
            config: Options of ``build``.
            rank: Rank along ``pp``; the other ranks need not exist.
            facts: What the runs of its stages have shown.

        Returns:
            The records in the order of the step; by default none.
        """
        return []

    @classmethod
    def notes(cls, program: Program, config: Mapping[str, Any]) -> list[str]:
        """Return what an estimate of the target leaves out, one sentence each; arguments as of ``stage_runner``."""
        return []

    @classmethod
    def message_mode(cls, config: Mapping[str, Any], stages: int, ranks: int, microbatches: int) -> MessageMode:
        """Return how the engine sends tensors between stages; arguments as of ``action_order``."""
        return "blocking"

    @classmethod
    def overlaps_reduction(cls, config: Mapping[str, Any], stages: int, ranks: int) -> bool:
        """Return True if gradients are reduced over replicas during the last backward of a stage; False if after it."""
        return False


def one_forward_one_backward(stages: int, microbatches: int) -> dict[int, list[PipelineAction]]:
    """Return the order of 1F1B with one stage per rank; without a pipeline, of gradient accumulation.

    Rank ``r`` runs ``stages - r`` forwards, then backwards and forwards by turns, then the backwards that are left.
    """
    order = {}
    for rank in range(stages):
        warmup = min(microbatches, stages - rank)
        row = [PipelineAction("F", rank, index) for index in range(warmup)]
        for index in range(microbatches):
            row.append(PipelineAction("B", rank, index))
            if index + warmup < microbatches:
                row.append(PipelineAction("F", rank, index + warmup))
        order[rank] = row
    return order
