"""Behaviour that the other libraries' engines share through one base class."""

from __future__ import annotations

import pytest

from tests.engines import frozen_after_build


@pytest.mark.parametrize("target", ["deepspeed", "megatron"])
def test_what_is_frozen_after_build_is_refused_in_training_alone(target: str) -> None:
    refusal, evaluated, after = frozen_after_build(target)
    assert refusal.startswith(f"BuildError: '1.bias' was frozen after build, which the optimizer of target {target!r} does not")
    assert (evaluated, after) == ("no error", "no error")
