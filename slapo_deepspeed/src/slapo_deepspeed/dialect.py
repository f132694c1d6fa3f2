"""The dialect ``deepspeed``."""

from __future__ import annotations

from typing import ClassVar

from slapo_core.dialect import Dialect
from slapo_core.engine import Engine
from slapo_core.errors import BuildError
from slapo_core.program import Program

from .engine import DeepSpeedEngine
from .groups import check_mesh
from .log_parser import DeepSpeedLog
from .options import DeepSpeedOptions
from .pipeline import RunningStage


class DeepSpeedDialect(Dialect):
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

    @classmethod
    def check(cls, program: Program, **config: object) -> None:
        """Raise ``BuildError`` for options that are unknown or do not fit the program, and for what DeepSpeed cannot do."""
        options = DeepSpeedOptions.of(config)
        precision, zero, stages = options.settled_precision, options.zero_stage, len(program.stages)
        super().check(program, **{**config, "precision": precision})
        check_mesh(program)
        device = program.mesh.device_type if program.mesh is not None else "cpu"
        if precision == "fp16" and device == "cpu":
            raise BuildError("DeepSpeed has no fp16 on a CPU; use precision='bf16'")
        if zero and not options.trains:
            raise BuildError(f"stage {zero} of ZeRO shares out the optimizer, and there is none; give optimizer= or stage 0")
        if precision == "bf16" and zero == 0 and options.trains:
            raise BuildError(
                "DeepSpeed without ZeRO steps the optimizer of a bf16 model once as it makes it, with gradients of zero; use "
                "stage 1 of ZeRO, or leave zero_optimization out of the config"
            )
        for name, parameter in program.module.named_parameters():
            if parameter.dim() == 0:
                raise BuildError(f"DeepSpeed cannot send {name!r}, a parameter without dimensions; give it the shape (1,)")
        if stages != program.axis_size("pp"):
            raise BuildError(
                f"{stages} stages on a mesh with pp={program.axis_size('pp')}; DeepSpeed runs one stage on each rank, and "
                "target='torch' several"
            )
        if stages > 1 and zero > 1:
            raise BuildError(
                f"DeepSpeed has no pipelines with stage {zero} of ZeRO; use stage 1, or target='torch' with "
                "data_parallel='fsdp'"
            )
        options.check_mean(options.parts * program.axis_size("dp"))

    @classmethod
    def build(cls, program: Program, **config: object) -> Engine:
        """Make the engine of this rank; collective. See ``DeepSpeedOptions`` for the configuration."""
        cls.check(program, **config)
        return DeepSpeedEngine(program, DeepSpeedOptions.of(config))
