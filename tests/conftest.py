"""What every test starts from."""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch

from slapo_core.testing import clean_up_with, preload
from slapo_training.stale_engines import abandon_stale

torch.set_num_threads(1)
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
    )
# the same examples in every run, and no test fails because the machine is busy
hypothesis.settings.register_profile("repository", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repository")


@pytest.fixture(autouse=True)
def same_seed() -> None:
    """Tests do not depend on their order."""
    torch.manual_seed(0)
