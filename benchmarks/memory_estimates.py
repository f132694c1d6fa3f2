"""Memory of training steps: estimates against what real ranks allocate, and what other tools say of the same steps.

Run ``python -m benchmarks.memory_estimates``; it prints a section for ``benchmarks/README.md``. Each model trains on up to four
gloo processes. Steps three to five are measured, and the lowest peak counts: gloo's threads may keep a tensor a moment longer.
The estimate comes from one process with weights on meta.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import slapo_core as slapo
from benchmarks.memory_models import LENGTH, MODELS, ROWS, batch_of
from slapo_plan import estimate, fake_ranks, measure_step
from slapo_testing import run_distributed


class Case(NamedTuple):
    """One model on one layout."""

    model: str
    layout: str
    checkpoints: str = "none"
    optimizer: str = "AdamW"
    precision: str = "fp32"

    @property
    def settings(self) -> str:
        return ", ".join(part for part in (self.optimizer, self.precision) if part not in ("AdamW", "fp32"))


LAYOUTS: dict[str, tuple[tuple[int, int, int], int, dict[str, Any]]] = {
    "one rank": ((1, 1, 1), 0, {}),
    "tp2": ((1, 1, 2), 0, {}),
    "dp2 ddp": ((1, 2, 1), 0, {}),
    "dp2 fsdp": ((1, 2, 1), 0, {"data_parallel": "fsdp"}),
    "pp2 1f1b": ((2, 1, 1), 2, {"microbatches": 4}),
    "pp2 interleaved": ((2, 1, 1), 4, {"microbatches": 4, "pipeline_schedule": "interleaved"}),
    "pp2 zbv": ((2, 1, 1), 4, {"microbatches": 4, "pipeline_schedule": "zbv"}),
    "pp2 dualpipev": ((2, 1, 1), 4, {"microbatches": 4, "pipeline_schedule": "dualpipev"}),
    "tp2 x pp2": ((2, 1, 2), 2, {"microbatches": 4}),
    "tp2 x dp2 fsdp": ((1, 2, 2), 0, {"data_parallel": "fsdp"}),
}
"""Ranks along ``pp``, ``dp`` and ``tp``, stages, and options of ``build``."""


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adafactor": torch.optim.Adafactor,
    "Muon": torch.optim.Muon,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
}
DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d)
CHECKPOINTED = ("GPT-2", "BERT", "Llama", "T5", "ViT")
CASES = [
    *(Case(model, layout) for model in MODELS for layout in ("one rank", "dp2 ddp", "dp2 fsdp")),
    *(Case(model, "dp2 fsdp", policy) for model in CHECKPOINTED for policy in ("all", "matmuls")),
    *(Case(model, "tp2", policy) for model in CHECKPOINTED for policy in ("none", "all", "matmuls")),
    *(Case(model, name) for model in ("GPT-2", "Llama") for name in LAYOUTS if name.startswith("pp2")),
    *(Case(model, "tp2 x pp2", policy) for model in ("GPT-2", "Llama") for policy in ("none", "all")),
    *(Case(model, "tp2 x dp2 fsdp") for model in ("GPT-2", "Llama")),
    *(Case("Llama", layout, optimizer=name) for name in ("Adafactor", "SGD") for layout in ("dp2 ddp", "dp2 fsdp")),
    *(Case("plain, no bias", layout, optimizer="Muon") for layout in ("one rank", "dp2 fsdp")),
    *(
        Case(model, layout, precision="bf16")
        for model in ("GPT-2", "Llama", "U-Net")
        for layout in ("dp2 ddp", "dp2 fsdp", "tp2")
    ),
    *(Case("Llama", "pp2 1f1b", policy, precision="bf16") for policy in ("none", "all")),
]


def schedule(case: Case, mesh: Any, device: str) -> slapo.Schedule:
    with torch.device(device):
        model = MODELS[case.model]()
    for module in model.modules():
        if isinstance(module, DROPOUT):
            module.p = 0.0
    sizes, stages, _ = LAYOUTS[case.layout]
    sch = slapo.create_schedule(model, mesh=mesh, example_inputs=batch_of(case.model, ROWS))
    if sizes[2] > 1:
        sch.tensor_parallel()
    lists = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    for path in lists if case.checkpoints != "none" else ():
        for block in sch.select(f"{path}.*"):
            block.checkpoint(policy=None if case.checkpoints == "all" else case.checkpoints)
    if stages:
        sch.pipeline(stages)
    return sch


def rows_of(case: Case) -> int:
    return ROWS * int(LAYOUTS[case.layout][2].get("microbatches", 1))


def options_of(case: Case) -> dict[str, Any]:
    return {**LAYOUTS[case.layout][2], "optimizer": OPTIMIZERS[case.optimizer], "precision": case.precision}


def measure(rank: int, cases: Sequence[Case]) -> list[int | str]:
    """Return the peak of each case on this rank in bytes, or the reason why it does not run."""
    found: list[int | str] = []
    for case in cases:
        sizes = LAYOUTS[case.layout][0]
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp")) if max(sizes) > 1 else None
        slapo.set_random_seed(0, tp_rank=0 if mesh is None else mesh.get_local_rank("tp"))
        try:
            sch = schedule(case, mesh, "cpu")
            engine = slapo.build(sch, target="torch", check=False, **options_of(case))
            torch.manual_seed(0)
            batch = batch_of(case.model, rows_of(case))
            for _ in range(2):
                engine.train_batch(**batch)
            found.append(min(measure_step(lambda: engine.train_batch(**batch)).peak for _ in range(3)))  # noqa: B023
            engine.close()
        except slapo.SlapoError as err:
            found.append(str(err))
    return found


def estimated(case: Case) -> list[int]:
    """Return the estimated peak of each rank along ``pp``."""
    sizes = LAYOUTS[case.layout][0]
    with fake_ranks(pp=sizes[0], dp=sizes[1], tp=sizes[2]) as mesh:
        found = estimate(schedule(case, mesh, "meta"), batch_of(case.model, rows_of(case)), **options_of(case))
    return [each.memory.peak for each in found.ranks]


def deepspeed_says(case: Case, model: nn.Module) -> int:
    """Return the GPU memory that DeepSpeed's estimators give for model states, without offload."""
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    total = sum(each.numel() for each in model.parameters())
    ranks = max(LAYOUTS[case.layout][0])
    if case.layout == "dp2 fsdp":
        largest = max(sum(each.numel() for each in module.parameters(recurse=False)) for module in model.modules())
        return int(stage3.estimate_zero3_model_states_mem_needs(total, largest, ranks, 1, False, False, False, 1)[1])
    return int(stage_1_and_2.estimate_zero2_model_states_mem_needs(total, ranks, 1, False, 1)[1])


def accelerate_says(model: nn.Module) -> int:
    """Return the memory of training by accelerate's estimate: four times the weights."""
    from accelerate.utils import calculate_maximum_sizes  # type: ignore[import-untyped]

    return int(calculate_maximum_sizes(model)[0] * 4)


def formula_says(case: Case, model: nn.Module) -> int:
    """Return 16 bytes per parameter, and s b h (34 + 5 a s / h) per layer of Korthikanti et al., in fp32 twice."""
    (pp, dp, tp), _, _ = LAYOUTS[case.layout]
    parameters = sum(each.numel() for each in model.parameters())
    states = 16 * parameters / pp / tp / (dp if case.layout == "dp2 fsdp" else 1)
    hidden, heads, layers, length = 64, 4, 4, 17 if case.model == "ViT" else LENGTH
    whole = 2 * length * ROWS * hidden
    per_layer = whole if case.checkpoints != "none" else whole * (10 + (24 + 5 * heads * length / hidden) / tp)
    return int(states + layers * per_layer)


def main() -> None:
    """Print the section."""
    errors: dict[str, list[float]] = {name: [] for name in ("slapo", "DeepSpeed", "accelerate", "closed formula")}
    rows, refused = [], []
    for ranks in (1, 2, 4):
        cases = [case for case in CASES if prod(LAYOUTS[case.layout][0]) == ranks]
        measured = run_distributed(measure, ranks, cases, timeout=1200)
        for index, case in enumerate(cases):
            if isinstance(measured[0][index], str):
                refused.append(f"{case.model}, {case.layout}: {measured[0][index]}")
                continue
            model, said = MODELS[case.model](), estimated(case)
            # ranks along pp come first; of the other axes the first rank is like the estimate
            truth = [int(measured[rank * (ranks // len(said))][index]) for rank in range(len(said))]
            worst = max(range(len(said)), key=lambda rank: truth[rank])
            off = [100 * (mine / real - 1) for mine, real in zip(said, truth, strict=True)]
            own = max(off, key=abs)
            others = [deepspeed_says(case, model), accelerate_says(model), formula_says(case, model)]
            line = [own, *(100 * (other / truth[worst] - 1) for other in others)]
            for name, value in zip(errors, line, strict=True):
                errors[name].append(abs(value))
            about = [case.model, case.layout, case.checkpoints, case.settings]
            rows.append([*about, f"{truth[worst] / 2**20:.2f}", *(f"{value:+.2f}" for value in line)])
    print("\n## Peak memory of a step: estimates against what a rank allocates\n")
    print(f"| model | layout | checkpoints | other | peak (MiB) | {' | '.join(f'{name} (%)' for name in errors)} |")
    print("|---|---|---|---|---|" + "---|" * len(errors))
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print(f"| **median** | {len(rows)} cases | | | | {' | '.join(f'{median(values):.2f}' for values in errors.values())} |")
    print(f"| **worst** | | | | | {' | '.join(f'{max(values):.2f}' for values in errors.values())} |")
    print(
        "\nSmall models on target `torch`, in fp32 with AdamW if nothing else is said. The lowest peak of three steps counts. "
        "DeepSpeed\nand accelerate estimate model states alone; the closed formula adds the activations of a transformer's "
        "layers. Routed experts are\nestimated on real tensors, with random numbers in place of weights on meta."
    )
    for reason in refused:
        print(f"\nNot measured: {reason}")


if __name__ == "__main__":
    main()
