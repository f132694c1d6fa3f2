"""The conformance kit: point it at a primitive or a dialect, with examples, and it checks what all of them promise.

Example:
    >>> EXAMPLES = [Example(model=lambda: nn.Linear(2, 2), inputs=(torch.randn(3, 2),), changes=("requires_grad",))]
    >>> @pytest.mark.parametrize("check", primitive_checks("freeze", EXAMPLES), ids=str)
    ... def test_freeze_conforms(check):
    ...     check()
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
