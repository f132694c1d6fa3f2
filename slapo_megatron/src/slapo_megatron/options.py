"""What an engine of this dialect can be told, and the configurations Megatron gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from slapo_core.errors import BuildError, UnknownNameError
from slapo_training.options import CommonOptions

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Precision to the type of floating-point weights."""
SECTIONS = ("transformer", "ddp", "optimizer")
"""Of ``config``: keyword arguments of Megatron's TransformerConfig, DistributedDataParallelConfig and OptimizerConfig."""

_OURS = {
    "transformer": {
        "tensor_model_parallel_size": "the mesh's axis tp",
        "pipeline_model_parallel_size": "the mesh's axis pp",
        "virtual_pipeline_model_parallel_size": "the number of stages",
        "params_dtype": "precision=",
        "pipeline_dtype": "what crosses between stages",
        "bf16": "precision=",
        "fp16": "precision=",
        "sequence_parallel": "tensor_parallel(sequence_parallel=True) of the schedule",
        "variable_seq_lengths": "the shapes of the batch",
        "context_parallel_size": "the mesh, which has no such axis",
        "expert_model_parallel_size": "the mesh, which has no such axis",
        "finalize_model_grads_func": "the engine",
        "grad_scale_func": "the engine",
        "no_sync_func": "the engine",
        "grad_sync_func": "the engine",
        "param_sync_func": "the engine",
    },
    "ddp": {"use_distributed_optimizer": "distributed_optimizer="},
    "optimizer": {
        "use_distributed_optimizer": "distributed_optimizer=",
        "clip_grad": "clip=",
        "bf16": "precision=",
        "fp16": "precision=",
        "params_dtype": "precision=",
    },
}
"""What ``config`` may not say, and what says it."""


@dataclass(frozen=True)
class MegatronOptions(CommonOptions):
    """The arguments of ``build`` for target ``"megatron"``.

    Args:
        distributed_optimizer: Share out the optimizer's state, and with bf16 the fp32 weights, over the replicas.
        config: Megatron's own configurations, ``{"transformer": {...}, "ddp": {...}, "optimizer": {...}}``, each the keyword
            arguments of its ``TransformerConfig``, ``DistributedDataParallelConfig`` or ``OptimizerConfig``, which checks them.
            With ``"optimizer"`` that names one and without ``optimizer=``, the optimizer is Megatron's own.
        timeout_minutes: How long a process group that Megatron makes waits for its other ranks.
    """

    target: ClassVar[str] = "megatron"

    distributed_optimizer: bool = False
    config: Mapping[str, Mapping[str, Any]] | None = None
    timeout_minutes: int = 10

    def check(self) -> None:
        """Raise ``BuildError`` for a value that cannot work."""
        super().check()
        if self.precision not in ("fp32", "bf16", "fp16"):
            raise BuildError(f"precision is {self.precision!r}; give one of {', '.join(DTYPES)}")
        if type(self.distributed_optimizer) is not bool:
            raise BuildError(f"distributed_optimizer is {self.distributed_optimizer!r}; give True or False")
        if type(self.timeout_minutes) is not int or self.timeout_minutes < 1:
            raise BuildError(f"timeout_minutes is {self.timeout_minutes!r}; give a whole number from 1 on")
        for name in self._given():
            if name not in SECTIONS:
                raise BuildError(str(UnknownNameError.of("section of config of target 'megatron'", str(name), SECTIONS)))
        for name in SECTIONS:
            for key in self.section(name):
                if key in _OURS[name]:
                    raise BuildError(f"{key} in config[{name!r}] is told by {_OURS[name][key]}; leave it out")
        if self.optimizer is not None and "optimizer" in self.section("optimizer"):
            raise BuildError("optimizer= and the optimizer in config['optimizer'] are two; give one of them")

    @property
    def trains(self) -> bool:
        """Whether there is an optimizer, ours or Megatron's."""
        return self.optimizer is not None or "optimizer" in self.section("optimizer")

    @property
    def dtype(self) -> torch.dtype:
        """Of floating-point weights."""
        return DTYPES[self.precision]

    def section(self, name: str) -> dict[str, Any]:
        """The keyword arguments of one of Megatron's configurations."""
        section = self._given().get(name, {})
        if not isinstance(section, Mapping):
            raise BuildError(f"config[{name!r}] is {section!r}; give keyword arguments as a dict")
        return dict(section)

    def agreed(self) -> list[str]:
        """What has to be the same on all ranks."""
        given = {name: sorted(self.section(name).items()) for name in SECTIONS}
        return [f"distributed_optimizer={self.distributed_optimizer}", f"megatron's config {given!r}", *super().agreed()]

    def _given(self) -> Mapping[str, Any]:
        if self.config is None:
            return {}
        if not isinstance(self.config, Mapping):
            raise BuildError(f"config is a {type(self.config).__name__}; give a dict with {', '.join(SECTIONS)}")
        return self.config
