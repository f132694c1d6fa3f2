"""Stages of a program for users who run torch's pipeline schedules themselves, and the gradients of their ties."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.utils import _pytree as pytree

from slapo_core import Boundary, BuildError, Program, get_logger

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage


def build_stage(
    program: Program,
    stage: int,
    device: torch.device | str,
    group: dist.ProcessGroup | None = None,
    output: Callable[[Any], Any] | None = None,
) -> PipelineStage:
    """Make one stage for ``ScheduleGPipe`` and the other schedules of ``torch.distributed.pipelining``.

    Each rank calls the schedule's ``step`` with the arguments of the model, by name, that its stages read from the batch
    (``stage.batch_inputs``). A parameter in ``program.ties`` gets on each stage the gradient of that stage's use alone: call
    ``sum_tied_gradients`` before each step of the optimizer, as an engine does. A warning names the ties of this stage.

    Args:
        program: Made for inputs of the shapes of one micro-batch.
        device: Device of the stage; its parameters must be there already.
        group: Process group of the pipeline; default: the mesh's axis ``pp``, or all ranks if the program has no mesh. The
            schedule decides which rank runs which stage.
        output: Function from the model's result to the schedule's, e.g. ``lambda result: result.loss``: a tensor or a tuple
            of tensors. Default: the result itself.

    Gradients are exact under each schedule: see ``slapo_training.ExactStage``. A stage may serve only batches with the same
    answers as the example inputs, such as nothing being padded; those of ``for_any_values(program, inputs)`` serve all.

    Raises:
        BuildError: no such stage, a stage that was not traced here, or a result that is neither a tensor nor a tuple of
            tensors.
    """
    from slapo_training import ExactStage  # noqa: PLC0415  takes a second, and few users need it

    if not 0 <= stage < len(program.stages):
        raise BuildError(f"no stage {stage}; the program has stages 0 to {len(program.stages) - 1}")
    this, last = program.stages[stage], stage + 1 == len(program.stages)
    if tied := [tie.names[0] for tie in program.ties if stage in tie.stages]:
        remedy = "call slapo.pipeline.sum_tied_gradients(program) before each step of the optimizer"
        get_logger().warning("stage %d shares %s with other stages; %s", stage, ", ".join(map(repr, tied)), remedy)
    mark_local_stage(program, stage)
    module = StageRunner(this.module, last, output)
    sent = (
        tuple(map(meta_like, program.stages[stage + 1].inputs))
        if not last
        else tuple(map(meta_like, module.results(model_result(this.module))))
    )
    received = tuple(map(meta_like, this.inputs))
    group = group or pipeline_group(program)
    return ExactStage(module, stage, len(program.stages), torch.device(device), received, sent, group=group)


def sendable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor that is not a view: zero-bubble schedules detach it in place, which views forbid."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor._is_view() else tensor


def mark_local_stage(program: Program, stage: int) -> None:
    """Record that this rank runs a stage."""
    program.stages[stage].module.__dict__[_LOCAL] = True


_LOCAL = "_slapo_built_here"
"""Attribute of the module of a stage that this rank runs."""


def pipeline_group(program: Program) -> dist.ProcessGroup | None:
    """Return the process group of the mesh's axis ``pp``, or None, all ranks, if there is no such axis."""
    mesh = program.mesh
    return mesh.get_group("pp") if mesh is not None and "pp" in (mesh.mesh_dim_names or ()) else None


class StageRunner(nn.Module):
    """A stage as torch's runtime calls it; it returns contiguous tensors.

    The ``last`` one returns ``output`` of the model's result, or for None the result itself.
    """

    takes_nested = False
    """True if the tensors of the result may be nested in containers, and without ``output`` lie beside other values."""

    def __init__(self, module: nn.Module, last: bool, output: Callable[[Any], Any] | None) -> None:
        super().__init__()
        self.module = module
        self._last, self._output = last, output

    def forward(self, *received: torch.Tensor, **batch: Any) -> Any:
        result = self.module(*received, **batch)
        if not self._last:
            return tuple(map(sendable, result))
        found = self.results(result)
        return found[0] if len(found) == 1 else found

    def results(self, result: Any) -> tuple[torch.Tensor, ...]:
        """Return the tensors of the model's result that the schedule receives."""
        found = result if self._output is None else self._output(result)
        flat = found if isinstance(found, tuple) else (found,)
        leaves = pytree.tree_leaves(found) if self.takes_nested else flat
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        has_others = len(tensors) < len(leaves) and not (self.takes_nested and self._output is None)
        if not tensors or has_others:
            raise BuildError(
                f"the last stage gives a {type(found).__name__}, but a schedule takes a tensor or a tuple of tensors; "
                "give output=, a function of the result, e.g. lambda result: result.loss"
            )
        return tensors


def model_result(module: nn.Module) -> Any:
    """Return the model's result with fake tensors, from the graph of its last stage.

    Raises:
        BuildError: the stage was not traced here, or a module builds an object of its own class.
    """
    module = module.__dict__.get("inner", module)  # a TransmittingStage has the traced module as ``inner``
    if not isinstance(module, fx.GraphModule):
        raise BuildError(
            f"the last stage is a {type(module).__name__} that was not traced here; let what made it build its stages"
        )
    return _node_values(module.graph.output_node().args[0])


def _node_values(value: Any) -> Any:
    """Replace the nodes in a result by their values; a node that builds an object is called."""
    if isinstance(value, fx.Node):
        if "val" in value.meta:
            return value.meta["val"]
        if value.op != "call_function":
            raise BuildError(f"the model's result comes from {value.target!r}, which gives no tensor; cut inside that module")
        return value.target(*map(_node_values, value.args))  # type: ignore[operator]
    if isinstance(value, dict):
        return {key: _node_values(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return (list if isinstance(value, list) else tuple)(map(_node_values, value))
    return value


def meta_like(value: Boundary | torch.Tensor) -> torch.Tensor:
    """Return a meta tensor of the same shape, dtype and ``requires_grad``."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=value.requires_grad)


def sum_tied_gradients(program: Program, group: dist.ProcessGroup | None = None) -> None:
    """Sum the gradients of each tied parameter over the stages that use it; call it before every step of the optimizer.

    Collective: every rank of the pipeline calls it, after the schedule's ``step``. A tied parameter without a gradient on any
    stage gets none.

    Args:
        program: The program whose stages ``build_stage`` made on this rank.
        group: Process group of the pipeline; default: the mesh's axis ``pp``, or all ranks if the program has no mesh.
    """
    named = dict(program.module.named_parameters())
    tied = [(named[next(name for name in tie.names if name in named)], tie.stages) for tie in program.ties]
    trained = [(parameter, stages) for parameter, stages in tied if parameter.requires_grad]
    if not trained:
        return
    group = group or pipeline_group(program)
    built = {stage.index for stage in program.stages if _LOCAL in stage.module.__dict__}
    # no optimizer would ever clear a gradient that this rank's stages do not use
    held = [not built or not built.isdisjoint(stages) for _, stages in trained]
    given = [here and parameter.grad is not None for (parameter, _), here in zip(trained, held, strict=True)]
    counts = torch.tensor(given, device=trained[0][0].device, dtype=torch.int32)
    dist.all_reduce(counts, group=group)
    for (parameter, _), here, gives, count in zip(trained, held, given, counts.tolist(), strict=True):
        if count:
            total = parameter.grad.contiguous() if gives and parameter.grad is not None else torch.zeros_like(parameter)
            dist.all_reduce(total, group=group)
            parameter.grad = total.detach() if here else parameter.grad
