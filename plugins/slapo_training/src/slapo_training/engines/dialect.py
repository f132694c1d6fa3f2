"""A dialect whose engine is another project's: which version of it, and what it cannot do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import ReduceLROnPlateau

from slapo_core import BuildError, Dialect, Engine, Program

from ..options.common_options import EngineOptions


class Limit(NamedTuple):
    """Something that an engine cannot do.

    Args:
        asked: What, as it reads behind "cannot do".
        instead: What to do in its place.
        applies: Whether a program with these options asks for it, or what in them does. It makes no process group and changes
            nothing.
    """

    asked: str
    instead: str
    applies: Callable[[Program, Any], bool | str]

    def error(self, target: str, found: bool | str = True) -> BuildError:
        """Return the error where the limit applies, with what ``applies`` found."""
        what = f"{self.asked} ({found})" if isinstance(found, str) else self.asked
        return BuildError(f"target {target!r} cannot do {what}; {self.instead}")


def _has_no_mesh(program: Program, options: Any) -> str:
    ranks = dist.get_world_size() if program.mesh is None and dist.is_initialized() else 1
    return f"{ranks} ranks" if ranks > 1 else ""


def _stages_left_over(program: Program, options: Any) -> str:
    stages, ranks = len(program.stages), program.axis_size("pp")
    return f"{stages} stage{'s' * (stages > 1)} with pp={ranks}" if stages % ranks else ""


ALL_RANKS = (
    Limit("several ranks without a mesh that do not fit the stages or the group", "give create_schedule mesh=", _has_no_mesh),
    Limit(
        "a mesh that leaves out ranks, or has them in another order than row-major over pp, dp, tp",
        "make it with init_device_mesh(device, (pp, dp, tp), mesh_dim_names=('pp', 'dp', 'tp'))",
        lambda of, _: of.mesh is not None and not torch.equal(of.mesh.mesh.flatten(), torch.arange(dist.get_world_size())),
    ),
    Limit(
        "a number of stages that is not a multiple of pp",
        "cut the model into as many stages as pp, with pipeline() or cut_pipeline_stage(), or make pp smaller",
        _stages_left_over,
    ),
)
"""Limits of engines that take all ranks of the job, in their own order."""
NO_PLATEAU = Limit(
    "ReduceLROnPlateau, as it steps a learning rate's schedule without the loss",
    "use another one",
    lambda program, options: isinstance(options.lr_scheduler, ReduceLROnPlateau),
)


def odd_dtype(program: Program, options: EngineOptions) -> str:
    """Return the first parameter that is neither of float32 nor of the type of the engine's weights."""
    named = program.module.named_parameters()
    kinds = (torch.float32, options.dtype)
    return next((f"{name} is {parameter.dtype}" for name, parameter in named if parameter.dtype not in kinds), "")


def holds_copies(program: Program) -> bool:
    """Return whether several ranks hold the same part of a parameter, so that a sum over ranks counts it several times."""
    return any(sum(spec.sizes) > spec.full_shape[spec.dim] for spec in program.shard_specs.values())


NO_CLIPPED_COPIES = Limit(
    "clipping where several ranks hold the same part of a parameter, as of shared key and value heads",
    "its norm would count them several times; use clip=0, or target='torch'",
    lambda program, options: options.largest_norm > 0 and holds_copies(program),
)


class EngineDialect(Dialect):
    """A dialect for the engine of another project.

    Attributes:
        distribution: The engine's, as it is installed.
        tested: The version of it that this dialect was tested with.
        limits: What the engine cannot do, in the order in which it is asked.
    """

    takes_check = True
    distribution: ClassVar[str]
    tested: ClassVar[str]
    limits: ClassVar[tuple[Limit, ...]] = ()
    options_class: ClassVar[type[EngineOptions]]

    @classmethod
    def check(cls, program: Program, **config: Any) -> None:
        """Raise ``BuildError`` for options that are unknown or do not fit the program, and for what the engine cannot do."""
        options = cls.options_class.of(config)
        for limit in cls.limits:
            if found := limit.applies(program, options):
                raise limit.error(cls.name, found)
        super().check(program, **{**config, "precision": options.settled_precision})
        options.check_mean(options.parts * program.axis_size("dp"))

    @classmethod
    def build(cls, program: Program, **config: Any) -> Engine:
        """Make the engine of this rank; collective. See the dialect's ``options_class`` for the configuration."""
        cls.check(program, **config)
        made: Engine = cls.classes["runtime_engine"](program, cls.options_class.of(config))
        return made
