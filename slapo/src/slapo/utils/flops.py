"""FLOPs of decoder models, by formula."""

from __future__ import annotations


def decoder_flops(
    batch_size: int,
    seq_len: int,
    num_layers: int,
    hidden_size: int,
    vocab_size: int,
    *,
    intermediate_size: int | None = None,
    gated_mlp: bool = False,
    kv_share: float = 1.0,
    ckpt_ratio: float = 0.0,
    backward: bool = True,
) -> int:
    """Return the FLOPs of one iteration of a decoder with a language-model head, counting matrix products only.

    A multiply-add counts as two. Attention counts the whole sequence for each position, as is usual. The backward counts twice
    the forward.

    Args:
        batch_size: Sequences per iteration, over all ranks.
        seq_len: Length of each sequence.
        num_layers: Number of layers of attention and MLP.
        hidden_size: Width of the hidden states.
        vocab_size: Rows of the head.
        intermediate_size: Width inside the MLP; default: four times ``hidden_size``.
        gated_mlp: Whether the MLP has three matrices, as in Llama, rather than two, as in GPT-2.
        kv_share: Key heads per query head: 1/4 if four query heads share one.
        ckpt_ratio: Share of the layers that are recomputed in the backward.
        backward: Whether the iteration has a backward; False for an evaluation.

    Raises:
        ValueError: a size below 1, or a share outside 0 to 1.
    """
    inner = 4 * hidden_size if intermediate_size is None else intermediate_size
    sizes = {"batch_size": batch_size, "seq_len": seq_len, "num_layers": num_layers, "hidden_size": hidden_size}
    for name, size in {**sizes, "vocab_size": vocab_size, "intermediate_size": inner}.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; give a size of at least 1")
    for name, share in {"kv_share": kv_share, "ckpt_ratio": ckpt_ratio}.items():
        if not 0 <= share <= 1:
            raise ValueError(f"{name} is {share}; give a share from 0 to 1")
    tokens = batch_size * seq_len
    weights = (2 + 2 * kv_share) * hidden_size**2 + (3 if gated_mlp else 2) * hidden_size * inner
    layers = num_layers * 2 * tokens * (weights + 2 * seq_len * hidden_size)
    head = 2 * tokens * hidden_size * vocab_size
    return round(3 * (layers + head) + ckpt_ratio * layers if backward else layers + head)
