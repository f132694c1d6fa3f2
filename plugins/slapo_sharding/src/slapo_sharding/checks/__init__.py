"""Checks of a schedule at ``build`` and in the first run of the model, for schedules written by hand.

What enters is a schedule, or the running forward. What leaves is nothing, or a ``BuildError`` on all ranks that names
the module and the missing or wrong sync. After the first runs no hook of these checks is left. The room imports its
sub-room, ``planning``, ``splitting``, ``syncs``, ``rules``, ``communication``, ``slapo_training`` and ``slapo_core``; only
the hooks of ``build_hooks`` import it.

``check_list`` names the checks and starts those that ``check=`` and ``SLAPO_DISABLE_CHECKS`` leave on.

``build_check`` verifies what can be told of syncs without running. ``first_run_check`` then looks at every torch
function of the first forward after ``build``, of the first one with gradients and of the first in training. Code that
reads a shard outside its module is refused. ``partial_gradients`` tracks which gradients are partial, from the syncs
and sharded modules on. ``size_errors`` names the module where sizes do not fit.

``module_comparison`` finds what DTensor's rules cannot see. The innermost module with whole inputs and outputs runs
again as it did, and again with the outputs of its sharded layers gathered (``module_rerun``). Where results differ, it
finds the line. Modules of a derived plan, which a trace has verified, are not run again.
"""
