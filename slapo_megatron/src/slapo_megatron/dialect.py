"""The dialect ``megatron``."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from slapo_core.engine import Engine
from slapo_core.program import Program
from slapo_training.engine_dialect import ALL_RANKS, NO_PLATEAU, EngineDialect, Limit, holds_copies

from .engine import MegatronEngine
from .log_parser import MegatronLog
from .optimizers import is_shared_out
from .options import MegatronOptions
from .pipeline import RunningStage
from .starting import device_of


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


def _odd_type(program: Program, options: MegatronOptions) -> str:
    kinds = (torch.float32, torch.bfloat16) if options.precision == "bf16" else (torch.float32,)
    named = program.module.named_parameters()
    return next((f"{name} is {parameter.dtype}" for name, parameter in named if parameter.dtype not in kinds), "")


def _is_on_cpu_beside_cuda(program: Program, options: MegatronOptions) -> bool:
    return device_of(program) == "cpu" and torch.cuda.is_available()


def _shares_out_another(program: Program, options: MegatronOptions) -> bool:
    given, named = options.optimizer, options.section("optimizer").get("optimizer", "adam")
    return options.distributed_optimizer and (
        named != "adam" or (isinstance(given, torch.optim.Optimizer) and not is_shared_out(given))
    )


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
            "overlap_p2p_comm without interleaved stages",
            "leave it out of config['transformer'], or cut several stages for each rank",
            lambda program, options: _chunks(program) == 1 and bool(options.section("transformer").get("overlap_p2p_comm")),
        ),
        Limit(
            "interleaved stages with a number of micro-batches that the ranks along pp do not divide",
            "give microbatches= as a multiple of these ranks, or cut one stage for each rank",
            lambda program, options: _chunks(program) > 1 and options.microbatches % program.axis_size("pp") != 0,
        ),
        Limit(
            "clipping where several ranks hold the same part of a parameter, as of shared key and value heads",
            "its norm would count them several times; use clip=0, or target='torch'",
            lambda program, options: options.clip > 0 and holds_copies(program),
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
            _shares_out_another,
        ),
        Limit(
            "parameters of another type than float32, or with bf16 bfloat16",
            "turn the model into float32, or use target='torch'",
            _odd_type,
        ),
        Limit(
            "training on a CPU where there is CUDA",
            "make the mesh of 'cuda', or hide the devices with CUDA_VISIBLE_DEVICES=",
            _is_on_cpu_beside_cuda,
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
