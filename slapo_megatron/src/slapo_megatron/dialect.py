"""The dialect ``megatron``."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from slapo_core.engine import Engine
from slapo_core.parameters import shard_spec
from slapo_core.program import Program
from slapo_training.engine_dialect import ALL_RANKS, NO_PLATEAU, EngineDialect, Limit

from .engine import MegatronEngine
from .log_parser import MegatronLog
from .optimizers import is_adam
from .options import MegatronOptions
from .pipeline import RunningStage


def _chunks(program: Program) -> int:
    return len(program.stages) // program.axis_size("pp")


def _leaves_ranks_idle(program: Program) -> bool:
    trained = {
        program.rank_of(stage.index)
        for stage in program.stages
        if any(parameter.requires_grad for parameter in stage.module.parameters())
    }
    return len(trained) < program.axis_size("pp")


def _interleaves_batched(program: Program, options: MegatronOptions) -> bool:
    given = {"overlap_p2p_comm": True, "batch_p2p_comm": False, **options.section("transformer")}
    return _chunks(program) > 1 and (given["batch_p2p_comm"] or not given["overlap_p2p_comm"])


def _holds_copies(program: Program) -> bool:
    specs = [shard_spec(parameter) for parameter in program.module.parameters()]
    return any(spec is not None and sum(spec.sizes) > spec.full_shape[spec.dim] for spec in specs)


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
    limits = (
        *ALL_RANKS,
        Limit("fp16", "use precision='bf16', or target='torch'", lambda program, options: options.precision == "fp16"),
        Limit(
            "several stages on one rank along pp",
            "leave the cuts out, or use target='torch'",
            lambda program, options: len(program.stages) > 1 and program.axis_size("pp") == 1,
        ),
        Limit(
            "interleaved stages with batched messages",
            "leave overlap_p2p_comm and batch_p2p_comm out of config['transformer']: messages between two ranks would cross",
            _interleaves_batched,
        ),
        Limit(
            "interleaved stages with a number of micro-batches that the ranks along pp do not divide",
            "give microbatches= as a multiple of these ranks, or cut one stage for each rank",
            lambda program, options: _chunks(program) > 1 and options.microbatches % program.axis_size("pp") != 0,
        ),
        Limit(
            "clipping where several ranks hold the same part of a parameter, as of shared key and value heads",
            "its norm would count them several times; use clip=0, or target='torch'",
            lambda program, options: options.clip > 0 and _holds_copies(program),
        ),
        Limit(
            "a rank with nothing to train",
            "cut so that each rank has something, or use target='torch'",
            lambda program, options: options.trains and _leaves_ranks_idle(program),
        ),
        NO_PLATEAU,
        Limit(
            "the distributed optimizer without an optimizer",
            "leave distributed_optimizer out",
            lambda program, options: options.distributed_optimizer and not options.trains,
        ),
        Limit(
            "the distributed optimizer with another optimizer than Adam or AdamW",
            "give one of these, or leave distributed_optimizer out",
            lambda program, options: (
                options.distributed_optimizer
                and isinstance(options.optimizer, torch.optim.Optimizer)
                and not is_adam(options.optimizer)
            ),
        ),
    )

    @classmethod
    def check(cls, program: Program, **config: Any) -> None:
        """Raise ``BuildError`` for options that are unknown or do not fit the program, and for what Megatron cannot do."""
        options = MegatronOptions.of(config)
        cls.check_limits(program, options)
        super().check(program, **config)
        options.check_mean(options.microbatches * program.axis_size("dp"))

    @classmethod
    def build(cls, program: Program, **config: Any) -> Engine:
        """Make the engine of this rank; collective. See ``MegatronOptions`` for the configuration."""
        cls.check(program, **config)
        return MegatronEngine(program, MegatronOptions.of(config))
