"""Train a small GPT-2 for some steps, a share of its blocks checkpointed, and print the throughput as a line of JSON."""

import argparse
import json
import resource
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import slapo


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=args.layers, n_embd=args.hidden, n_head=4, n_positions=args.seq_len, vocab_size=256, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = scheduled(GPT2LMHeadModel(config), args.gradient_checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(config.vocab_size, (args.batch_size, args.seq_len))
    step(model, optimizer, ids)  # memory is allocated and threads are started
    start = time.perf_counter()
    losses = [step(model, optimizer, ids) for _ in range(args.steps)]
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024  # of the process, with all its libraries
    print(json.dumps({"throughput": args.batch_size * args.steps / seconds, "loss": losses[-1], "peak_mib": peak}))


def scheduled(model: torch.nn.Module, ckpt_ratio: float) -> torch.nn.Module:
    """Return the model with the first blocks checkpointed, ``ckpt_ratio`` of all."""
    sch = slapo.create_schedule(model)
    blocks = list(sch.select("transformer.h.*"))
    for block in blocks[: round(ckpt_ratio * len(blocks))]:
        block.checkpoint()
    built, _ = slapo.build(sch)
    return built


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--gradient-checkpoint", type=float, required=True, help="share of the blocks that is checkpointed")
    parser.add_argument("--max-batch-size", type=int, help="for the tuner's configuration")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
