"""The dialect ``deepspeed``."""

from __future__ import annotations

from typing import ClassVar

from slapo_core import Engine, Program
from slapo_training.engines import EngineDialect, Limit

from .configuration.limits import LIMITS
from .configuration.options import DeepSpeedOptions
from .engine import DeepSpeedEngine
from .log_parser import DeepSpeedLog
from .pipeline import RunningStage


class DeepSpeedDialect(EngineDialect):
    """DeepSpeed: ZeRO, mixed precision with fp32 master weights, and its pipeline engine."""

    name = "deepspeed"
    capabilities = frozenset(
        {"pipeline", "data_parallel", "tensor_parallel", "precision:fp32", "precision:bf16", "precision:fp16"}
    )
    classes: ClassVar[dict[str, type]] = {
        "runtime_engine": DeepSpeedEngine,
        "pipeline_engine": DeepSpeedEngine,
        "pipeline_stage": RunningStage,
        "log_parser": DeepSpeedLog,
    }
    distribution = "deepspeed"
    tested = "0.19.8"
    limits: ClassVar[tuple[Limit, ...]] = LIMITS

    @classmethod
    def check(cls, program: Program, **config: object) -> None:
        """Raise ``BuildError`` for options that are unknown or do not fit the program, and for what DeepSpeed cannot do."""
        options = DeepSpeedOptions.of(config)
        super().check(program, **{**config, "precision": options.settled_precision})
        cls.check_limits(program, options)
        options.check_mean(options.parts * program.axis_size("dp"))

    @classmethod
    def build(cls, program: Program, **config: object) -> Engine:
        """Make the engine of this rank; collective. See ``DeepSpeedOptions`` for the configuration."""
        cls.check(program, **config)
        return DeepSpeedEngine(program, DeepSpeedOptions.of(config))
