"""The dialect ``deepspeed``."""

from __future__ import annotations

from typing import ClassVar

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
    options_class = DeepSpeedOptions
