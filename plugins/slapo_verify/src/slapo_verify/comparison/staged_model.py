"""Module that runs a schedule's pipeline stages in turn in one process."""

from __future__ import annotations

from typing import Any

from torch import nn

from slapo_core import Program, Schedule, build_program


class StagedModel(nn.Module):
    """The scheduled model, under its own names, with a forward that runs the stages in turn.

    Args:
        whole: The scheduled model, which provides everything but the forward.
        program: Its stages.
    """

    def __init__(self, whole: nn.Module, program: Program) -> None:
        self.__dict__.update(vars(whole), _slapo_whole=whole, _slapo_program=program)

    @property
    def count(self) -> int:
        """Number of stages."""
        return len(self.__dict__["_slapo_program"].stages)

    @property
    def training(self) -> bool:
        """Mode of the whole model."""
        return bool(self.__dict__["_slapo_whole"].training)

    @training.setter
    def training(self, mode: bool) -> None:
        self.__dict__["_slapo_whole"].training = mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the last stage returns."""
        return self.__dict__["_slapo_program"](*args, **kwargs)


def as_built(sch: Schedule) -> nn.Module:
    """Return the module that runs: the schedule's stages if it has several, else the model."""
    program = build_program(sch)
    return StagedModel(sch.mod, program) if len(program.stages) > 1 else sch.mod
