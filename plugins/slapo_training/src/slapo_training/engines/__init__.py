"""Building blocks of engines and dialects beside the step itself.

The base of dialects for other projects' engines and their ``Limit``s, the files that Slapo writes beside an engine's
own checkpoint, checks of initial weights and gradients across ranks, and clean-up of engines that share parameters or
outlive their process group. Programs, parameters and engines enter; checks raise the same ``BuildError`` on all
ranks. It may import ``slapo_core`` and all rooms below it: ``ema``, ``checkpoint``, ``options``, ``losses``,
``batches``, ``model`` and ``distributed``. It knows no engine by name.
"""
