"""Options of this dialect's engine, and the keys of Megatron's configurations that users may set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from slapo_core import BuildError, UnknownNameError
from slapo_training.options import DTYPES, EngineOptions

SECTIONS = ("transformer", "ddp", "optimizer")
"""Sections of ``config``: arguments of Megatron's TransformerConfig, DistributedDataParallelConfig and OptimizerConfig."""

TAKEN: dict[str, dict[str, type]] = {
    "transformer": {
        "overlap_p2p_comm": bool,
        "batch_p2p_comm": bool,
        "batch_p2p_sync": bool,
        "overlap_p2p_comm_warmup_flush": bool,
        "microbatch_group_size_per_vp_stage": int,
        "deallocate_pipeline_outputs": bool,
    },
    "ddp": {
        "grad_reduce_in_fp32": bool,
        "overlap_grad_reduce": bool,
        "check_for_nan_in_grad": bool,
        "check_for_large_grads": bool,
        "bucket_size": int,
        "pad_buckets_for_high_nccl_busbw": bool,
        "average_in_collective": bool,
    },
    "optimizer": {
        "optimizer": str,
        "lr": float,
        "weight_decay": float,
        "adam_beta1": float,
        "adam_beta2": float,
        "adam_eps": float,
        "decoupled_weight_decay": bool,
        "sgd_momentum": float,
    },
}
"""Allowed keys of each section, with their types.

All other keys follow from the schedule and the other options, or describe Megatron's own models.
"""


@dataclass(frozen=True)
class MegatronOptions(EngineOptions):
    """The arguments of ``build`` for target ``"megatron"``.

    Args:
        distributed_optimizer: Shard the optimizer's state, and with bf16 the fp32 weights, over the replicas.
        config: Megatron's own configurations, ``{"transformer": {...}, "ddp": {...}, "optimizer": {...}}``, each the keyword
            arguments of its ``TransformerConfig``, ``DistributedDataParallelConfig`` or ``OptimizerConfig`` that are in
            ``TAKEN``. If the section ``"optimizer"`` names an optimizer, the engine uses Megatron's own; ``optimizer=`` must
            then be left out.
        timeout_minutes: Timeout of the process groups that Megatron creates.
    """

    target: ClassVar[str] = "megatron"

    distributed_optimizer: bool = False
    config: Mapping[str, Mapping[str, Any]] | None = None
    timeout_minutes: int = 10

    def validate(self) -> None:
        super().validate()
        if self.precision not in DTYPES:
            raise BuildError(f"precision is {self.precision!r}; give one of fp32, bf16")
        if type(self.distributed_optimizer) is not bool:
            raise BuildError(f"distributed_optimizer is {self.distributed_optimizer!r}; give True or False")
        if type(self.timeout_minutes) is not int or self.timeout_minutes < 1:
            raise BuildError(f"timeout_minutes is {self.timeout_minutes!r}; give a whole number from 1 on")
        for name in self._config_dict():
            if name not in SECTIONS:
                raise BuildError(str(UnknownNameError.of("section", str(name), SECTIONS, whose="config of target 'megatron'")))
        for name in SECTIONS:
            whose = f"config[{name!r}] of target 'megatron'"
            for key, value in self.section(name).items():
                if (kind := TAKEN[name].get(key)) is not None:
                    _check_kind(f"config[{name!r}][{key!r}]", value, kind)
                else:
                    raise BuildError(
                        f"{UnknownNameError.of('key', str(key), TAKEN[name], whose=whose)}; the schedule and the other options "
                        "say all else"
                    )
        if self.optimizer is not None and self.section("optimizer"):
            raise BuildError("optimizer= and config['optimizer'] are two optimizers; give one of them")
        own = self.section("optimizer")
        if own and (own.get("optimizer") not in ("adam", "sgd") or not isinstance(own.get("lr"), (int, float))):
            raise BuildError(
                "config['optimizer'] is not an optimizer of Megatron's; give it 'optimizer': 'adam' or 'sgd', and "
                "'lr', or give optimizer="
            )

    @property
    def trains(self) -> bool:
        return super().trains or "optimizer" in self.section("optimizer")

    def section(self, name: str) -> dict[str, Any]:
        """Return the keyword arguments of one of Megatron's configurations."""
        section = self._config_dict().get(name, {})
        if not isinstance(section, Mapping):
            raise BuildError(f"config[{name!r}] is {section!r}; give keyword arguments as a dict")
        return dict(section)

    def rank_invariants(self) -> list[str]:
        given = {name: sorted(self.section(name).items()) for name in SECTIONS}
        return [
            f"distributed_optimizer={self.distributed_optimizer}",
            f"megatron's config {given!r}",
            *super().rank_invariants(),
        ]

    def _config_dict(self) -> Mapping[str, Any]:
        if self.config is None:
            return {}
        if not isinstance(self.config, Mapping):
            raise BuildError(f"config is a {type(self.config).__name__}; give a dict with {', '.join(SECTIONS)}")
        return self.config


def _check_kind(what: str, value: Any, kind: type) -> None:
    """Refuse a value of another type: Megatron would use its truth value, or fail inside a step."""
    fits = type(value) is kind or (kind is float and type(value) is int)
    if not fits or (kind in (int, float) and not 0 <= value < float("inf")) or (kind is int and value < 1):
        wanted = {bool: "True or False", int: "a whole number from 1 on", float: "a number from 0 on", str: "a name"}[kind]
        raise BuildError(f"{what} is {value!r}; give {wanted}")
