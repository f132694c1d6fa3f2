"""Plans for ``tensor_parallel``: published, given by the user, or derived from the model's own forward.

What enters is a schedule handle and, where there is one, a plan. What leaves is the same handle after its shard, sync
and fork_rng steps, or a ``ScheduleError`` that names what cannot be split. This folder has the plans themselves; its
sub-rooms, in the order in which they may be imported, are ``dry_run``, ``sequence``, ``local_sizes``, ``derivation``
and ``execution``. The room imports them, ``splitting``, ``syncs``, ``rules``, ``communication`` and ``slapo_core``.

A plan is carried out on the model, and this rank's model is then traced again and compared with the dry run. A module
whose forward cannot be a graph has no plan as a whole: ``submodule_plans`` splits its children one by one, with whole
values between them.
"""
