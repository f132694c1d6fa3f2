"""Hooks that a plugin may implement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from .interfaces.codec import Codec
    from .interfaces.dialect import Dialect
    from .interfaces.engine import Engine
    from .interfaces.primitive import Primitive
    from .interfaces.program import Program
    from .schedules.journal import Step
    from .schedules.schedule import Schedule

NAME = "slapo"
"""Name of the pluggy project, and of the entry-point group."""
hookspec = pluggy.HookspecMarker(NAME)
hookimpl = pluggy.HookimplMarker(NAME)


@hookspec
def slapo_primitives() -> Mapping[str, type[Primitive] | str]:  # type: ignore[empty-body]
    """Return primitives by name: a class, or ``"module:Class"``, which is imported at first use.

    Example:
        >>> @hookimpl
        ... def slapo_primitives():
        ...     return {"quantize": "slapo_quant.quantize:QuantizePrimitive"}
    """


@hookspec
def slapo_dialects() -> Mapping[str, type[Dialect] | str]:  # type: ignore[empty-body]
    """Return dialects by target name: a class, or ``"module:Class"``, which is imported at first use.

    Example:
        >>> @hookimpl
        ... def slapo_dialects():
        ...     return {"torch": "slapo_torch.dialect:TorchDialect"}
    """


@hookspec
def slapo_models() -> Mapping[str, Any]:  # type: ignore[empty-body]
    """Return model schedules by Transformers ``model_type``: ``schedule(sch, **options)``, or ``"module:function"``.

    Example:
        >>> @hookimpl
        ... def slapo_models():
        ...     return {"gpt2": "slapo_models.families.gpt2:schedule"}
    """


@hookspec
def slapo_queries() -> Mapping[str, Callable[..., Any] | str]:  # type: ignore[empty-body]
    """Return queries by name: functions of a schedule, called as ``sch.NAME(...)``. A query changes nothing and is not
    recorded.

    Example:
        >>> @hookimpl
        ... def slapo_queries():
        ...     return {"count_parameters": "slapo_quant.queries:count_parameters"}
    """


@hookspec
def slapo_codecs() -> Mapping[str, type[Codec] | str]:  # type: ignore[empty-body]
    """Return codecs by key. A ``Codec`` writes arguments of one type into saved schedules.

    Example:
        >>> @hookimpl
        ... def slapo_codecs():
        ...     return {"$scale": "slapo_quant.scale:ScaleCodec"}
    """


@hookspec
def slapo_subgraph_primitives() -> Mapping[str, type[Primitive] | str]:  # type: ignore[empty-body]
    """Return implementations of primitives on subgraphs of a traced module, by the name of the primitive.

    ``replace(new, subgraph)`` calls ``check`` and ``apply`` of the class under ``"replace"``, and passes the result of
    ``check`` to ``apply`` as ``checked``.

    Example:
        >>> @hookimpl
        ... def slapo_subgraph_primitives():
        ...     return {"replace": "slapo_tracing.editing.replacement:SubgraphReplacement"}
    """


@hookspec
def slapo_after_create(schedule: Schedule) -> None:
    """Observe a new schedule before its first step. Must change nothing.

    Example:
        >>> @hookimpl
        ... def slapo_after_create(schedule):
        ...     print(type(schedule.mod))
    """


@hookspec
def slapo_before_apply(schedule: Schedule, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Observe a step before its check. Raise ``ScheduleError`` to refuse it.

    Example:
        >>> @hookimpl
        ... def slapo_before_apply(schedule, name):
        ...     if name == "replace" and schedule.path.startswith("lm_head"):
        ...         raise ScheduleError("the head is not to be replaced", path=schedule.path, primitive=name)
    """


@hookspec
def slapo_after_apply(schedule: Schedule, step: Step) -> None:
    """Observe a step that has been applied. Must change nothing.

    Example:
        >>> @hookimpl
        ... def slapo_after_apply(schedule, step):
        ...     print(step)
    """


@hookspec(firstresult=True)
def slapo_partition(schedule: Schedule) -> Program | None:
    """Return the program of a schedule in stages, or None if this plugin has nothing to partition. The first program wins.

    Example:
        >>> @hookimpl
        ... def slapo_partition(schedule):
        ...     return None
    """


@hookspec(firstresult=True)
def slapo_default_mesh(schedule: Schedule, target: str, group: ProcessGroup | None) -> DeviceMesh | None:
    """Return a mesh of all ranks for the engine of a schedule without a mesh, or None for no mesh. Collective.

    ``group`` is the process group that ``create_schedule`` received, or None.

    Example:
        >>> @hookimpl
        ... def slapo_default_mesh(schedule, target):
        ...     if target != "quant":
        ...         return None
        ...     return init_device_mesh("cpu", (1, schedule.world_size, 1), mesh_dim_names=("pp", "dp", "tp"))
    """


@hookspec
def slapo_before_build(schedule: Schedule, target: str | None, config: dict[str, Any]) -> Callable[..., Any] | None:
    """Observe a schedule before its program is made. Raise ``BuildError`` to refuse.

    The hook may return a function that gives values to meta parameters. It is called as ``fill(program, modules, device)``
    after all checks, before the other meta parameters are initialised. ``modules`` are the parts of the program that this rank
    runs. The function must not communicate.

    If the function has a method ``agreed``, ranks first compare the lines that the method returns, and fail if these differ. If
    the function returns a callable, that is called like ``__exit__`` of a context manager when the engine exists or the build
    failed.

    Example:
        >>> @hookimpl
        ... def slapo_before_build(schedule, target, config):
        ...     print("building for", target)
    """


@hookspec
def slapo_after_build(engine: Engine) -> None:
    """Observe the engine that ``build`` is about to return.

    Example:
        >>> @hookimpl
        ... def slapo_after_build(engine):
        ...     print(type(engine).__name__)
    """


@hookspec(firstresult=True)
def slapo_render(subject: Any, html: bool) -> str | None:
    """Return the text of a schedule, program or engine for ``print``, or HTML for a notebook. The first that is not None is
    shown.

    Must change nothing, and must not communicate, since other ranks may not print.

    Example:
        >>> @hookimpl
        ... def slapo_render(subject, html):
        ...     return f"<b>{type(subject).__name__}</b>" if html else repr(subject)
    """


@hookspec(firstresult=True)
def slapo_schedule_function(namespace: dict[str, Any], config: Mapping[str, Any] | None) -> Callable[[Schedule], Any] | None:
    """Return the function that ``load_schedule`` calls with the schedule; None leaves it the file's own ``schedule(sch)``.

    ``namespace`` holds the names that the Python file defines, ``config`` what the caller of ``load_schedule`` gave.

    Example:
        >>> @hookimpl
        ... def slapo_schedule_function(namespace, config):
        ...     if "bits" in (config or {}):
        ...         return lambda sch: namespace["schedule"](sch, config["bits"])
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
    """Add hook specifications with ``manager.add_hookspecs``. Called before the hooks of any plugin are validated.

    Example:
        >>> class QuantHooks:
        ...     @hookspec
        ...     def slapo_quant_ranges(self):
        ...         "Value ranges by parameter name."
        >>> @hookimpl
        ... def slapo_add_hookspecs(manager):
        ...     manager.add_hookspecs(QuantHooks)
    """
