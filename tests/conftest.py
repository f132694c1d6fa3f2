"""What every test starts from."""

from __future__ import annotations

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
# the same examples in every run, and no test fails because the machine is busy
hypothesis.settings.register_profile("repository", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repository")


@pytest.fixture(autouse=True)
def same_seed() -> None:
    """Tests do not depend on their order."""
    torch.manual_seed(0)
