"""Optimizers whose update of one element depends on others, where ranks hold parts of a parameter.

The probe finds out, by trying, what an optimizer's update depends on. Where parts would change it, the optimizer steps
stand-ins: whole parameters, each on its owner among the ranks that hold parts of it. Gradients and values are gathered to the
owner for a step, and the new values go back. What enters is an optimizer of a rank's local parameters and where these lie in
the whole ones (``pieces``); what leaves is an optimizer of the same local parameters. It imports ``slapo_core`` and
``slapo_training`` alone.
"""
