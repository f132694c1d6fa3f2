"""How a model attends: the classic names, as kernels."""

from __future__ import annotations

from slapo_core.errors import UnknownNameError
from slapo_core.schedule import Schedule

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


def use_attention(schedule: Schedule, config: Configuration) -> None:
    """Let the model attend as ``attn_op_name`` and ``disable_flash_attn`` say."""
    name = attention_of(schedule, config)
    if name is not None:
        implementation = ATTENTIONS[name]
        schedule.use_kernels("attention", force={"attention": implementation} if implementation else None)
