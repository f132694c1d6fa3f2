"""What every test starts from."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_seed() -> None:
    """Tests do not depend on their order."""
    torch.manual_seed(0)
