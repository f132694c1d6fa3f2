"""The dialect ``torch``, and the parser of the lines that ``slapo train`` prints; the engine itself prints nothing."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

from slapo_core import BuildError, Dialect, Engine, Program

from .engine import TorchEngine
from .fsdp.wrap_policy import check_shardable
from .options import Options
from .pipelining.schedules import placement
from .step.stage_call import StageCall
from .step_model import TorchStepModel

_STEP = re.compile(r"(?P<run>[\w-]+): step (?P<step>\d+)/\d+, loss (?P<loss>\S+)")


class LoggedStep(NamedTuple):
    """One printed step.

    Args:
        step: Number of the step, from 1.
        loss: Mean loss over the batch, with four decimals.
    """

    step: int
    loss: float


class TorchLog:
    """Parses the lines that ``slapo train`` prints without a terminal: about ten per run."""

    @staticmethod
    def parse(lines: Iterable[str], run: str = "training") -> list[LoggedStep]:
        """Return the printed steps in order; other lines are skipped.

        Args:
            lines: Lines of a log of one or several ranks.
            run: ``"training"``, or ``"reference"`` for the unmodified model beside it.
        """
        matches = (_STEP.search(line) for line in lines)
        found = {int(match["step"]): float(match["loss"]) for match in matches if match and match["run"] == run}
        return [LoggedStep(step, found[step]) for step in sorted(found)]


class TorchDialect(Dialect):
    """Plain torch: gradient accumulation, data parallelism, and the schedules of ``torch.distributed.pipelining``."""

    name = "torch"
    takes_check = True
    capabilities = frozenset(
        {"pipeline", "data_parallel", "tensor_parallel", "precision:fp32", "precision:bf16", "precision:fp16"}
    )
    classes: ClassVar[dict[str, type]] = {
        "runtime_engine": TorchEngine,
        "pipeline_engine": TorchEngine,
        "pipeline_stage": StageCall,
        "log_parser": TorchLog,
        "step_model": TorchStepModel,
    }

    @classmethod
    def check(cls, program: Program, **config: Any) -> Program:
        """Check the options against the program; return the program with a rank for each stage.

        Raises:
            BuildError: options are unknown or do not fit the program.
        """
        options = Options.of(config)
        super().check(program, **config)
        if options.data_parallel == "fsdp":
            check_shardable(program, options.fsdp_units)
        options.check_mean(options.microbatches * program.axis_size("dp"))
        stages = len(program.stages)
        if stages > 1 and program.mesh is None:
            raise BuildError(f"{stages} stages, but the schedule has no mesh; give create_schedule mesh= with an axis pp")
        if stages == program.axis_size("pp") == 1:
            return program
        places = placement(options.pipeline_schedule, stages, program.axis_size("pp"), options.microbatches)
        return dataclasses.replace(program, placement=places)

    @classmethod
    def trains_in_place(cls, **config: Any) -> bool:
        """Return True if parameters keep their memory; with FSDP, rows are copies."""
        return bool(config.get("data_parallel", Options.data_parallel) == "ddp")

    @classmethod
    def build(cls, program: Program, **config: Any) -> Engine:
        """Make the engine of this rank; see ``Options`` for the configuration. Collective."""
        return TorchEngine(cls.check(program, **config), Options.of(config))
