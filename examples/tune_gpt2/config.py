"""The tuning space of ``train.py``: the batch size, and the share of the blocks that is checkpointed.

    python -m slapo.autotune.tune --config config.py --db results.json --error-stop symbol \\
        train.py --layers 4 --batch-size batch_size --gradient-checkpoint ckpt_ratio
"""


def get_bs_range(args):
    """Smallest batch size, largest, and the step between them; ``--max-batch-size`` of the script sets the largest."""
    return 8, int(args.get("max_batch_size", 32)), 8


def update_space(args, space):
    """More of the blocks are checkpointed first, which takes the least memory; large batches have finer choices."""
    min_bs, max_bs, step = get_bs_range(args)
    batch_size = space.create_symbol("batch_size", range(min_bs, max_bs + 1, step))
    ckpt_ratio_cand = [1.0]
    if batch_size >= 16:
        ckpt_ratio_cand += [0.67, 0.34]
    space.create_symbol("ckpt_ratio", [*ckpt_ratio_cand, 0.0])
    return space
