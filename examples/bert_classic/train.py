"""BERT by a classic schedule: traced, rewritten, fused, sharded and checkpointed, verified at each step, trained by DeepSpeed.

torchrun --standalone --nproc-per-node 2 train.py
"""

from __future__ import annotations

import copy
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM

import slapo

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH = 3, 32, 4, 64, 16
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


class Projections(slapo.Pattern):
    """The three projections of an attention, which have one input."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (slapo.ModulePattern(name) for name in ("query", "key", "value"))

    def forward(self, hidden_states):
        return self.query(hidden_states), self.key(hidden_states), self.value(hidden_states)


class FusedQKV(nn.Module):
    """The three as one product. The rows of a head lie together, so that a rank with a part of them has whole heads."""

    def __init__(self, query: nn.Linear, key: nn.Linear, value: nn.Linear, heads: int) -> None:
        super().__init__()
        self.head_size = query.out_features // heads
        self.fused_linear = nn.Linear(query.in_features, 3 * query.out_features)
        with torch.no_grad():
            for name, parameter in self.fused_linear.named_parameters():
                parts = [getattr(each, name).unflatten(0, (heads, -1)) for each in (query, key, value)]
                parameter.copy_(torch.stack(parts, dim=1).flatten(0, 2))

    def forward(self, hidden_states):
        heads = self.fused_linear(hidden_states).unflatten(-1, (-1, 3, self.head_size))
        return tuple(each.flatten(-2) for each in heads.unbind(-2))


class CoreAttention(slapo.Pattern):
    """Scores, softmax and values, as Transformers calls them."""

    def forward(self, query, key, value, mask, scale):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=0.0, scale=scale, is_causal=False)


class EfficientAttention(nn.Module):
    """A stand-in for a kernel of one's own."""

    def forward(self, query, key, value, mask, scale):
        scores = (query * scale) @ key.transpose(-1, -2)
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1) @ value


def schedule(model: nn.Module, batch: dict[str, torch.Tensor], mesh: DeviceMesh | None = None) -> slapo.Schedule:
    """Return the schedule of a BERT, each part of it verified."""
    sch = slapo.create_schedule(model, mesh=mesh, example_inputs=batch)
    layers = [sch[f"bert.encoder.layer.{number}"] for number in range(model.config.num_hidden_layers)]
    with slapo.Verify(sch, example_inputs=batch):
        for layer in layers:
            rewrite_attention(layer["attention.self"], model.config.num_attention_heads)
    with slapo.Verify(sch, example_inputs=batch):
        for layer in layers:
            fuse_dropout_add(layer["attention.output"])
            fuse_dropout_add(layer["output"])
    with slapo.Verify(sch, example_inputs=batch):
        for layer in layers:
            shard_layer(layer)
        shard_vocabulary(sch)
    for layer in layers[::2]:
        layer.checkpoint()
    return sch


def rewrite_attention(attention: slapo.Schedule, heads: int) -> None:
    """Trace an attention; put one product in the place of its projections, and our own kernel in that of torch's."""
    attention.trace(recursive=False, flatten=True)
    fused = FusedQKV(*(attention[name].mod for name in ("query", "key", "value")), heads)
    attention.replace(fused, attention.find(Projections()), name="qkv")
    attention.replace(EfficientAttention(), attention.find(CoreAttention()))


def fuse_dropout_add(output: slapo.Schedule) -> None:
    """Compile the dropout behind a sublayer and the sum with its input as one call."""
    output.trace(recursive=False, flatten=True)
    found = output.find(lambda x, residual: slapo.call_module("dropout", x) + residual)
    output.fuse(found, compiler="TorchScript", name="dropout_add")


def shard_layer(layer: slapo.Schedule) -> None:
    """Split a layer over the tensor-parallel group: heads of the attention, width of the MLP."""
    for column in ("attention.self.qkv.fused_linear", "intermediate.dense"):
        layer[column].shard(["weight", "bias"], axis=0)
        layer[column].sync(mode="bwd_post", sync_op_or_fn="all_reduce")
    for row in ("attention.output.dense", "output.dense"):
        layer[row].shard("weight", axis=1)
        layer[row].sync(mode="fwd_post", sync_op_or_fn="all_reduce")


def shard_vocabulary(sch: slapo.Schedule) -> None:
    """Split the embedding of the words, and with it the decoder that is tied to it."""
    sch["bert.embeddings.word_embeddings"].shard("weight", axis=0)
    sch["bert.embeddings.word_embeddings"].sync(mode="fwd_post", sync_op_or_fn="all_reduce")
    decoder = sch["cls.predictions.decoder"]
    decoder.shard(["weight", "bias"], axis=0)
    decoder.sync(mode="fwd_post", sync_op_or_fn="all_gather", axis=-1)
    decoder.sync(mode="bwd_post", sync_op_or_fn="all_reduce")


def make_model() -> BertForMaskedLM:
    torch.manual_seed(0)
    return BertForMaskedLM(
        BertConfig(
            num_hidden_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS, intermediate_size=4 * WIDTH,
            vocab_size=VOCABULARY, max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def make_batch(rows: int = 8) -> dict[str, torch.Tensor]:
    """Random words, of which those behind the end of a row are padding."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < torch.arange(LENGTH // 2, LENGTH // 2 + rows)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def plain_losses(model: nn.Module, batch: dict[str, torch.Tensor], steps: int) -> list[float]:
    """The unmodified model's losses."""
    optimizer, losses = ADAMW(model.parameters()), []
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(steps: int = 5) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1, 1, dist.get_world_size()), mesh_dim_names=("pp", "dp", "tp"))
    model, batch = make_model(), make_batch()
    reference = copy.deepcopy(model)
    sch = schedule(model, batch, mesh)
    engine = slapo.init_target_engine(
        sch, "deepspeed", optimizer=ADAMW, microbatches=2, config={"zero_optimization": {"stage": 1}}
    )
    losses = [engine.train_batch(**batch).item() for _ in range(steps)]
    engine.close()
    if dist.get_rank() == 0:
        report(sch, losses, plain_losses(reference, batch, steps))
    dist.destroy_process_group()


def report(sch: slapo.Schedule, losses: list[float], expected: list[float]) -> None:
    done = sch.journal
    for name in dict.fromkeys(step.name for step in done.steps):
        print(f"{name}: {sum(step.name == name for step in done.steps)} steps")
    for step, (loss, plain) in enumerate(zip(losses, expected, strict=True)):
        print(f"step {step}: loss {loss:.4f}, unmodified {plain:.4f}")
    print(f"largest difference: {max(abs(a - b) for a, b in zip(losses, expected, strict=True)):.1e}")


if __name__ == "__main__":
    main()
