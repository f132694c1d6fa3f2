"""``consolidate_model``: values for meta parameters before an engine is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from slapo_core import BuildError, BuildPlan, Schedule, agree_on_error, compare_across_ranks


def consolidate_model(
    sch: Schedule,
    target: str | None,
    param_init_fn: Callable[[nn.Module], Any] | None = None,
    *,
    seed: int | None = None,
    **kwargs: Any,
) -> Schedule:
    """Initialise the meta parameters of a scheduled model on this rank, with equal values in every layout.

    ``build`` does this itself; call it to read the values, or load others, before. Collective over the ranks of the schedule.
    In a pipeline each rank initialises the stages that it will run, and the rest stays on the meta device. Existing values do
    not change. ``undo`` ends here, as it does with ``build``.

    Args:
        sch: Any handle of the schedule.
        target: Name of the dialect that will build, which decides the rank of each stage; None for the plain module.
        param_init_fn: Called with each module, children first. Default: the model's own ``_init_weights``, as in Transformers,
            else each module's ``reset_parameters``.
        seed: Seed of the values; default: the default seed of ``set_random_seed``. ``build(seed=)`` gives the same values.
        **kwargs: Options for ``build``, e.g. ``pipeline_schedule`` and ``microbatches``; or ``weights``, a folder to load from.

    Returns:
        The schedule.

    Raises:
        UnknownNameError: no such target.
        BuildError: the schedule was built already, does not fit the target and its options, or an initialiser leaves a
            parameter without values; a rank failed. Nothing has changed on ranks that failed.
    """
    if not isinstance(sch, Schedule):
        raise BuildError(f"consolidate_model: cannot give values to a {type(sch).__name__}; give what create_schedule returned")
    ranks = (sch.mesh, sch.group if sch.mesh is None else None)
    with agree_on_error(*ranks):
        if sch.target is not None:
            raise BuildError(f"consolidate_model: the schedule was built for {sch.target!r} already; call it before build")
        unchecked = {"check": False} if "shard" in sch.registry.names("primitive") else {}  # steps may follow
        config: dict[str, Any] = {**unchecked, **kwargs}
        if target is not None and sch.mesh is None and sch.group is not None:
            sch.registry.get("dialect", target)  # it runs stages along a mesh; without one each rank holds all of them
            target = None
            config = {name: value for name, value in config.items() if name in ("check", "weights")}
        plan = BuildPlan.of(sch, target, **config)
        agreed = plan.agreed_lines()
    compare_across_ranks(agreed, *ranks)
    if any(parameter.is_meta for parameter in sch.root_module.parameters()):
        with plan.weights(param_init_fn, seed):
            pass
        sch.journal.seal()
    return sch
