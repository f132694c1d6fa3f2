"""``Pipe`` and ``pipeline`` with the interface of ``torch.distributed.pipelining``, on the stages of this package."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import fx, nn

from slapo_core import BuildError, Program, TieGroup, named_inputs

from .analysis import result_keys
from .cut_at_marks import marks_of_model
from .partition.partitioned_module import PartitionedModule
from .partition.partitioner import Partitioner, check_cuts
from .torch_pipe.split_policy import PolicyPartitioner, SplitPolicy, annotated_points, split_points
from .torch_pipe.stage_runtime import meta_like
from .torch_pipe.transmitted_parameters import transmit_parameters
from .tracing.cuts import Cut

__all__ = ["Pipe", "pipeline"]

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

    from .torch_pipe._torch_private import MultiUseParameterConfig, PipeInfo, SplitPoint

    MultiUse = MultiUseParameterConfig | Mapping[str, MultiUseParameterConfig]

_PREFIX = "submod_pp"


class Pipe(nn.Module):
    """A model in stages that torch's pipeline schedules run.

    ``pipeline`` and ``Pipe.from_tracing`` make it. The stages hold the model's own parameters, under the same names. A call
    runs the stages in turn in this process, with gradients through all of them.

    Args:
        split_gm: The stages, ``submod_pp_0`` and so on.
        num_stages: Number of stages.
        has_loss_and_backward: Whether the result has a loss.
        loss_spec: The loss in the result: True for all of it, or a boolean per key; None without a loss.

    Attributes:
        example: The model's arguments that the pipe was made with, by name; tensors are on the meta device.
    """

    def __init__(self, split_gm: fx.GraphModule, num_stages: int, has_loss_and_backward: bool, loss_spec: Any) -> None:
        super().__init__()
        if not isinstance(split_gm, PartitionedModule):
            raise BuildError(f"split_gm is a {type(split_gm).__name__}; make a Pipe with pipeline() or Pipe.from_tracing()")
        self.split_gm = split_gm
        self.num_stages, self.has_loss_and_backward, self.loss_spec = num_stages, has_loss_and_backward, loss_spec
        self.example: dict[str, Any] = {}
        self.__dict__["_runtime"] = None
        self.training = split_gm.training

    @property
    def program(self) -> Program:
        """The program of the stages, for engines."""
        return self.split_gm.program

    @property
    def replicated_params(self) -> list[dict[str, str]]:
        """Per parameter that several stages hold, the names of these stages to its name in each."""
        stages = {index: dict(self.get_stage_module(index).named_parameters()) for index in range(self.num_stages)}
        return [
            {f"{_PREFIX}_{index}": next(name for name in tie.names if name in stages[index]) for index in tie.stages}
            for tie in self.program.ties
        ]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stages in turn; the arguments and the result are the model's."""
        return self.split_gm(*args, **kwargs)

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        """Return the module of a stage.

        Raises:
            ValueError: no such stage.
        """
        if not 0 <= stage_idx < self.num_stages:
            raise ValueError(f"there is no stage {stage_idx}; the pipe has stages 0 to {self.num_stages - 1}")
        return self.split_gm.get_submodule(f"{_PREFIX}_{stage_idx}")

    def info(self) -> PipeInfo:
        """Return the graph that calls the stages, their number, and whether the result has a loss."""
        from .torch_pipe._torch_private import PipeInfo  # noqa: PLC0415  takes a second

        return PipeInfo(graph=self.split_gm.graph, num_stages=self.num_stages, has_loss_and_backward=self.has_loss_and_backward)

    def print_readable(self) -> None:
        """Print the code that calls the stages, and the code of each stage."""
        self.split_gm.print_readable()

    def __str__(self) -> str:
        return str(self.split_gm)

    def __repr__(self) -> str:
        return repr(self.split_gm)

    def build_stage(
        self,
        stage_index: int,
        device: torch.device | str,
        group: dist.ProcessGroup | None = None,
        *,
        output: Callable[[Any], Any] | None = None,
    ) -> PipelineStage:
        """Make a stage that the schedules of ``torch.distributed.pipelining`` run.

        The rank of the first stage gives ``step`` the model's arguments, by position and by name. Arguments that later stages
        read are sent on; a rank may also give them to its stages by name. After the last backward of a step, the gradients of
        parameters that several stages hold are summed over the group.

        Args:
            stage_index: Index of the stage.
            device: Device of the stage; its parameters are moved there.
            group: Process group of the pipeline; default: all ranks.
            output: Function from the model's result to the schedule's, a tensor or a tuple of tensors. Default: all tensors
                of the result in order.

        Raises:
            ValueError: no such stage.
            BuildError: ``output`` returns something else.
        """
        from .torch_pipe.pipe_runtime import PipeRuntime  # noqa: PLC0415  takes a second

        self.get_stage_module(stage_index)
        if self.__dict__["_runtime"] is None:
            self.__dict__["_runtime"] = PipeRuntime(self.program, self.example)
        runtime: PipeRuntime = self.__dict__["_runtime"]
        return runtime.stage(stage_index, torch.device(device), group, output)

    @staticmethod
    def from_tracing(
        mod: nn.Module,
        example_args: tuple[Any, ...],
        example_kwargs: dict[str, Any] | None = None,
        split_policy: SplitPolicy | None = None,
        *,
        multi_use_param_spec: MultiUse | None = None,
    ) -> Pipe:
        """Cut a model at the marks in its forwards and at annotated split points, or at the marks of a policy.

        Args:
            mod: The model, in the mode it is to run in; it does not change.
            example_args: Positional arguments of one micro-batch.
            example_kwargs: Keyword arguments.
            split_policy: See ``pipeline``.
            multi_use_param_spec: See ``pipeline``.

        Raises:
            ScheduleError, BuildError, TraceError: see ``pipeline``.
        """
        return _make_pipe(mod, example_args, example_kwargs, [], split_policy, multi_use_param_spec)


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    split_spec: dict[str, SplitPoint] | None = None,
    split_policy: SplitPolicy | None = None,
    *,
    multi_use_param_spec: MultiUse | None = None,
) -> Pipe:
    """Cut a model into stages that torch's pipeline schedules run.

    It replaces ``torch.distributed.pipelining.pipeline``, and its stages serve batches of any values. It uses the tracer of
    schedules, which handles rotary embeddings, masks made under ``no_grad``, keyword arguments, results in structures and
    tied parameters. ``pipe_split()`` in a forward and annotated split points also end stages.

    Args:
        module: The model, in the mode it is to run in; it does not change.
        mb_args: Positional arguments of one micro-batch.
        mb_kwargs: Keyword arguments.
        split_spec: Paths of modules to the points where a stage ends: before or after the module's forward.
        split_policy: Alternative to ``split_spec``: a function that puts calls of ``pipe_split`` into the traced model's graph
            and returns it.
        multi_use_param_spec: Treatment of parameters that several stages use, for all or by name. ``REPLICATE``, the default:
            each stage holds it, and the gradients are summed after each step. ``TRANSMIT``: the first stage holds it, sends
            its value on and gets the whole gradient.

    Raises:
        ValueError: both a specification and a policy, or a value that is not a split point.
        AttributeError: a path that names no module.
        ScheduleError: a split point leaves a stage with no node to run.
        BuildError: a split point inside a module that is wrapped or has hooks; a policy that returns something else.
        TraceError: the model cannot be traced, or a value that is not a tensor would have to cross a boundary.
    """
    if split_spec is not None and split_policy is not None:
        raise ValueError("both split_spec and split_policy are given; give one of them")
    cuts = split_points(module, split_spec or {})
    return _make_pipe(module, mb_args, mb_kwargs, cuts, split_policy, multi_use_param_spec)


def _make_pipe(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    cuts: list[Cut],
    policy: SplitPolicy | None,
    multi_use: Any,
) -> Pipe:
    batch = named_inputs(module, args if isinstance(args, (tuple, list)) else (args,), kwargs or {})
    chosen = _transmit_choice(module, multi_use)
    program = transmit_parameters(_partitioner(module, batch, cuts, policy).program(module.training, batch), chosen)
    spec = _loss_spec(module, program)
    pipe = Pipe(PartitionedModule(program, (_PREFIX + "_{}").format), len(program.stages), spec is not None, spec)
    pipe.example = torch.utils._pytree.tree_map_only(torch.Tensor, meta_like, batch)
    return pipe


def _partitioner(module: nn.Module, batch: Mapping[str, Any], cuts: list[Cut], policy: SplitPolicy | None) -> Partitioner:
    if policy is not None:
        return PolicyPartitioner(module, policy)
    marks = Counter(marks_of_model(module, batch))
    at_marks = [Cut(path, number) for path, count in marks.items() for number in range(count)]
    known = {(str(cut), cut.where) for cut in cuts}
    annotated = [cut for cut in annotated_points(module) if (str(cut), cut.where) not in known]
    all_cuts: list[str] = [*cuts, *annotated, *at_marks]
    check_cuts(module, all_cuts)
    return Partitioner(module, all_cuts, None, any_values=True)


def _transmit_choice(module: nn.Module, spec: Any) -> Callable[[TieGroup], bool]:
    """Return a function that tells whether a tie is transmitted."""
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    choices = dict(spec) if isinstance(spec, Mapping) else {}
    if unknown := sorted(choices.keys() - names):
        raise ValueError(f"multi_use_param_spec names {unknown[0]!r}, no parameter of the {type(module).__name__}")
    for value in choices.values() if isinstance(spec, Mapping) else [spec] * (spec is not None):
        if getattr(value, "name", None) not in ("TRANSMIT", "REPLICATE"):
            raise ValueError(f"multi_use_param_spec has {value!r}; give MultiUseParameterConfig.TRANSMIT or .REPLICATE")
    if not isinstance(spec, Mapping):
        return lambda tie: spec is not None and spec.name == "TRANSMIT"
    return lambda tie: any(choices[name].name == "TRANSMIT" for name in tie.names if name in choices)


def _loss_spec(module: nn.Module, program: Program) -> Any:
    """Return the model's own ``loss_spec``, or one for the key ``"loss"`` of its result, or None."""
    if (own := getattr(module, "loss_spec", None)) is not None:
        return own
    keys = result_keys(program.stages[-1].module)
    return {key: key == "loss" for key in keys} if keys is not None and "loss" in keys else None
