"""Seeds and random states."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from slapo_core import (
    MODEL_PARALLEL_RNG,
    RNGTracker,
    get_cuda_rng_tracker,
    is_random_seed_set,
    rng_state,
    set_random_seed,
    set_rng_state,
)


@pytest.fixture
def tracker() -> RNGTracker:
    set_random_seed(7, tp_rank=1)
    return get_cuda_rng_tracker()


def test_seed_is_kept_when_no_rank_enters_it():
    assert set_random_seed(11) == 11
    assert set_random_seed() == 2013
    assert is_random_seed_set()


def test_same_seed_gives_same_numbers():
    set_random_seed(3, dp_rank=1)
    first = (torch.rand(3).tolist(), random.random())
    set_random_seed(3, dp_rank=1)
    assert (torch.rand(3).tolist(), random.random()) == first


def test_correctness_12_seeds_of_different_places_never_collide():
    places = list(itertools.product(range(24), range(12)))
    seeds = {set_random_seed(5, dp_rank=dp, pp_rank=pp) for dp, pp in places}
    assert len(seeds) == len(places)
    assert set_random_seed(5, dp_rank=10, pp_rank=0) != set_random_seed(5, dp_rank=0, pp_rank=1)


def test_correctness_12_tp_ranks_agree_outside_a_fork_and_differ_inside():
    def draw(tp_rank: int) -> tuple[list[float], list[float]]:
        set_random_seed(5, dp_rank=0, tp_rank=tp_rank)
        with get_cuda_rng_tracker().fork():
            inside = torch.rand(4).tolist()
        return torch.rand(4).tolist(), inside

    (outside_0, inside_0), (outside_1, inside_1) = draw(0), draw(1)
    assert outside_0 == outside_1
    assert inside_0 != inside_1
    assert inside_0 != outside_0


def test_always_enable_tp_seed_differs_outside_too():
    assert set_random_seed(5, tp_rank=0, always_enable_tp_seed=True) != set_random_seed(
        5, tp_rank=1, always_enable_tp_seed=True
    )
    assert set_random_seed(5, tp_rank=0) == set_random_seed(5, tp_rank=1)


def test_fork_leaves_the_outer_state_and_advances_its_own(tracker):
    before = torch.get_rng_state()
    with tracker.fork():
        first = torch.rand(4)
    assert torch.equal(torch.get_rng_state(), before)
    with tracker.fork():
        second = torch.rand(4)
    assert not torch.equal(first, second)


def test_fork_restores_when_the_block_raises(tracker):
    def fails() -> None:
        with tracker.fork():
            torch.rand(4)
            raise RuntimeError("inside")

    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="inside"):
        fails()
    assert torch.equal(torch.get_rng_state(), before)


def test_nested_fork_of_one_name_does_not_repeat_numbers(tracker):
    with tracker.fork():
        first = torch.rand(4)
        with tracker.fork():
            second = torch.rand(4)
        third = torch.rand(4)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


def test_fork_of_a_name_below_another_is_refused(tracker):
    tracker.add("other", 1)
    with tracker.fork(), tracker.fork("other"), pytest.raises(ValueError, match="forked again inside a fork of 'other'"):
        tracker.fork().__enter__()


def test_outside_of_a_fork_uses_and_advances_the_outer_state(tracker):
    state = rng_state()
    expected = torch.rand(8)
    set_rng_state(state)
    with tracker.fork():
        inner = torch.rand(4)
        with tracker.outer_state():
            first = torch.rand(8)[:4]
        after = torch.rand(4)
    set_rng_state(state)
    with tracker.fork():
        assert torch.equal(torch.cat([torch.rand(4), torch.rand(4)]), torch.cat([inner, after]))
    assert torch.equal(first, expected[:4])


def test_unknown_name_says_what_to_call(tracker):
    with pytest.raises(KeyError, match="call set_random_seed"), tracker.fork("nobody"):
        pass


def test_a_name_or_seed_twice_is_refused(tracker):
    with pytest.raises(ValueError, match="exists already"):
        tracker.add(MODEL_PARALLEL_RNG, 99)
    tracker.add("other", 1)
    with pytest.raises(ValueError, match="seed 1 is taken"):
        tracker.add("third", 1)


def test_get_and_set_states_go_back(tracker):
    states = tracker.get_states()
    with tracker.fork():
        first = torch.rand(4)
    with tracker.fork():
        second = torch.rand(4)
    tracker.set_states(states)
    with tracker.fork():
        assert torch.equal(torch.rand(4), first)
    with tracker.fork():
        assert torch.equal(torch.rand(4), second)
    with pytest.raises(KeyError, match="no random state 'nobody'"):
        tracker.set_states({"nobody": {}})


def test_correctness_12_a_recompute_inside_a_fork_sees_the_same_masks(tracker):
    def region() -> torch.Tensor:
        sharded = torch.rand(4)
        with tracker.outer_state():
            replicated = torch.rand(4)
        with tracker.fork():
            return torch.stack([sharded, replicated, torch.rand(4)])

    with tracker.fork():
        saved = rng_state()
        first = region()
    here = rng_state()
    set_rng_state(saved)
    again = region()
    set_rng_state(here)
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), here.devices["cpu"])
    assert not torch.equal(torch.rand(4), again[1])
