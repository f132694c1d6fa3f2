"""The classic configuration names, with their values and checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any

from slapo_core import Schedule, ScheduleError, UnknownNameError

CREATE_SCHEDULE_OPTIONS = ("example_inputs", "group", "mesh", "plugins")
"""Options for ``create_schedule``, if ``apply_schedule`` is given a model."""

METHODS = ("uniform", "head")


@dataclass(frozen=True)
class Configuration:
    """Options of a ready schedule by the classic names. Defaults change nothing.

    Args:
        key: Name of the schedule, for errors.
        prefix: Path of the base model in the model; None finds it by its blocks.
        attn_op_name: Attention kernel, a key of ``kernels.ATTENTIONS``; None keeps the model's.
        disable_flash_attn: True means ``attn_op_name="native_xformers"``, False ``attn_op_name="cuda"``.
        disable_fuse_bias_gelu: False computes bias and activation of the MLPs in one kernel.
        ckpt_ratio: Share of the blocks that are recomputed, from 0 to 1.
        checkpoint_method: ``"uniform"`` spreads these blocks over the model, ``"head"`` takes the first ones.
        kernels: True lets kernels compute all that they can, by ``use_kernels()``; or a list of kernels.
        bcast_input: Whether the first rank of the tensor-parallel group broadcasts the inputs.
        checkpoint: What is recomputed: a share of the blocks, as ``ckpt_ratio``; a list of numbers of blocks, counted over all
            lists, or of paths; or a policy of ``checkpoint()`` for the blocks of ``ckpt_ratio``, by default all.
        pipeline_cuts: Blocks after which a stage ends; a list of such lists if the model has several lists of blocks.
        pipeline_stages: Number of stages with parameters as even as possible, or paths of the modules after which a stage ends;
            None without ``pipeline_cuts`` is one for each rank of the mesh's axis ``pp``.
        tensor_parallel: Whether a group of several ranks splits the model.
        sequence_parallel: Whether activations between the sharded layers are split along the sequence.
        parallel_loss: Whether the loss of a causal language model is computed from each rank's part of the logits.
        fp16: Whether parameters and buffers are converted to float16 first.
        bf16: Whether they are converted to bfloat16 first.
        delay_init: No effect; no step adds a module with new weights.
        fuse_conv: Not supported.
        model_config: No effect; it must equal the model's own config.
    """

    key: str
    prefix: str | None = None
    attn_op_name: str | None = None
    disable_flash_attn: bool | None = None
    disable_fuse_bias_gelu: bool = True
    ckpt_ratio: float = 0.0
    checkpoint_method: str = "uniform"
    checkpoint: Any = None
    kernels: bool | str | Sequence[str] = False
    bcast_input: bool = False
    pipeline_cuts: Sequence[Any] = ()
    pipeline_stages: int | Sequence[str] | None = None
    tensor_parallel: bool = True
    sequence_parallel: bool = False
    parallel_loss: bool = False
    fp16: bool = False
    bf16: bool = False
    delay_init: bool = True
    fuse_conv: bool = False
    model_config: Any = None

    @classmethod
    def read(cls, schedule: Schedule, key: str, options: Mapping[str, Any], lacks: Mapping[str, str] = {}) -> Configuration:
        """Read the configuration of one schedule.

        ``lacks`` maps a name that this schedule cannot serve to the rest of a sentence: why, and what replaces it.

        Raises:
            UnknownNameError: an unknown name.
            ScheduleError: an invalid value, or a name that this schedule cannot serve.
        """
        known = [field.name for field in fields(cls) if field.name != "key"]
        for name in options:
            if name not in known:
                whose = f"the schedule {key!r}"
                raise UnknownNameError.of("configuration name", name, [*known, *CREATE_SCHEDULE_OPTIONS], whose=whose)
        given = {name: value for name, value in options.items() if value is not None}
        configuration = cls(key, **given)
        configuration._check_values(schedule)
        configuration._check_steps(schedule)
        if isinstance(configuration.checkpoint, Real):
            configuration = replace(configuration, ckpt_ratio=float(configuration.checkpoint), checkpoint=None)
        for name, reason in {**_UNSUPPORTED, **lacks}.items():
            if getattr(configuration, name) != getattr(cls, name):
                raise configuration.error(schedule, f"{name}={getattr(configuration, name)!r} cannot be served, {reason}")
        return configuration

    @property
    def lists_blocks(self) -> bool:
        """True if ``checkpoint`` is a list of blocks."""
        return isinstance(self.checkpoint, Sequence) and not isinstance(self.checkpoint, str)

    def error(self, schedule: Schedule, message: str) -> ScheduleError:
        """Return an error that names this schedule."""
        return ScheduleError(f"apply_schedule({self.key!r}): {message}", path=schedule.path)

    def _check_values(self, schedule: Schedule) -> None:
        for name in (field.name for field in fields(self) if field.type in ("bool", "bool | None")):
            value = getattr(self, name)
            if not isinstance(value, bool) and value is not None:
                raise self.error(schedule, f"{name} is {value!r}; give True or False")
        for name in ("prefix", "attn_op_name"):
            value = getattr(self, name)
            if not isinstance(value, str) and value is not None:
                raise self.error(schedule, f"{name} is {value!r}; give a string")
        ratio = self.ckpt_ratio
        if isinstance(ratio, bool) or not isinstance(ratio, Real) or not 0 <= ratio <= 1:
            raise self.error(schedule, f"ckpt_ratio is {ratio!r}; give a share of the blocks from 0 to 1")
        if self.checkpoint_method not in METHODS:
            message = f"checkpoint_method is {self.checkpoint_method!r}; give {' or '.join(map(repr, METHODS))}"
            raise self.error(schedule, message)
        if isinstance(self.pipeline_cuts, str) or not isinstance(self.pipeline_cuts, Sequence):
            raise self.error(schedule, f"pipeline_cuts is {self.pipeline_cuts!r}; give a list of numbers of blocks")
        if self.fp16 and self.bf16:
            raise self.error(schedule, "fp16 and bf16 are both asked for; give one of them")
        if self.disable_flash_attn is not None and self.attn_op_name is not None:
            message = f"attn_op_name={self.attn_op_name!r} says how to attend already; leave disable_flash_attn out"
            raise self.error(schedule, message)
        self._check_model_config(schedule)

    def _check_steps(self, schedule: Schedule) -> None:
        """Refuse values of ``checkpoint`` and ``pipeline_stages`` of another form, and two names for one thing."""
        given, stages = self.checkpoint, self.pipeline_stages
        is_ratio, is_list = isinstance(given, Real), self.lists_blocks
        is_policy = given is None or isinstance(given, str) or callable(given)
        if isinstance(given, bool) or not (is_ratio or is_list or is_policy):
            raise self.error(schedule, f"checkpoint is {given!r}; give a share of the blocks, a list of blocks, or a policy")
        if isinstance(given, Real) and not 0 <= float(given) <= 1:
            raise self.error(schedule, f"checkpoint is {given!r}; give a share of the blocks from 0 to 1")
        if self.ckpt_ratio and (is_ratio or is_list):
            raise self.error(schedule, f"checkpoint={given!r} says what is recomputed already; leave ckpt_ratio out")
        is_paths = (
            isinstance(stages, Sequence) and not isinstance(stages, str) and all(isinstance(each, str) for each in stages)
        )
        if isinstance(stages, bool) or not (stages is None or is_paths or (isinstance(stages, int) and stages >= 1)):
            raise self.error(schedule, f"pipeline_stages is {stages!r}; give the number of stages, or paths at which they end")
        if stages is not None and self.pipeline_cuts:
            raise self.error(schedule, "pipeline_stages and pipeline_cuts are both given; give one of them")
        for name in ("sequence_parallel", "parallel_loss"):
            if getattr(self, name) and not self.tensor_parallel:
                raise self.error(schedule, f"{name}=True needs tensor_parallel; leave tensor_parallel=False out")

    def _check_model_config(self, schedule: Schedule) -> None:
        """Refuse the config of another model: sizes are read from the modules, so it would silently have no effect."""
        own: Any = getattr(schedule.mod, "config", None)
        if self.model_config is None or self.model_config is own or not hasattr(own, "to_dict"):
            return
        if type(self.model_config) is not type(own):
            message = f"model_config is a {type(self.model_config).__name__}, and the model's is a {type(own).__name__}"
            raise self.error(schedule, f"{message}; leave it out")
        mine, theirs = own.to_dict(), self.model_config.to_dict()
        if different := sorted(name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name)):
            message = f"model_config is of another model, {different[0]!r} differs; leave it out"
            raise self.error(schedule, message)


_UNSUPPORTED = {"fuse_conv": "its schedules fuse no convolutions; call compile() on the blocks, which does"}
