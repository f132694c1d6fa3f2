"""Fixtures and hooks for all tests."""

from __future__ import annotations

import gc
import os
from collections import defaultdict

import hypothesis
import pytest
import torch

from slapo_testing import clean_up_with, preload
from slapo_training.engines.open_engines import abandon_stale

torch.set_num_threads(1)
gc.set_threshold(10_000, 10, 10)  # each full collection goes through all tests and all modules of the engines
clean_up_with(abandon_stale)  # engines that a job left open keep threads
if "PYTEST_XDIST_WORKER" in os.environ:  # the whole suite: one test alone imports what it needs
    preload(
        "torch._dynamo",
        "torch.distributed.fsdp",
        "transformers.models.gpt2.modeling_gpt2",
        "transformers.models.llama.modeling_llama",
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "megatron.core",
        "peft",
        "slapo_deepspeed.engine",
        "slapo_megatron.engine",
        "slapo_sharding.planning.derived_plan",
        "slapo_torch.engine",
    )
# the same examples in every run, and no test fails because the machine is busy
hypothesis.settings.register_profile("repository", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repository")


@pytest.fixture(autouse=True)
def same_seed() -> None:
    """Tests do not depend on their order."""
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)  # before ``-m`` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases of tests with many as slow, but for a sample of them, spread evenly."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for found in cases.values():
        marker = found[0].get_closest_marker("sampled")
        assert marker is not None
        kept = {at * len(found) // marker.args[0] for at in range(marker.args[0])}
        for number, item in enumerate(found):
            if len(found) > len(kept) and number not in kept:
                item.add_marker(pytest.mark.slow)
