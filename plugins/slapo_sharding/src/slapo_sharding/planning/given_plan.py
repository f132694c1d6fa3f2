"""Application of a given plan in the way of a derived one, if the model's own forward verifies it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from slapo_core import Schedule, ScheduleError, TraceError, savepoint

from .derivation.flat_graphs import layer_paths
from .derivation.layer_search import DerivedPlan
from .derivation.replicated_modules import PlanConflict, ReplicatedModules
from .derived_plan import apply_plan


def apply_given_plan(schedule: Schedule, outputs: Mapping[str, str]) -> str | None:
    """Split the layers of a given plan like those of a derived plan, if the model's own forward verifies it.

    Whole sizes in the code are then divided, fused projections are split block by block, and the gradients of parameters that
    meet sharded values are reduced.

    Args:
        schedule: Schedule of the module. It has example inputs, and nothing in it is split yet.
        outputs: Path of each layer of the plan, to its output as in ``LayerSplit``. All other layers stay whole.

    Returns:
        None if the steps were applied, else the reason why the plan cannot be verified. The module is unchanged then.
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
    """Raise ``PlanConflict`` for a layer that the derived plan leaves whole, or splits along another dimension."""
    found = {path: split.output for path, split in derived.splits.items()}
    for path, output in outputs.items():
        if found.get(path) != output:
            reason = derived.reasons.get(path, f"its input is {'whole' if output == 'reduced' else 'sharded'}")
            raise PlanConflict(schedule, f"{path!r} cannot be split like that: {reason}", [path])
