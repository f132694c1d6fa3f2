"""Stacked experts and the like: one parameter holds the weights of all."""

from __future__ import annotations

from slapo_core import Schedule

from ...rules.rulebook import rules_of


def split_stack(schedule: Schedule) -> None:
    """Split stacked experts and the like: reduce their output, and the gradients of what goes in."""
    cut = rules_of(schedule).stack_cut(schedule.mod)
    assert cut is not None
    name = cut.main(schedule.mod)
    schedule.shard(name, axis=cut.dims[name])
    schedule.sync("bwd_post", "all_reduce").sync("fwd_post", "all_reduce")


def fork_stack(schedule: Schedule) -> None:
    """Let each rank draw its own random numbers in a stack that drops something."""
    cut = rules_of(schedule).stack_cut(schedule.mod)
    if cut is not None and cut.draws and getattr(schedule.mod, "dropout", False):
        schedule.fork_rng()
