"""Settings of ZeRO that decide its memory, with DeepSpeed's defaults."""

from __future__ import annotations

from typing import Any, NamedTuple

from slapo_core import BuildError

from ..configuration.options import DeepSpeedOptions

_OTHER_MEMORY = (
    "offload_optimizer",
    "offload_param",
    "round_robin_gradients",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights",
    "mics_shard_size",
    "zenflow",
)
"""Keys of ``zero_optimization`` whose memory is not estimated."""


class ZeroSettings(NamedTuple):
    """Settings of ``zero_optimization``; numbers are elements.

    Args:
        stage: Stage of ZeRO.
        reduce_bucket: Size of the buffer that gradients are reduced from; it is allocated whole.
        is_contiguous: True if gradients are copied there.
        overlaps: True if gradients are reduced during the backward.
        prefetch_bucket: Parameters that stage 3 gathers ahead.
        persistent: Size up to which stage 3 keeps a parameter whole.
        persistent_total: Largest sum of these.
        max_live: Largest number of gathered elements.
        max_reuse: Distance to the next use within which a parameter stays gathered.
        reduces_scattered: False if all ranks get all reduced gradients.
        sub_group: Elements of partitions that stage 3 steps at once.
        reduces_to_all: False if each range of a bucket is reduced to the one replica that steps it.
        checks_overflow: True if each step looks for gradients that are not finite.
        computes_norm: True if each step computes the norm of the gradients.
        replaces_linear: True if stage 3 replaces ``torch.nn.functional.linear``.
    """

    stage: int
    reduce_bucket: int = 500_000_000
    is_contiguous: bool = True
    overlaps: bool = False
    prefetch_bucket: int = 50_000_000
    persistent: int = 100_000
    persistent_total: int = 2**63 - 1
    max_live: int = 1_000_000_000
    max_reuse: int = 1_000_000_000
    reduces_scattered: bool = True
    sub_group: int = 1_000_000_000
    reduces_to_all: bool = True
    checks_overflow: bool = False
    computes_norm: bool = True
    replaces_linear: bool = True

    @classmethod
    def of(cls, options: DeepSpeedOptions, is_pipeline: bool) -> ZeroSettings:
        """Read the configuration.

        Raises:
            BuildError: it has a setting whose memory is not estimated.
        """
        section = {key: value for key, value in options.section("zero_optimization").items() if value != "auto"}
        for key in _OTHER_MEMORY:
            if section.get(key) and (key != "zero_hpz_partition_size" or section[key] != 1):
                raise BuildError(f"estimates leave out {key} of zero_optimization; leave it out of the config to estimate")
        if options.section("data_types").get("grad_accum_dtype") not in (None, "auto", options.settled_precision):
            raise BuildError("estimates leave out grad_accum_dtype; leave data_types out of the config to estimate")
        precision = options.settled_precision
        if options.given.get("communication_data_type") not in (None, precision):
            raise BuildError("estimates leave out communication_data_type; leave it out of the config to estimate")
        stage = options.zero_stage
        if precision == "fp16" and not stage:
            raise BuildError("estimates leave out fp16 with stage 0 of ZeRO; use stage 1 in the config to estimate")
        overlaps = section.get("overlap_comm")
        names = {
            "reduce_bucket": "reduce_bucket_size",
            "is_contiguous": "contiguous_gradients",
            "prefetch_bucket": "stage3_prefetch_bucket_size",
            "persistent": "stage3_param_persistence_threshold",
            "persistent_total": "stage3_model_persistence_threshold",
            "max_live": "stage3_max_live_parameters",
            "max_reuse": "stage3_max_reuse_distance",
            "reduces_scattered": "reduce_scatter",
            "sub_group": "sub_group_size",
            "reduces_to_all": "use_multi_rank_bucket_allreduce",
            "computes_norm": "compute_grad_norm",
            "replaces_linear": "memory_efficient_linear",
        }
        given: dict[str, Any] = {name: section[key] for name, key in names.items() if section.get(key) is not None}
        given["overlaps"] = bool(stage == 3 if overlaps is None else overlaps) and not is_pipeline
        checks = precision == "fp16" or (precision == "bf16" and stage < 3)
        given["checks_overflow"] = checks and (precision == "fp16" or options.section("bf16").get("check_grad_overflow", True))
        kinds = {name: type(cls._field_defaults[name]) for name in given}
        return cls(stage, **{name: kinds[name](value) for name, value in given.items()})


class ZeroRanks(NamedTuple):
    """Global ranks of the groups in which ZeRO communicates.

    Args:
        replicas: Ranks that share weights and optimizer state.
        model_parallel: Ranks over which norms and overflows are reduced further: those of the shards, with a pipeline also of
            its stages.
    """

    replicas: tuple[int, ...]
    model_parallel: tuple[int, ...]
