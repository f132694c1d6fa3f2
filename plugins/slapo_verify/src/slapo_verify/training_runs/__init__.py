"""Training steps to compare: by an engine on its ranks, and by the unmodified model in plain torch on the whole batch.
In: a model, a batch, an optimizer factory and the options of ``build``. Out: ``Trained`` with losses and updates by
original name. May import ``comparison``, ``model_setup`` and ``ranks``.
"""
