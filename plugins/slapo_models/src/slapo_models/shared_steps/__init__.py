"""Configuration names and steps that ready schedules share: blocks, stages, recomputation, kernels, precision,
broadcast of inputs. In: a schedule and a ``Configuration``. Out: steps in the journal, or a ``ScheduleError``
before the first step. Lowest room: imports core only.
"""
