"""Training of ``slapo train`` and verification of ``slapo verify``: corpus, model, schedule, the work of each rank,
and the reference run. In: settings. Out: a ``RunRecord`` or a verdict. May import ``launch``, ``report`` and
``run_data``; ``import slapo`` never comes here, so these modules may import Transformers and rich.
"""
