"""``consolidate_model``: values for meta parameters before an engine is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from slapo_core.agreement import agree
from slapo_core.build import build_program
from slapo_core.errors import BuildError
from slapo_core.schedule import Schedule
from slapo_core.weights import materialize


def consolidate_model(
    sch: Schedule,
    target: str | None,
    param_init_fn: Callable[[nn.Module], Any] | None = None,
    *,
    seed: int | None = None,
    **kwargs: Any,
) -> Schedule:
    """Give the meta parameters of a scheduled model their values on this rank: the same numbers in every layout.

    ``build`` does so of itself; this is for those who want to look at them, or to load their own, before. Collective over the
    ranks of the schedule. Of a model that is cut into stages each rank gets those that it will run, and the rest stays on the
    meta device. Values that are there are not touched, and ``undo`` ends here as it does with ``build``.

    Args:
        sch: Any handle of the schedule.
        target: Name of the dialect that will build, which decides where stages run; None is the plain module.
        param_init_fn: Called with each module, children first. Default: the model's own ``_init_weights``, as models of
            Transformers have it, else each module's ``reset_parameters``.
        seed: Of the numbers; default: the one of ``set_random_seed``'s default. ``build(seed=)`` gives the same.
        **kwargs: What ``build`` will be given for this target, e.g. ``pipeline_schedule`` and ``microbatches``.

    Returns:
        The schedule.

    Raises:
        UnknownNameError: no such target.
        BuildError: the schedule was built already, does not go with the target, or an initialiser leaves a parameter without
            values; a rank failed. Nothing has changed on the ranks that did.
    """
    if not isinstance(sch, Schedule):
        raise BuildError(f"consolidate_model: cannot give values to a {type(sch).__name__}; give what create_schedule returned")
    mesh, error = sch.mesh, None
    try:
        if sch._root.target is not None:
            raise BuildError(
                f"consolidate_model: the schedule was built for {sch._root.target!r} already; call it before build"
            )
        dialect = sch.registry.dialect(target) if target is not None else None
        if any(parameter.is_meta for parameter in sch.root_module.parameters()):
            program = build_program(sch)
            if dialect is not None:
                program = dialect.check(program, **kwargs) or program
            own = program.axis_rank("pp")
            held = [stage.module for stage in program.stages if program.rank_of(stage.index) == own]
            device = mesh.device_type if mesh is not None else "cpu"
            materialize(program.module, held, param_init_fn=param_init_fn, seed=seed, device=device)
            sch.journal.seal()
    except Exception as err:
        error = err
    agree(error, mesh, sch.group if mesh is None else None)
    return sch
