"""Hook implementations of slapo-models."""

from __future__ import annotations

from typing import Any

from slapo_core import hookimpl

_FAMILIES = {
    "albert": "albert",
    "auto": "auto",
    "bert": "bert",
    "gpt": "gpt2",
    "gpt2": "gpt2",
    "gpt_neo": "gpt_neo",
    "opt": "opt",
    "roberta": "roberta",
    "t5": "t5",
    "wideresnet": "wideresnet",
}
"""Key to the module whose function ``schedule`` it names."""


@hookimpl
def slapo_models() -> dict[str, str]:
    """The ready schedules."""
    return {key: f"slapo_models.families.{module}:schedule" for key, module in _FAMILIES.items()}


@hookimpl
def slapo_commands(app: Any) -> None:
    """``slapo models``."""
    from .commands import register  # noqa: PLC0415  needs what only the command line has

    register(app)
