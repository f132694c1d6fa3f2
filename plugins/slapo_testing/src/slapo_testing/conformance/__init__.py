"""The conformance kit: point it at a primitive or a dialect, with examples, and it checks what all of them promise.

Example:
    >>> EXAMPLES = [Example(model=lambda: nn.Linear(2, 2), inputs=(torch.randn(3, 2),), changes=("requires_grad",))]
    >>> @pytest.mark.parametrize("check", primitive_checks("freeze", EXAMPLES), ids=str)
    ... def test_freeze_conforms(check):
    ...     check()

An example is built several times: fresh models of one seed, in evaluation and in training. What is expected is computed
before the step, and compared in one circumstance after the other: a second run, accumulated gradients, the other mode,
other weights, a step of SGD. ``model_snapshot`` compares everything that the model's modules reach, objects by identity
and values by bits, to tell whether a refused, failed or undone step left something behind. ``failure_injection`` makes
a step fail in the middle: one of the Python calls made by the primitive's own folder raises. What a step changes on
purpose its example declares, and it must then change. Where two things are combined, a refusal in one sentence with
nothing changed is right. Examples on several ranks run each check as a job of its own.
"""

from __future__ import annotations

from .checks import Check, check_dialect, check_primitive, dialect_checks, primitive_checks
from .examples.case import ConformanceError
from .examples.examples import EngineExample, Example, Refused, RefusedOption

__all__ = [
    "Check",
    "ConformanceError",
    "EngineExample",
    "Example",
    "Refused",
    "RefusedOption",
    "check_dialect",
    "check_primitive",
    "dialect_checks",
    "primitive_checks",
]
