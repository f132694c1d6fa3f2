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

    A sharded output stays so for the next layer or wants ``sync("fwd_post", "all_gather", axis=-1)``, and the module
    ``sync("bwd_post", "all_reduce")``; a partial output wants ``sync("fwd_post", "all_reduce")``, which then also adds the
    bias, once. ``build`` checks that these are there. The bias follows a weight that is split along the output, sizes such as
    ``out_features`` turn local. A tied parameter is split once, for all who hold it; naming the other holder in the same way
    afterwards changes nothing.

    So do the counts of heads of an attention module around a projection, where both have names that Transformers uses:
    ``num_heads``, ``num_attention_heads``, ``n_heads`` or ``n_head``, and ``query``, ``q_proj``, ``q`` and their like. Of
    another module, set them yourself, ``sch["attn"].mod.heads //= 2`` on two ranks, or take ``tensor_parallel()``, which
    finds them by the forward; a schedule that is saved does not have what you set.

    Where the ranks divide the query heads of an attention but not its fewer key and value heads, each rank holds those that
    its queries need: some are held in copies, whose gradients are summed, so that they stay equal.

    Args:
        name: Parameter of this module, or several, e.g. ``"weight"`` or ``["weight", "bias"]``.
        axis: Dimension to split; of the one with most dimensions, when several are named.
        blocks: Parts of a fused projection (q, k and v), each split for itself: how many equal ones, or their sizes. Default:
            one block; for ``c_attn`` of GPT-2 and other attention that keeps ``split_size``, blocks of that size.
        copied: Places among the blocks of those that every rank holds whole, as the keys and values of one head that serves all
            query heads: ``blocks=[512, 64, 64], copied=[1, 2]``. Their gradients are summed, so that they stay equal.
        gathered: The output is gathered at once (``sync("fwd_post", "all_gather", axis=-1)``), so heads and fused blocks may
            be split anyhow, and the attention module goes on counting all heads.
        uneven: A size that the group size does not divide is dealt out all the same, as by ``torch.chunk``: the last ranks get
            less, or nothing. A column and a row layer dealt out so fit together.

    Raises:
        ScheduleError: no such parameter, axis out of range, no rule for the module, already sharded, not divisible by the
            group size, heads that would be split, a fused projection whose blocks are not known, or a hook or forward of
            the module's own.
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
        with _untraced(schedule):
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
    ) -> None:
        """Carry it out."""
        with _untraced(schedule) as is_other:
            step = schedule.checked
            if is_other:
                step = ShardPlanner(schedule, name, axis, blocks, copied=copied, gathered=gathered, uneven=uneven).plan()
            apply_step(schedule, step)


@contextmanager
def _untraced(schedule: Schedule) -> Iterator[bool]:
    """Let the module, and the one around it, be what they were before they were traced; whether they were."""
    is_traced = any(at is not None and isinstance(at.mod, fx.GraphModule) for at in (schedule, schedule.parent))
    with as_untraced(schedule) if is_traced else nullcontext():
        yield is_traced
