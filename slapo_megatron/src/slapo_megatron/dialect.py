"""The dialect ``megatron``."""

from __future__ import annotations

from typing import ClassVar

from slapo_training.engines import EngineDialect, Limit

from .configuration.limits import LIMITS
from .configuration.options import MegatronOptions
from .engine import MegatronEngine
from .log_parser import MegatronLog
from .pipeline import RunningStage


class MegatronDialect(EngineDialect):
    """Megatron-Core: its data parallelism, distributed optimizer, and 1F1B and interleaved pipelines."""

    name = "megatron"
    capabilities = frozenset({"pipeline", "data_parallel", "tensor_parallel", "precision:fp32", "precision:bf16"})
    classes: ClassVar[dict[str, type]] = {
        "runtime_engine": MegatronEngine,
        "pipeline_engine": MegatronEngine,
        "pipeline_stage": RunningStage,
        "log_parser": MegatronLog,
    }
    distribution = "megatron-core"
    tested = "0.16.1"
    limits: ClassVar[tuple[Limit, ...]] = LIMITS
    options_class = MegatronOptions
