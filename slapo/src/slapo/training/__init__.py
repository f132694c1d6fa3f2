"""What ``slapo train`` does: read bytes, build a model, schedule it, start the ranks, train, compare.

``import slapo`` never comes here, so that these modules may import Transformers and rich.
"""
