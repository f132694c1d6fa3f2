"""The dialect ``torch``."""

from __future__ import annotations

from typing import Any, ClassVar

from slapo_core.dialect import Dialect
from slapo_core.engine import Engine
from slapo_core.errors import BuildError
from slapo_core.program import Program

from .engine import TorchEngine
from .options import Options
from .stage_call import StageCall


class TorchDialect(Dialect):
    """Plain torch: gradient accumulation, data parallelism, GPipe and 1F1B over ``torch.distributed.pipelining``."""

    name = "torch"
    capabilities = frozenset({"pipeline", "data_parallel", "tensor_parallel", "precision:fp32", "precision:bf16"})
    classes: ClassVar[dict[str, type]] = {
        "runtime_engine": TorchEngine,
        "pipeline_engine": TorchEngine,
        "pipeline_stage": StageCall,
    }

    @classmethod
    def check(cls, program: Program, **config: Any) -> None:
        """Raise ``BuildError`` for options that are unknown or do not fit the program."""
        options = Options.of(config)
        super().check(program, **config)
        options.check_mean(options.microbatches * program.axis_size("dp"))
        stages, ranks = len(program.stages), program.axis_size("pp")
        if stages != ranks:
            raise BuildError(f"{stages} stages on a mesh with pp={ranks}; cut the model into as many stages as pp has ranks")
        if stages > 1 and options.pipeline_schedule == "1f1b" and options.microbatches < stages:
            raise BuildError(
                f"schedule '1f1b' needs at least as many micro-batches as stages, got {options.microbatches} for {stages}; "
                f"use microbatches={stages} or pipeline_schedule='gpipe'"
            )

    @classmethod
    def build(cls, program: Program, **config: Any) -> Engine:
        """Make the engine of this rank; collective. See ``Options`` for the configuration."""
        cls.check(program, **config)
        return TorchEngine(program, Options.of(config))
