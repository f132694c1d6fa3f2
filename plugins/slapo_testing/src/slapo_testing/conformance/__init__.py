"""Conformance kit: checks that a primitive, dialect, kernel or sharding rule keeps the contracts of its kind, on examples.

Example:
    >>> EXAMPLES = [Example(model=lambda: nn.Linear(2, 2), inputs=(torch.randn(3, 2),), changes=("requires_grad",))]
    >>> @pytest.mark.parametrize("check", primitive_checks("freeze", EXAMPLES), ids=str)
    ... def test_freeze_conforms(check):
    ...     check()

The models of an example are built several times from one seed, in evaluation and in training mode. Expected results are
computed before the step. They are compared in several circumstances: a second run, accumulated gradients, the other mode, other
weights, a step of SGD.

``model_snapshot`` compares everything that the model's modules reach, objects by identity and values by bits, to detect changes
by a refused, failed or undone step. ``transactions`` makes a step fail midway: one of the Python calls from the primitive's own
folder raises. An example declares what its step changes on purpose, and the step must then change it.
Combinations may be refused, in one sentence and without a change. Examples on several ranks run each check as a job of its own.
"""

from __future__ import annotations

from .checks import Check, check_dialect, check_primitive, dialect_checks, primitive_checks
from .examples.case import ConformanceError
from .examples.examples import EngineExample, Example, KernelExample, Refused, RefusedOption, RuleExample
from .kernels import check_kernel, kernel_checks
from .sharding_rules import check_sharding_rule, sharding_rule_checks

__all__ = [
    "Check",
    "ConformanceError",
    "EngineExample",
    "Example",
    "KernelExample",
    "Refused",
    "RefusedOption",
    "RuleExample",
    "check_dialect",
    "check_kernel",
    "check_primitive",
    "check_sharding_rule",
    "dialect_checks",
    "kernel_checks",
    "primitive_checks",
    "sharding_rule_checks",
]
