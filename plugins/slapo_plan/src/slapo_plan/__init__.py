"""Memory, traffic and step time of a schedule on any number of ranks, in one process without a GPU.

``records`` are what one run of a stage on fake tensors leaves: operators, collectives, and memory. ``measurement`` runs the
stages, ``hardware`` turns the records into seconds, ``simulation`` replays the order of a pipeline schedule, and
``estimation`` puts all together. Names are imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slapo_core import lazy_names

if TYPE_CHECKING:
    from .estimation.estimate import estimate
    from .estimation.link_totals import CollectiveTotal, LinkTotal, TrafficMatrix
    from .estimation.result import Estimate
    from .hardware import Hardware, calibrate
    from .measurement.engine_run import MeasuredStep, measure_step
    from .measurement.fake_process_group import fake_ranks
    from .search.candidates import Candidate
    from .search.layouts import ContradictionError, Rejection
    from .search.plan import Plan, plan
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "estimation.estimate": ["estimate"],
            "estimation.link_totals": ["CollectiveTotal", "LinkTotal", "TrafficMatrix"],
            "estimation.result": ["Estimate"],
            "measurement.fake_process_group": ["fake_ranks"],
            "hardware": ["Hardware", "calibrate"],
            "measurement.engine_run": ["MeasuredStep", "measure_step"],
            "search.candidates": ["Candidate"],
            "search.layouts": ["ContradictionError", "Rejection"],
            "search.plan": ["Plan", "plan"],
        },
    )

__all__ = [
    "Candidate",
    "CollectiveTotal",
    "ContradictionError",
    "Estimate",
    "Hardware",
    "LinkTotal",
    "MeasuredStep",
    "Plan",
    "Rejection",
    "TrafficMatrix",
    "calibrate",
    "estimate",
    "fake_ranks",
    "measure_step",
    "plan",
]
