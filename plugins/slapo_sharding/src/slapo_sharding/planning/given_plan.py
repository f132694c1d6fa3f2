"""Carry out a plan that is given like a derived one, where the model's own forward shows it right."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from slapo_core import Schedule, ScheduleError, TraceError, savepoint

from .derivation.flat_graphs import layer_paths
from .derivation.layer_search import DerivedPlan
from .derivation.replicated_modules import PlanConflict, ReplicatedModules
from .derived_plan import apply_plan


def apply_given_plan(schedule: Schedule, outputs: Mapping[str, str]) -> str | None:
    """Split the layers of a given plan as a derived plan splits them, if the model's own forward shows that plan right.

    Sizes that the code takes from whole values are then divided, fused projections are split block by block, and the gradients
    of parameters that meet sharded values are summed.

    Args:
        schedule: Of the module. Nothing in it is split yet, and it has example inputs.
        outputs: Path of each layer of the plan to what the layer returns, as in ``Split``. All other layers stay whole.

    Returns:
        None where the steps are taken, else why the plan cannot be shown right; the module is then as before.
    """
    replicated = ReplicatedModules({path: "the plan leaves it out" for path in layer_paths(schedule) if path not in outputs})
    try:
        with savepoint(schedule):
            check = partial(_check_outputs, schedule, outputs)
            apply_plan(schedule, replicated, sequence_parallel=False, splits_more=True, accept=check)
    except PlanConflict as err:
        return err.reason
    except (ScheduleError, TraceError) as err:
        return str(err)
    return None


def _check_outputs(schedule: Schedule, outputs: Mapping[str, str], derived: DerivedPlan) -> None:
    """Compare a derived plan with the layers of a given one.

    Raises:
        Misfit: it does not split one of them, or splits one along the other dimension.
    """
    found = {path: split.output for path, split in derived.splits.items()}
    for path, output in outputs.items():
        if found.get(path) != output:
            reason = derived.reasons.get(path, f"it is given {'whole' if output == 'reduced' else 'sharded'} values")
            raise PlanConflict(schedule, f"{path!r} cannot be split like that: {reason}", [path])
