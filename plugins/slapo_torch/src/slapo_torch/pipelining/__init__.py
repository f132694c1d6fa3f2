"""Pipeline schedules on ``torch.distributed.pipelining``.

The schedules by name and by CSV file, the rank of each stage, and stages whose messages vary between micro-batches.
A schedule name and numbers of stages and micro-batches enter; a placement and torch's schedule runtime leave. It
may import ``slapo_core`` and ``gradients``. ``__init__.py`` imports nothing, since ``torch.distributed.pipelining``
takes a second to import. Private names of torch's package are in ``_torch_pipelining.py``.

``pipeline.py`` above this room runs this rank's stages with these parts.
"""
