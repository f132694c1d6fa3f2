"""Kernels for the attention, by its classic names, and for the activations of the MLPs."""

from __future__ import annotations

from slapo_core import Schedule, ScheduleError, UnknownNameError

from .configuration import Configuration

ATTENTIONS: dict[str, str | None] = {
    "auto": None,
    "cuda": None,
    "cutlass": "native",
    "eager": "eager",
    "flash": "flash",
    "flash_attn": "flash",
    "flex": "flex",
    "native": "native",
    "native_flash_attn": "native",
    "native_xformers": "eager",
    "triton": None,
}
"""Classic name to the implementation of ``use_kernels("attention")``; None is the first that works where the weights are."""


def attention_of(schedule: Schedule, config: Configuration) -> str | None:
    """The classic name of how to attend, or None where nothing is asked for.

    Raises:
        ScheduleError: there is no such name.
    """
    name = config.attn_op_name
    if config.disable_flash_attn is not None:
        name = "native_xformers" if config.disable_flash_attn else "cuda"
    if name is not None and name not in ATTENTIONS:
        raise config.error(schedule, str(UnknownNameError.of("attention", name, ATTENTIONS, whose="attn_op_name")))
    return name


def use_kernels(schedule: Schedule, config: Configuration) -> None:
    """Let kernels compute what ``attn_op_name``, ``disable_flash_attn``, ``disable_fuse_bias_gelu`` and ``kernels`` ask for.

    Raises:
        ScheduleError: there are no kernels, or none for this model on this machine.
    """
    name = attention_of(schedule, config)
    asked = [*(["attention"] if name is not None else []), *([] if config.disable_fuse_bias_gelu else ["bias_act"])]
    asked += ["what it can"] if config.kernels is True else _names(config)
    if asked and "use_kernels" not in schedule.registry.names("primitive"):
        raise config.error(schedule, f"{' and '.join(asked)} by kernels needs slapo-kernels; pip install slapo-kernels")
    if name is not None:
        _use_attention_kernel(schedule, config, name)
    if not config.disable_fuse_bias_gelu:
        schedule.use_kernels("bias_act")
    if config.kernels is True:
        schedule.use_kernels()
    elif names := [kernel for kernel in _names(config) if kernel != "bias_act" or config.disable_fuse_bias_gelu]:
        schedule.use_kernels(names)


def _names(config: Configuration) -> list[str]:
    """Return the kernels that ``kernels`` lists."""
    given = config.kernels
    return [given] if isinstance(given, str) else [] if isinstance(given, bool) else [*given]


def _use_attention_kernel(schedule: Schedule, config: Configuration, name: str) -> None:
    implementation = ATTENTIONS[name]
    try:
        schedule.use_kernels("attention", force={"attention": implementation} if implementation else None)
    except ScheduleError as error:
        advice = "give 'auto', which takes the first that works here" if implementation else "leave it out"
        raise config.error(schedule, f"it cannot attend by {name!r}: {error}; {advice}") from error
