"""What is set right of Megatron-Core is still wrong in it: a test that fails says that the repair can go."""

from __future__ import annotations

import inspect

from slapo_megatron.cpu_mode import cpu_mode
from slapo_megatron.repairs import repaired


def test_a_save_still_starts_a_process_of_its_own_and_not_inside() -> None:
    with cpu_mode():
        from megatron.core.dist_checkpointing.strategies import filesystem_async
    assert "Manager" in inspect.getsource(filesystem_async._get_write_results_queue), "repairs.py can go"
    with repaired():
        assert type(filesystem_async._get_write_results_queue()).__module__ == "queue"
    assert filesystem_async._results_queue is None
