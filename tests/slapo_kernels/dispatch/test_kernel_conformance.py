"""Every implementation of a kernel that runs on a CPU passes the conformance kit that authors of plugins are given."""

from __future__ import annotations

from typing import Any

import pytest

from slapo_kernels import explain, kernel_names
from slapo_testing.conformance import Check, kernel_checks

# of inputs that are not leaves: torch's compiler asks, and tells nobody but where warnings are errors
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

COMPILED = ("registered", "signature", "values")
"""Checks of compiled implementations; each further circumstance compiles anew."""


def parameters() -> list[Any]:
    """Checks of all implementations; those that compile are marked slow."""
    found = []
    for kernel in kernel_names():
        for name in [each.implementation.name for each in explain(kernel, "cpu") if each.lacks is None]:
            checks = [each for each in kernel_checks(kernel, name) if name != "inductor" or each.name in COMPILED]
            for number, check in enumerate(checks):
                slow = name == "inductor" and check.name in ("some call", "values")
                found.append(pytest.param(check, marks=[pytest.mark.slow] * slow, id=f"{check}-{number}"))
    return found


@pytest.mark.parametrize("check", parameters())
def test_our_kernels_conform(check: Check) -> None:
    check()


def test_no_kernel_is_missing() -> None:
    checked = {check.owner for (check,) in (each.values for each in parameters()) if check.example is not None}
    assert {owner.partition("=")[0] for owner in checked} == set(kernel_names())
    assert {f"{kernel}=eager" for kernel in kernel_names()} <= checked
