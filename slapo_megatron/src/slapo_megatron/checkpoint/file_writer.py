"""The files of ``megatron.core.dist_checkpointing``: planned by Megatron, written by torch, also by a thread.

Megatron's own save starts processes to write, and meets in the default group whenever it is done; so its plan, its format and
its checks are used, and what writes is ``torch.distributed.checkpoint``.
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
"""As many as Megatron writes."""
_Tensors = dict[tuple[str, tuple[int, ...]], torch.Tensor]
"""By their name in the checkpoint, and where they lie in the whole tensor."""


class MegatronFiles:
    """Those of an engine, planned anew where something else is written than before."""

    def __init__(self) -> None:
        self._facts: list[Any] | None = None
        self._plan = SavePlan([])
        self._metadata = Metadata({})

    def prepared(self, state: dict[str, Any], folder: Path, ranks: Ranks, copies: Buffers | None) -> Callable[[Ranks], None]:
        """What writes a sharded state dict, collective over the ranks that it is given. Collective.

        Args:
            state: Changed by Megatron as it is planned.
            folder: Where the files go.
            ranks: All.
            copies: Memory for what this rank is to write as it is now; None to write the tensors as they are when it comes to
                that.

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
        """What this rank writes of what, and the first one's list of all. Collective."""
        planner = private.save_planner()
        own = ranks.run_on_all(lambda: private.local_plan(planner, sharded, common, ranks.index == 0))
        plans = FileSystemWriter(".").prepare_global_plan(own)
        self._plan = plans[ranks.index]
        self._metadata = ranks.run_on_first(lambda: planner.create_global_plan(plans)[1])


class _Planner(DefaultSavePlanner):
    """Gives what is written its numbers."""

    def __init__(self, tensors: _Tensors) -> None:
        super().__init__()
        self._tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        index = write_item.index
        assert index.offset is not None
        return self._tensors[index.fqn, tuple(index.offset)]
