"""``shard``: split parameters of a module over the tensor-parallel group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from torch import fx

from slapo_core import Primitive, Schedule
from slapo_tracing.graphs import as_untraced

from .splitting.shard_planner import Blocks, ShardPlanner
from .splitting.shard_step import ShardStep, apply_step


class ShardPrimitive(Primitive):
    """Split parameters along ``axis``, so that each rank of the tensor-parallel group keeps one piece.

    Rewrite, over n ranks:
        Linear(weight[out, in], bias[out])  -- axis 0 -->  Linear(weight[out / n, in], bias[out / n]): output sharded
        Linear(weight[out, in], bias[out])  -- axis 1 -->  Linear(weight[out, in / n], bias[out]): output partial
        Embedding(weight[rows, width])      -- axis 0 -->  Embedding(weight[rows / n, width]): output partial
        Embedding(weight[rows, width])      -- axis 1 -->  Embedding(weight[rows, width / n]): output sharded
        Conv1D(weight[in, out])                            as Linear, with the axes swapped

    A sharded output stays sharded for the next layer, or needs ``sync("fwd_post", "all_gather", axis=-1)``. Its module needs
    ``sync("bwd_post", "all_reduce")``. A partial output needs ``sync("fwd_post", "all_reduce")``, which then also adds the
    bias, once. ``build`` checks that these syncs are there. The bias is split together with a weight that is split along the
    output, and sizes such as ``out_features`` become local. A tied parameter is split once, for all modules that hold it;
    sharding it again through another holder in the same way changes nothing.

    Head counts of the attention module around a projection become local too, where both have names that Transformers uses:
    ``num_heads``, ``num_attention_heads``, ``n_heads`` or ``n_head``, and ``query``, ``q_proj``, ``q`` and the like. For
    another module, set them yourself (``sch["attn"].mod.heads //= 2`` on two ranks), or use ``tensor_parallel()``, which
    finds them from the forward. A saved schedule does not contain what you set.

    If the ranks divide the query heads of an attention, but not its fewer key and value heads, each rank holds the key heads
    that its queries need. Some are then replicated on several ranks; their gradients are summed, so that they stay equal.

    Args:
        name: Parameter of this module, or several, e.g. ``"weight"`` or ``["weight", "bias"]``.
        axis: Dimension to split; if several parameters are named, of the one with most dimensions.
        blocks: Blocks of a fused projection (q, k and v), each of which is split: the number of equal blocks, or their sizes.
            Default: one block; for ``c_attn`` of GPT-2 and other attention with ``split_size``, blocks of that size.
        copied: Indices of the blocks that every rank replicates, such as the keys and values of a single head that serves all
            query heads: ``blocks=[512, 64, 64], copied=[1, 2]``. Their gradients are summed, so that they stay equal.
        gathered: Say that the output is gathered at once (``sync("fwd_post", "all_gather", axis=-1)``). Heads and fused blocks
            may then be split at any place, and the attention module still counts all heads.
        uneven: Split a size that the group size does not divide, as ``torch.chunk`` does: the last ranks get less, or nothing.
            A column-parallel and a row-parallel layer that are split this way fit together.

    Raises:
        ScheduleError: no such parameter, axis out of range, no rule for the module, already sharded, not divisible by the
            group size, heads that would be split, a fused projection whose blocks are not known, or a module with its own
            hook or forward.
    """

    name = "shard"
    scope = "module"

    @staticmethod
    def check(
        schedule: Schedule,
        name: str | Sequence[str],
        axis: int,
        blocks: Blocks = None,
        *,
        copied: Sequence[int] = (),
        gathered: bool = False,
        uneven: bool = False,
    ) -> ShardStep:
        """Plan the step."""
        with _untraced_module(schedule):
            return ShardPlanner(schedule, name, axis, blocks, copied=copied, gathered=gathered, uneven=uneven).plan()

    @staticmethod
    def apply(
        schedule: Schedule,
        name: str | Sequence[str],
        axis: int,
        blocks: Blocks = None,
        *,
        copied: Sequence[int] = (),
        gathered: bool = False,
        uneven: bool = False,
        checked: ShardStep,
    ) -> None:
        """Apply the planned step."""
        with _untraced_module(schedule) as was_traced:
            if was_traced:  # the step was planned for modules of another ``as_untraced`` block
                checked = ShardPlanner(schedule, name, axis, blocks, copied=copied, gathered=gathered, uneven=uneven).plan()
            apply_step(schedule, checked)


@contextmanager
def _untraced_module(schedule: Schedule) -> Iterator[bool]:
    """Put back the untraced module and its parent in the block, and yield whether one of them was traced."""
    is_traced = any(at is not None and isinstance(at.mod, fx.GraphModule) for at in (schedule, schedule.parent))
    with as_untraced(schedule) if is_traced else nullcontext():
        yield is_traced
