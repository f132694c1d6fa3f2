"""The files of ``megatron.core.dist_checkpointing``: planned by Megatron, written by torch, also by a thread.

Megatron's own save starts processes to write, and meets in the default group whenever it is done; so its plan, its format and
its checks are used, and what writes is ``torch.distributed.checkpoint``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from slapo_training.engine_checkpoint import bytes_of
from slapo_training.ranks import Ranks
from slapo_training.saving import Buffers, copied, keep

_FILES_OF_A_RANK = 2
"""As many as Megatron writes."""


def planned(state: dict[str, Any], folder: Path, ranks: Ranks, copies: Buffers | None) -> Callable[[Ranks], None]:
    """What writes a sharded state dict, collective over the ranks that it is given. Collective.

    Args:
        state: Changed by Megatron as it is planned.
        folder: Where the files go.
        ranks: All.
        copies: Memory for what this rank is to write as it is now; None to write the tensors as they are when it comes to that.

    Raises:
        BuildError: on every rank: Megatron refuses the state.
    """
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
    from megatron.core.dist_checkpointing.strategies import torch as megatron
    from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

    tensors: dict[Any, torch.Tensor] = {}
    files: dict[str, bytes] = {}

    class Planner(megatron.MCoreSavePlanner):  # type: ignore[misc]
        def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
            return tensors[write_item.index]

    planner, writer = Planner(flatten_state_dict=False), FileSystemWriter(folder, thread_count=_FILES_OF_A_RANK)
    strategy = get_default_save_sharded_strategy()

    def plan() -> SavePlan:
        sharded, common = save_preprocess(state)
        own, *_ = megatron._replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
        planner.set_up_planner(megatron.mcore_to_pyt_state_dict(own), is_coordinator=ranks.place == 0)
        if ranks.place == 0:
            files[COMMON_STATE_FNAME] = bytes_of(common)
        found: SavePlan = planner.create_local_plan()
        return found

    plans = writer.prepare_global_plan(ranks.on_all(plan))
    own = plans[ranks.place]
    metadata = ranks.first(lambda: planner.create_global_plan(plans)[1])

    def copy() -> None:
        for item in own.items:
            tensor: torch.Tensor = megatron.MCoreSavePlanner.resolve_data(planner, item)
            tensors[item.index] = tensor if copies is None else copied(tensor, item.index, copies)
        if copies is not None:
            keep(tensors.keys(), copies)

    def put() -> list[Any]:
        for name, content in files.items():
            (folder / name).write_bytes(content)
        writer.set_up_storage_writer(ranks.place == 0)
        return writer.write_data(own, planner).value()

    def write(meeting: Ranks) -> None:
        everyone = meeting.on_all(put)

        def finish() -> None:
            writer.finish(metadata, everyone)
            save_config(CheckpointingConfig(strategy.backend, strategy.version), str(folder))

        meeting.first(finish)

    ranks.on_all(copy)
    return write
