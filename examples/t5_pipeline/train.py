"""T5 by a classic schedule: traced to its blocks, cut four times, its ties analysed, its five stages trained by an engine.

torchrun --standalone --nproc-per-node 5 train.py --target torch
torchrun --standalone --nproc-per-node 5 train.py --target megatron
"""

from __future__ import annotations

import argparse
import copy
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import T5Config, T5ForConditionalGeneration

import slapo

CUTS = ("encoder.block.1", "encoder", "decoder.block.0", "decoder.block.2")
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def schedule(model: nn.Module, batch: dict[str, torch.Tensor], mesh: DeviceMesh | None = None) -> slapo.Schedule:
    """Return the schedule of a T5, traced to the level of its blocks and cut there."""
    sch = slapo.create_schedule(model, mesh=mesh, example_inputs=batch)
    sch.trace_until(["encoder.block", "decoder.block"])
    for path in CUTS:
        sch[path].cut_pipeline_stage()
    return sch


def analysis(staged: slapo.Schedule) -> list[str]:
    """Return what each stage takes and has to keep alive, and which weights several stages share."""
    arguments, names, liveness = slapo.pipeline.analyze_pipeline_module(staged.mod)
    lines = [f"{names[stage]} takes {', '.join(arguments[stage])}; alive: {', '.join(liveness[stage])}" for stage in names]
    for places in slapo.analyze_tie_weights(staged.mod, True).values():
        lines.append(
            "tied: " + ", ".join(f"{name} in stage {stage}" for name, stage in sorted(places, key=lambda place: place[::-1]))
        )
    return lines


def make_model() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 3, "num_decoder_layers": 4, "vocab_size": 64}
    return T5ForConditionalGeneration(
        T5Config(**sizes, dropout_rate=0.0, use_cache=False, pad_token_id=0, decoder_start_token_id=0)
    )


def make_batch(rows: int = 10) -> dict[str, torch.Tensor]:
    """Random words, of which those behind the end of a row are padding."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 64, (rows, 12), generator=generator)
    mask = (torch.arange(12) < torch.arange(3, 3 + rows)[:, None]).long()
    labels = torch.randint(1, 64, (rows, 10), generator=generator)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", choices=["torch", "megatron", "deepspeed"], default="torch")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1, 1), mesh_dim_names=("pp", "dp", "tp"))
    model, batch = make_model(), make_batch()
    reference = copy.deepcopy(model)
    sch = schedule(model, batch, mesh)
    staged = slapo.pipeline.generate_pipeline_partition(sch)
    engine = slapo.build(staged, target=args.target, optimizer=ADAMW, microbatches=len(CUTS) + 1)
    losses = [engine.train_batch(**batch).item() for _ in range(args.steps)]
    engine.close()
    if dist.get_rank() == 0:
        print(f"cuts behind {', '.join(sch.metadata.primitives['cut_pipeline_stage'])}")
        print(*analysis(staged), sep="\n")
        report(losses, plain_losses(reference, batch, args.steps))
    dist.destroy_process_group()


def report(losses: list[float], expected: list[float]) -> None:
    for step, (loss, plain) in enumerate(zip(losses, expected, strict=True)):
        print(f"step {step}: loss {loss:.4f}, unmodified {plain:.4f}")
    print(f"largest difference: {max(abs(a - b) for a, b in zip(losses, expected, strict=True)):.1e}")


if __name__ == "__main__":
    main()
