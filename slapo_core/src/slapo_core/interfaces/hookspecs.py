"""The hooks a plugin may implement. ``NAME`` is the pluggy project name and the entry-point group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ..schedules.journal import Step
    from ..schedules.schedule import Schedule
    from .codec import Codec
    from .dialect import Dialect
    from .engine import Engine
    from .primitive import Primitive
    from .program import Program

NAME = "slapo"
hookspec = pluggy.HookspecMarker(NAME)
hookimpl = pluggy.HookimplMarker(NAME)


@hookspec
def slapo_primitives() -> Mapping[str, type[Primitive] | str]:  # type: ignore[empty-body]
    """Primitives by name: the class, or ``"module:Class"``, imported when first used.

    Example:
        >>> @hookimpl
        ... def slapo_primitives():
        ...     return {"quantize": "slapo_quant.quantize:QuantizePrimitive"}
    """


@hookspec
def slapo_dialects() -> Mapping[str, type[Dialect] | str]:  # type: ignore[empty-body]
    """Dialects by target name: the class, or ``"module:Class"``, imported when first used.

    Example:
        >>> @hookimpl
        ... def slapo_dialects():
        ...     return {"torch": "slapo_torch.dialect:TorchDialect"}
    """


@hookspec
def slapo_models() -> Mapping[str, Any]:  # type: ignore[empty-body]
    """Ready schedules by Transformers ``model_type``: a function ``schedule(sch, **options)`` or ``"module:function"``.

    Example:
        >>> @hookimpl
        ... def slapo_models():
        ...     return {"gpt2": "slapo_models.families.gpt2:schedule"}
    """


@hookspec
def slapo_queries() -> Mapping[str, Callable[..., Any] | str]:  # type: ignore[empty-body]
    """Queries by name: functions of a schedule, called as ``sch.NAME(...)``, that change nothing and are not recorded.

    Example:
        >>> @hookimpl
        ... def slapo_queries():
        ...     return {"count_parameters": "slapo_quant.queries:count_parameters"}
    """


@hookspec
def slapo_codecs() -> Mapping[str, type[Codec] | str]:  # type: ignore[empty-body]
    """Codecs by key: how arguments of a type are written in saved schedules; see ``Codec``.

    Example:
        >>> @hookimpl
        ... def slapo_codecs():
        ...     return {"$scale": "slapo_quant.scale:ScaleCodec"}
    """


@hookspec
def slapo_subgraph_primitives() -> Mapping[str, type[Primitive] | str]:  # type: ignore[empty-body]
    """What a primitive does with a subgraph of a traced module, by the primitive's name, where it has an argument for one.

    ``replace(new, subgraph)`` calls the class that is registered as ``"replace"``.

    Example:
        >>> @hookimpl
        ... def slapo_subgraph_primitives():
        ...     return {"replace": "slapo_tracing.editing.replacement:SubgraphReplacement"}
    """


@hookspec
def slapo_after_create(schedule: Schedule) -> None:
    """Called with a new schedule, before anything of its model has changed. An observer: it must change nothing.

    Example:
        >>> @hookimpl
        ... def slapo_after_create(schedule):
        ...     print(type(schedule.mod))
    """


@hookspec
def slapo_before_apply(schedule: Schedule, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Called before a primitive is checked; raise ``ScheduleError`` to refuse the step.

    Example:
        >>> @hookimpl
        ... def slapo_before_apply(schedule, name):
        ...     if name == "replace" and schedule.path.startswith("lm_head"):
        ...         raise ScheduleError("the head is not to be replaced", path=schedule.path, primitive=name)
    """


@hookspec
def slapo_after_apply(schedule: Schedule, step: Step) -> None:
    """Called after a step has been recorded. An observer: it must change nothing.

    Example:
        >>> @hookimpl
        ... def slapo_after_apply(schedule, step):
        ...     print(step)
    """


@hookspec(firstresult=True)
def slapo_partition(schedule: Schedule) -> Program | None:
    """The schedule's program in stages, or None when this plugin has nothing to partition; the first program wins.

    Example:
        >>> @hookimpl
        ... def slapo_partition(schedule):
        ...     return None
    """


@hookspec(firstresult=True)
def slapo_default_mesh(schedule: Schedule, target: str, group: ProcessGroup | None) -> DeviceMesh | None:
    """The mesh for an engine of a schedule on all ranks that was given none; collective. None: the engine gets no mesh.

    ``group`` is the process group that ``create_schedule`` was given, or None.

    Example:
        >>> @hookimpl
        ... def slapo_default_mesh(schedule):
        ...     return init_device_mesh("cpu", (1, schedule.world_size, 1), mesh_dim_names=("pp", "dp", "tp"))
    """


@hookspec
def slapo_before_build(schedule: Schedule, target: str | None, config: dict[str, Any]) -> Callable[..., Any] | None:
    """Called before a program is made; raise ``BuildError`` to refuse.

    A function that it returns is called with the program, the list of modules that this rank runs of it, and a device, as
    soon as nothing refuses any more. It may give values to meta parameters, before the rest is initialised, and sends nothing.
    Where it has a method ``agreed``, ranks compare the lines that this gives first, and fail if they differ. What it returns,
    if anything, is called as ``__exit__`` of a context would be when the engine is there or could not be built.

    Example:
        >>> @hookimpl
        ... def slapo_before_build(schedule, target, config):
        ...     print("building for", target)
    """


@hookspec
def slapo_after_build(engine: Engine) -> None:
    """Called with the engine that ``build`` is about to return.

    Example:
        >>> @hookimpl
        ... def slapo_after_build(engine):
        ...     print(type(engine).__name__)
    """


@hookspec(firstresult=True)
def slapo_render(subject: Any, html: bool) -> str | None:
    """Text of a schedule, program or engine for ``print``, or HTML for a notebook; the first that is not None is shown.

    It must change nothing and communicate with no rank, as other ranks may not print.

    Example:
        >>> @hookimpl
        ... def slapo_render(subject, html):
        ...     return f"<b>{type(subject).__name__}</b>" if html else repr(subject)
    """


@hookspec
def slapo_commands(app: Any) -> None:
    """Add commands to the ``slapo`` command line; ``app`` is its ``typer.Typer``.

    Example:
        >>> @hookimpl
        ... def slapo_commands(app):
        ...     @app.command()
        ...     def hello() -> None:
        ...         print("hello")
    """


@hookspec
def slapo_add_hookspecs(manager: pluggy.PluginManager) -> None:
    """Bring hook specs of your own with ``manager.add_hookspecs``; called before any plugin's hooks are validated.

    Example:
        >>> class QuantHooks:
        ...     @hookspec
        ...     def slapo_quant_ranges(self):
        ...         "Value ranges by parameter name."
        >>> @hookimpl
        ... def slapo_add_hookspecs(manager):
        ...     manager.add_hookspecs(QuantHooks)
    """
