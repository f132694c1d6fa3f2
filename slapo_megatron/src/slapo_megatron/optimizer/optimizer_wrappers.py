"""A rank's optimizer in Megatron's wrappers, which add fp32 copies of weights and shard the state over replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from slapo_core import Program
from slapo_training.optimizers import ParameterLayout, WholeTensorOptimizer
from slapo_training.optimizers.probe import replace_parameters

from ..configuration.options import MegatronOptions
from ..process_state._megatron_private import main_param
from ..process_state.process_groups import config_of


def optimizer_config(options: MegatronOptions) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    given = options.section("optimizer")
    precision = {"bf16": options.precision == "bf16", "params_dtype": options.dtype}
    given |= {
        "use_distributed_optimizer": options.distributed_optimizer,
        "clip_grad": float(options.clip) or float("inf"),
    }  # with 0 Megatron computes no norm
    return config_of(OptimizerConfig, {**given, **precision})


def megatron_optimizer(config: Any, chunks: Sequence[Any], groups: Any) -> Any:
    from megatron.core.optimizer import get_megatron_optimizer

    made = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False, pg_collection=groups)
    several = getattr(made, "chained_optimizers", [])
    return several[0] if len(several) == 1 else made


def whole_layout(options: MegatronOptions, program: Program, module: nn.Module) -> ParameterLayout:
    """Return the layout of the parameters that this rank's optimizer steps; with bf16 fp32 copies of them."""
    dtype = torch.float32 if options.precision == "bf16" else None
    refusal = (
        "the distributed optimizer gives each rank ranges of flattened ones; leave distributed_optimizer out"
        if options.distributed_optimizer
        else ""
    )
    return ParameterLayout.of_engine(program, module, dtype, is_flat=options.distributed_optimizer, refusal=refusal)


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
