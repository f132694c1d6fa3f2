"""Table of what Megatron cannot do; `docs/limits.md` has the same words."""

from __future__ import annotations

import torch

from slapo_core import Program
from slapo_training.engines import ALL_RANKS, NO_CLIPPED_COPIES, NO_PLATEAU, Limit, odd_dtype

from ..process_state.process_groups import device_of
from .options import MegatronOptions


def is_shared_out(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if Megatron's distributed optimizer supports an optimizer."""
    return isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))


def _chunks(program: Program) -> int:
    return len(program.stages) // program.axis_size("pp")


def _interleaves_batched(program: Program, options: MegatronOptions) -> bool:
    given = {"overlap_p2p_comm": True, "batch_p2p_comm": False, **options.section("transformer")}
    return _chunks(program) > 1 and (given["batch_p2p_comm"] or not given["overlap_p2p_comm"])


def _leaves_ranks_idle(program: Program, options: MegatronOptions) -> bool:
    trained = {
        program.rank_of(stage.index)
        for stage in program.stages
        if any(parameter.requires_grad for parameter in stage.module.parameters())
    }
    return options.trains and len(trained) < program.axis_size("pp")


def _shares_out_another(program: Program, options: MegatronOptions) -> bool:
    given, named = options.optimizer, options.section("optimizer").get("optimizer", "adam")
    return options.distributed_optimizer and (
        named != "adam" or (isinstance(given, torch.optim.Optimizer) and not is_shared_out(given))
    )


ANOTHER_OPTIMIZER = Limit(
    "the distributed optimizer with another optimizer than Adam or AdamW",
    "give one of these, or leave distributed_optimizer out",
    _shares_out_another,
)
"""Limit that is checked again when the engine is built, as the type of a factory's optimizer is not known before."""
LIMITS = (
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
    NO_CLIPPED_COPIES,
    Limit("a rank with nothing to train", "cut so that each rank has something, or use target='torch'", _leaves_ranks_idle),
    NO_PLATEAU,
    Limit(
        "the distributed optimizer without an optimizer",
        "leave distributed_optimizer out",
        lambda program, options: options.distributed_optimizer and not options.trains,
    ),
    ANOTHER_OPTIMIZER,
    Limit(
        "parameters of another type than float32, or with bf16 bfloat16",
        "turn the model into float32, or use target='torch'",
        odd_dtype,
    ),
    Limit(
        "training on a CPU where there is CUDA",
        "make the mesh of 'cuda', or hide the devices with CUDA_VISIBLE_DEVICES=",
        lambda program, options: device_of(program) == "cpu" and torch.cuda.is_available(),
    ),
)
"""Limits in the order in which they are checked."""
