"""The CPU mode answers Megatron alone, leaves nothing behind, and is refused where there is CUDA."""

from __future__ import annotations

import types

import pytest
import torch

from slapo_core import BuildError
from slapo_megatron.process_state.cpu_mode import cpu_mode, without_mode
from tests.slapo_sharding.logged_warnings import warnings_told

NAMES = ("current_device", "synchronize", "empty_cache", "get_rng_state", "set_rng_state", "manual_seed")


def ask() -> tuple[object, ...]:
    made = torch.zeros(2, device="cuda")
    moved = made.to("cuda:0").cuda()
    torch.cuda.synchronize()
    return torch.cuda.current_device(), made.device, moved.device, made.type(), made.bfloat16().type()


ASK = types.FunctionType(ask.__code__, {"__name__": "megatron.of_a_test", "torch": torch})
"""The same, as if it were in one of Megatron's files."""


def test_megatron_gets_the_cpu_and_nobody_else() -> None:
    with cpu_mode(), cpu_mode():
        cpu = torch.device("cpu")
        assert ASK() == (cpu, cpu, cpu, "torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor")
        assert torch.zeros(2).type() == "torch.FloatTensor"
        with pytest.raises((AssertionError, RuntimeError), match="CUDA|NVIDIA"):
            ask()
        with pytest.raises((AssertionError, RuntimeError), match="CUDA|NVIDIA"):
            torch.cuda.current_device()


def test_a_users_model_runs_without_it_and_megatron_with_it_again() -> None:
    modes = torch.overrides._get_current_function_mode_stack

    def fail() -> None:
        with without_mode():
            assert len(modes()) == 0
            raise KeyError("within")

    with cpu_mode():
        with pytest.raises(KeyError):
            fail()
        assert len(modes()) == 1
        assert ASK()[1] == torch.device("cpu")
    with without_mode():
        assert len(modes()) == 0


def test_nothing_of_it_is_left() -> None:
    with cpu_mode():  # which imports it
        import megatron.core.tensor_parallel.random as megatron_random
    owners = [(torch.cuda, name) for name in NAMES] + [(megatron_random, "_get_cuda_rng_state")]
    before = [getattr(owner, name) for owner, name in owners]

    def fail() -> None:
        with cpu_mode():
            assert all(getattr(owner, name) is not was for (owner, name), was in zip(owners, before, strict=True))
            raise KeyError("within")

    with pytest.raises(KeyError):
        fail()
    assert [getattr(owner, name) for owner, name in owners] == before
    assert len(torch.overrides._get_current_function_mode_stack()) == 0


def test_where_there_is_cuda_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(BuildError, match="CPU mode of target 'megatron' is for machines without CUDA"), cpu_mode():
        raise AssertionError("not reached")


def test_it_says_so_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from slapo_megatron.process_state import cpu_mode as module

    monkeypatch.setattr(module._Depth, "told", False)
    with warnings_told() as told:
        for _ in range(2):
            with cpu_mode():
                pass
    assert len(told) == 1
    assert "megatron-core runs in Slapo's CPU mode" in str(told[0])
