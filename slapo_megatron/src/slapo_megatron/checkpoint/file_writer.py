"""Files of ``megatron.core.dist_checkpointing``: planned by Megatron, written by torch, optionally in a thread.

Megatron's own save starts writer processes and synchronizes in the default group when it is done. Therefore only its
plan, format and checks are used, and ``torch.distributed.checkpoint`` writes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from slapo_training.checkpoint import Buffers, copy_to_cpu, drop_other_buffers
from slapo_training.distributed import Ranks
from slapo_training.engines import bytes_of

from ..process_state import _megatron_private as private

_FILES_OF_A_RANK = 2
"""Number of files that each rank writes, the same as Megatron's."""
_Tensors = dict[tuple[str, tuple[int, ...]], torch.Tensor]
"""Tensors by their name in the checkpoint and their offset in the whole tensor."""


class MegatronFiles:
    """Writer of an engine's files. It reuses its plan while the same tensors are written."""

    def __init__(self) -> None:
        self._facts: list[Any] | None = None
        self._plan = SavePlan([])
        self._metadata = Metadata({})

    def prepare_write(
        self, state: dict[str, Any], folder: Path, ranks: Ranks, copies: Buffers | None
    ) -> Callable[[Ranks], None]:
        """Return a function that writes a sharded state dict; it takes the ranks to synchronize with. Both are collective.

        Megatron changes ``state`` while planning. ``copies`` are buffers for this rank's tensors, to write their values of
        this moment; with None the values at the time of writing are written.

        Raises:
            BuildError: on every rank: Megatron refuses the state.
        """
        found: dict[str, Any] = {}
        tensors: _Tensors = {}
        files: dict[str, bytes] = {}

        def look() -> bool:
            found["sharded"], found["common"] = private.split_state(state)
            own = private.sharded_tensors(found["sharded"])
            tensors.update({(each.key, each.global_offset): each.data for each, is_saved in own if is_saved})
            found["facts"] = [(each.key, each.global_offset, each.local_shape, each.dtype, each.replica_id) for each, _ in own]
            if ranks.index == 0:
                files[private.common_file()] = bytes_of(found["common"])
            return bool(found["facts"] == self._facts)

        def copy() -> None:
            if copies is not None:
                drop_other_buffers(tensors.keys(), copies)
                tensors.update({key: copy_to_cpu(tensor.detach(), key, copies) for key, tensor in tensors.items()})

        if not all(ranks.run_on_all(look)):
            self._facts = None
            self._make_plan(found["sharded"], found["common"], ranks)
            self._facts = found["facts"]
        ranks.run_on_all(copy)
        plan, metadata = self._plan, self._metadata
        writer, write_format = FileSystemWriter(folder, thread_count=_FILES_OF_A_RANK), private.format_writer()

        def put() -> list[Any]:
            for name, content in files.items():
                (folder / name).write_bytes(content)
            writer.set_up_storage_writer(ranks.index == 0)
            return writer.write_data(plan, _Planner(tensors)).value()

        def write(meeting: Ranks) -> None:
            everyone = meeting.run_on_all(put)

            def finish() -> None:
                writer.finish(metadata, everyone)
                write_format(folder)

            meeting.run_on_first(finish)

        return write

    def _make_plan(self, sharded: dict[str, Any], common: dict[str, Any], ranks: Ranks) -> None:
        """Make this rank's plan, and the metadata of all files. Collective."""
        planner = private.save_planner()
        own = ranks.run_on_all(lambda: private.local_plan(planner, sharded, common, ranks.index == 0))
        plans = FileSystemWriter(".").prepare_global_plan(own)
        self._plan = plans[ranks.index]
        self._metadata = ranks.run_on_first(lambda: planner.create_global_plan(plans)[1])


class _Planner(DefaultSavePlanner):
    """Save planner that returns the tensors to write."""

    def __init__(self, tensors: _Tensors) -> None:
        super().__init__()
        self._tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        index = write_item.index
        assert index.offset is not None
        return self._tensors[index.fqn, tuple(index.offset)]
