"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from slapo_core import lazy_names

SCRIPT = """
import sys
import slapo_kernels
assert "slapo_kernels.dispatch" not in sys.modules
from slapo_kernels import choose, eager
from slapo_kernels.dispatch.dispatcher import choose as found
assert choose is found and eager.__name__ == "slapo_kernels.implementations.eager"
"""


def test_a_module_is_imported_when_its_name_is_first_used() -> None:
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_an_unknown_name_is_an_attribute_error_as_of_any_module() -> None:
    with pytest.raises(AttributeError, match="module 'torch.nn' has no attribute 'relu'") as err:
        lazy_names("torch.nn", {"functional": ["gelu"]})("relu")
    assert err.value.name == "relu"
