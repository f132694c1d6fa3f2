"""A rank's optimizer in Megatron's wrappers, which add fp32 copies of weights and shard the state over replicas.

``ReducedGradients`` gives the user's gradient hooks access to the gradients in Megatron's buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import Program
from slapo_training.gradient_hooks import GradientAccess
from slapo_training.optimizers import ParameterLayout, WholeTensorOptimizer
from slapo_training.optimizers.probe import replace_parameters

from ..configuration.options import MegatronOptions
from ..process_state._megatron_private import gradient_buckets, main_grad, main_param
from ..process_state.process_groups import config_of


def optimizer_config(options: MegatronOptions) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    given = options.section("optimizer")
    given |= {"bf16": options.precision == "bf16", "params_dtype": options.dtype}
    given |= {"use_distributed_optimizer": options.distributed_optimizer}
    given["clip_grad"] = float(options.clip) or float("inf")  # with 0 Megatron computes no norm
    return config_of(OptimizerConfig, given)


def megatron_optimizer(config: Any, chunks: Sequence[Any], groups: Any) -> Any:
    from megatron.core.optimizer import get_megatron_optimizer

    made = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False, pg_collection=groups)
    several = getattr(made, "chained_optimizers", [])
    return several[0] if len(several) == 1 else made


def whole_layout(options: MegatronOptions, program: Program, module: nn.Module) -> ParameterLayout:
    """Return the layout of the parameters that this rank's optimizer steps; with bf16 fp32 copies of them."""
    dtype = torch.float32 if options.precision == "bf16" else None
    is_flat = options.distributed_optimizer
    refusal = "the distributed optimizer gives each rank ranges of flattened ones; leave distributed_optimizer out"
    return ParameterLayout.of_engine(program, module, dtype, is_flat=is_flat, refusal=refusal if is_flat else "")


def bind_masters(optimizer: torch.optim.Optimizer) -> None:
    """Bind a whole-tensor optimizer to the fp32 copies with which Megatron has replaced its parameters."""
    if not isinstance(optimizer, WholeTensorOptimizer):
        return
    optimizer.hide_state()
    sources = {id(whole.source) for each in optimizer.stand_ins for whole in each.wholes}
    replace_parameters(optimizer.inner, lambda each: [each if id(each) in sources else main_param(each)])
    for each in optimizer.stand_ins:
        each.move(main_param)


@torch.no_grad()
def initialize_state(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    """Initialize an optimizer's state by a step without effect, so that a state can be loaded; weights are unchanged.

    An optimizer that has a state is left unchanged. Megatron passes ``config``.
    """
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in held]
    weights = [parameter.detach().clone() for parameter in held]
    for parameter in held:
        parameter.grad = torch.zeros_like(parameter)
    try:
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for parameter, gradient, weight in zip(held, gradients, weights, strict=True):
            parameter.grad = gradient
            parameter.copy_(weight)


class ReducedGradients(GradientAccess):
    """Access to ``main_grad``, the reduced gradient, which replicas shard with the distributed optimizer."""

    counts_unused = steps_all = True

    def __init__(self, program: Program, options: MegatronOptions, chunks: Sequence[Any]) -> None:
        self._chunks = chunks
        shares = options.distributed_optimizer and program.mesh is not None and program.axis_size("dp") > 1
        self._replicas = program.mesh.get_group("dp") if shares and program.mesh is not None else None
        if options.precision == "bf16":
            self.keeps_weights = "target 'megatron' keeps in fp32 beside the model's in bf16"

    def begin(self, hooked: Sequence[nn.Parameter]) -> None:
        """All-gather the gradients that the distributed optimizer has sharded. Collective over the replicas."""
        if self._replicas is None:
            return
        known = {id(parameter) for parameter in hooked}
        for parameters, gradients in gradient_buckets(self._chunks):
            if any(id(parameter) in known for parameter in parameters):
                rows = gradients.view(self._replicas.size(), -1)
                dist.all_gather_into_tensor(gradients, rows[self._replicas.rank()].clone(), group=self._replicas)

    def get(self, parameter: nn.Parameter) -> torch.Tensor | None:
        return main_grad(parameter) if parameter.requires_grad else None

    def put(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        assert gradient is not None
        main_grad(parameter).copy_(gradient)
