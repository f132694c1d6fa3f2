"""Steps for stacked experts, whose weights are one parameter."""

from __future__ import annotations

from slapo_core import Schedule

from ...rules.rulebook import rules_of


def split_stack(schedule: Schedule) -> None:
    """Split stacked experts, and reduce their output and the gradient of their inputs."""
    cut = rules_of(schedule).stack_cut(schedule.mod)
    assert cut is not None
    name = cut.main_parameter(schedule.mod)
    schedule.shard(name, axis=cut.dims[name])
    schedule.sync("bwd_post", "all_reduce").sync("fwd_post", "all_reduce")


def fork_stack(schedule: Schedule) -> None:
    """Fork the random numbers of stacked experts that have a dropout."""
    cut = rules_of(schedule).stack_cut(schedule.mod)
    if cut is not None and cut.draws and getattr(schedule.mod, "dropout", False):
        schedule.fork_rng()
