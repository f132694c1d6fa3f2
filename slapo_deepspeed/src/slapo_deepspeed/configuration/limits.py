"""Table of what DeepSpeed cannot do; `docs/limits.md` has the same words."""

from __future__ import annotations

from slapo_core import Program
from slapo_training.engines import ALL_RANKS, NO_CLIPPED_COPIES, NO_PLATEAU, Limit, odd_dtype

from .config_optimizer import compiled_on_cpu
from .options import DeepSpeedOptions


def _is_on_cpu(program: Program) -> bool:
    return program.mesh is None or program.mesh.device_type == "cpu"


def _has_nothing_to_train(program: Program, options: DeepSpeedOptions) -> str:
    if options.trains:
        for stage in program.stages:
            if not any(parameter.requires_grad for parameter in stage.module.parameters()):
                return f"stage {stage.index} of {len(program.stages)}"
    return ""


def _partitions(program: Program, options: DeepSpeedOptions) -> str:
    asked = [key for key in ("pipe_partitioned", "grad_partitioned") if options.section("pipeline").get(key)]
    return asked[0] if asked and len(program.stages) > 1 else ""


def _runs_other_branches(program: Program, options: DeepSpeedOptions) -> bool:
    """Return True if one tensor-parallel rank holds all of a parameter, and therefore runs a branch that others do not."""
    specs = (spec for spec in program.shard_specs.values() if spec.num_shards > 1)
    return options.zero_stage == 3 and any(0 in spec.sizes and max(spec.sizes) == spec.full_shape[spec.dim] for spec in specs)


LIMITS = (
    *ALL_RANKS,
    Limit("fp16 on a CPU", "use precision='bf16'", lambda prog, opts: opts.settled_precision == "fp16" and _is_on_cpu(prog)),
    Limit(
        "stages 1 to 3 of ZeRO without an optimizer",
        "give optimizer=, or stage 0",
        lambda _, options: f"stage {options.zero_stage}" if options.zero_stage and not options.trains else "",
    ),
    Limit(
        "training in bf16 with stage 0 of ZeRO, which steps the optimizer once as it is made",
        "use stage 1, or leave zero_optimization out of the config",
        lambda program, options: options.settled_precision == "bf16" and not options.zero_stage and options.trains,
    ),
    Limit(
        "a parameter without dimensions",
        "give it the shape (1,)",
        lambda program, _: next((repr(name) for name, each in program.module.named_parameters() if each.dim() == 0), ""),
    ),
    Limit(
        "several stages on a rank",
        "make pp as large as there are stages, or use target='torch'",
        lambda of, _: f"{len(of.stages)} stages with pp={of.axis_size('pp')}" if len(of.stages) != of.axis_size("pp") else "",
    ),
    Limit(
        "stage 2 or 3 of ZeRO with a pipeline",
        "use stage 1, or target='torch' with data_parallel='fsdp'",
        lambda program, options: f"stage {options.zero_stage}" if len(program.stages) > 1 and options.zero_stage > 1 else "",
    ),
    Limit(
        "stage 3 of ZeRO where tensor-parallel ranks run different branches of a module, as all ranks have to run the same "
        "modules in the same order",
        "use stage 1 or 2, or target='torch'",
        _runs_other_branches,
    ),
    Limit("a stage with nothing to train", "cut elsewhere, or use target='torch'", _has_nothing_to_train),
    NO_PLATEAU._replace(
        applies=lambda program, options: (
            options.section("scheduler").get("type") == "ReduceLROnPlateau" or NO_PLATEAU.applies(program, options)
        )
    ),
    Limit(
        "parameters of another type than float32, or with bf16 bfloat16, or with fp16 float16",
        "turn the model into float32, give precision= for its type, or use target='torch'",
        odd_dtype,
    ),
    NO_CLIPPED_COPIES,
    Limit(
        "activation_checkpoint_interval, which runs a stage twice",
        "use checkpoint() of the schedule",
        lambda program, options: bool(options.section("pipeline").get("activation_checkpoint_interval")),
    ),
    Limit(
        "a pipeline with messages partitioned, where one value with a gradient could cross",
        "leave pipe_partitioned and grad_partitioned out of the config",
        _partitions,
    ),
    Limit(
        "tensor_parallel in the config",
        "leave it out, and use tensor_parallel() or shard() of the schedule",
        lambda program, options: bool(options.section("tensor_parallel")),
    ),
    Limit(
        "on a CPU an optimizer in the config that DeepSpeed compiles",
        "give optimizer=, or Adam or AdamW, which are torch's there",
        lambda program, options: compiled_on_cpu(options.given) if _is_on_cpu(program) else "",
    ),
    Limit(
        "managed_gradient_accumulation off, as micro-batches are accumulated",
        "leave it on",
        lambda program, options: options.given.get("managed_gradient_accumulation", True) is not True,
    ),
)
"""Limits in the order in which they are checked."""
