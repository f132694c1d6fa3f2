"""Memory and time of recomputing blocks in the backward, on one GPU: ``sch.checkpoint()`` against torch's own by hand.

Run ``make gpu``. GPT-2 124M with every block recomputed, forward and backward under bf16 autocast. The peak is that of one step
over what the model, its gradients and the batch hold before it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu.timing import Sizes, Step, batch_of, check_gradients, gpt2, step_of, table
from slapo_core import build, create_schedule


def ours(model: nn.Module) -> nn.Module:
    sch = create_schedule(model)
    for block in sch.select("transformer.h.*"):
        block.checkpoint()
    return build(sch).module


def by_hand(model: nn.Module) -> nn.Module:
    for block in model.get_submodule("transformer.h").children():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


PLAIN = "nothing recomputed"
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    PLAIN: lambda model: model,
    "`torch.utils.checkpoint` by hand": by_hand,
    "`checkpoint()` of slapo": ours,
}


def steps_of(sizes: Sizes) -> dict[str, Step]:
    """A step of each way.

    Raises:
        AssertionError: a way computes another loss or another gradient than the plain model does.
    """
    plain, batch = gpt2(sizes), batch_of(sizes)
    models = {name: way(copy.deepcopy(plain)) for name, way in WAYS.items()}
    steps: dict[str, Step] = {name: partial(step_of, model, batch, sizes) for name, model in models.items()}
    losses = {name: step() for name, step in steps.items()}
    for name, model in models.items():
        torch.testing.assert_close(losses[name], losses[PLAIN], atol=1e-3, rtol=1e-3)
        check_gradients(model, models[PLAIN], name)
    return steps


def peaks(steps: Mapping[str, Step]) -> str:
    """The table of the memory that a step takes on top of what is there before; each has run once already."""
    found: dict[str, int] = {}
    for name, step in steps.items():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        found[name] = torch.cuda.max_memory_allocated() - before
    lines = [f"| peak of a step | MB | / {PLAIN} |", "|---|---|---|"]
    return "\n".join(lines + [f"| {name} | {size / 1e6:.0f} | {size / found[PLAIN]:.3f} |" for name, size in found.items()])


def main() -> None:
    """Print the tables."""
    sizes = Sizes()
    steps = steps_of(sizes)
    print("\n" + peaks(steps))
    print("\n" + table("GPT-2 124M, forward and backward, bf16", steps, sizes))


if __name__ == "__main__":
    main()
