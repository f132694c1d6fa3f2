"""Memory of training steps: estimates against what real ranks allocate, and what other tools say of the same steps.

Run ``python -m benchmarks.memory_estimates``; it prints a section for ``benchmarks/README.md``. Each model trains on one or two
gloo processes in fp32 with AdamW; the third step is measured. The estimate comes from one process with weights on meta.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import slapo_core as slapo
from slapo_plan import estimate, fake_ranks, measure_step
from slapo_testing import run_distributed

ROWS, LENGTH, VOCABULARY = 2, 64, 512
SIZE = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
TEXT = {"vocab_size": VOCABULARY, "use_cache": False, "pad_token_id": 0}
MIXTURE = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}


class Case(NamedTuple):
    """One model on one layout."""

    model: str
    layout: str
    checkpoints: bool = False


LAYOUTS: dict[str, tuple[tuple[int, int, int], int, dict[str, Any]]] = {
    "one rank": ((1, 1, 1), 0, {}),
    "tp2": ((1, 1, 2), 0, {}),
    "dp2 ddp": ((1, 2, 1), 0, {}),
    "dp2 fsdp": ((1, 2, 1), 0, {"data_parallel": "fsdp"}),
    "pp2 1f1b": ((2, 1, 1), 2, {"microbatches": 4}),
    "pp2 interleaved": ((2, 1, 1), 4, {"microbatches": 4, "pipeline_schedule": "interleaved"}),
    "pp2 zbv": ((2, 1, 1), 4, {"microbatches": 4, "pipeline_schedule": "zbv"}),
}
"""Ranks along ``pp``, ``dp`` and ``tp``, stages, and options of ``build``."""


class ConvNet(nn.Module):
    """A small U-Net with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU())
        self.up, self.head = nn.ConvTranspose2d(32, 16, 2, 2), nn.Conv2d(32, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x)
        return self.head(torch.cat([skip, self.up(self.middle(skip))], 1)).pow(2).mean()


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.pow(2).mean()


def lora() -> nn.Module:
    import peft

    return peft.get_peft_model(MODELS["Llama"](), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def causal(name: str, **more: Any) -> Callable[[], nn.Module]:
    config, model = getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}ForCausalLM")
    return lambda: model(config(**{**TEXT, **SIZE, "num_key_value_heads": 2, **more}))


T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT-2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=4, n_embd=64, n_head=4, bos_token_id=1, eos_token_id=2, **TEXT)
    ),
    "BERT": lambda: transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=VOCABULARY, **SIZE)),
    "T5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**TEXT, **T5)),
    "Llama": causal("Llama"),
    "Qwen3": causal("Qwen3", head_dim=16),
    "Gemma": causal("Gemma", head_dim=16),
    "Mistral": causal("Mistral"),
    "Mixtral": causal("Mixtral", num_local_experts=4, experts_implementation="batched_mm"),
    "Qwen2-MoE": causal("Qwen2Moe", experts_implementation="batched_mm", **MIXTURE),
    "ViT": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**SIZE, image_size=32, patch_size=8)),
    "U-Net": ConvNet,
    "plain": Perceptron,
    "LoRA": lora,
}
DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d)
CASES = [
    *(Case(model, layout) for model in MODELS for layout in ("one rank", "dp2 ddp", "dp2 fsdp")),
    *(Case(model, "dp2 fsdp", True) for model in ("GPT-2", "BERT", "Llama", "T5", "ViT")),
    *(Case(model, "tp2", full) for model in ("GPT-2", "BERT", "Llama", "T5", "ViT") for full in (False, True)),
    *(Case(model, name) for model in ("GPT-2", "Llama") for name in LAYOUTS if name.startswith("pp2")),
]


def batch_of(model: str, rows: int) -> dict[str, torch.Tensor]:
    if model == "U-Net":
        return {"x": torch.randn(rows, 3, 32, 32)}
    if model == "plain":
        return {"x": torch.randn(rows, 128)}
    if model == "ViT":
        return {"pixel_values": torch.randn(rows, 3, 32, 32), "labels": torch.zeros(rows, dtype=torch.long)}
    ids = torch.randint(3, VOCABULARY, (rows, LENGTH))
    return {"input_ids": ids, "labels": ids.clone()}


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
    for path in lists if case.checkpoints else ():
        for block in sch.select(f"{path}.*"):
            block.checkpoint()
    if stages:
        sch.pipeline(stages)
    return sch


def rows_of(case: Case) -> int:
    return ROWS * int(LAYOUTS[case.layout][2].get("microbatches", 1))


def measure(rank: int, cases: Sequence[Case]) -> list[int | str]:
    """Return the peak of each case on this rank in bytes, or the reason why it does not run."""
    found: list[int | str] = []
    for case in cases:
        sizes, _, options = LAYOUTS[case.layout]
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp")) if max(sizes) > 1 else None
        try:
            sch = schedule(case, mesh, "cpu")
            engine = slapo.build(sch, target="torch", check=False, optimizer=torch.optim.AdamW, **options)
            torch.manual_seed(0)
            batch = batch_of(case.model, rows_of(case))
            for _ in range(2):
                engine.train_batch(**batch)
            found.append(measure_step(lambda: engine.train_batch(**batch)).peak)  # noqa: B023
            engine.close()
        except slapo.SlapoError as err:
            found.append(str(err))
    return found


def estimated(case: Case) -> list[int]:
    """Return the estimated peak of each rank along ``pp``."""
    sizes, _, options = LAYOUTS[case.layout]
    with fake_ranks(pp=sizes[0], dp=sizes[1], tp=sizes[2]) as mesh:
        found = estimate(schedule(case, mesh, "meta"), batch_of(case.model, rows_of(case)), **options)
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
    per_layer = whole if case.checkpoints else whole * (10 + (24 + 5 * heads * length / hidden) / tp)
    return int(states + layers * per_layer)


def main() -> None:
    """Print the section."""
    errors: dict[str, list[float]] = {name: [] for name in ("slapo", "DeepSpeed", "accelerate", "closed formula")}
    rows, refused = [], []
    for ranks in (1, 2):
        cases = [case for case in CASES if max(LAYOUTS[case.layout][0]) == ranks]
        measured = run_distributed(measure, ranks, cases, timeout=1200)
        for index, case in enumerate(cases):
            if isinstance(measured[0][index], str):
                refused.append(f"{case.model}, {case.layout}: {measured[0][index]}")
                continue
            model, said = MODELS[case.model](), estimated(case)
            # ranks along pp come first; of the other axes the first rank is like the estimate
            truth = [int(measured[rank][index]) for rank in (range(ranks) if len(said) > 1 else [0])]
            worst = max(range(len(said)), key=lambda rank: truth[rank])
            off = [100 * (mine / real - 1) for mine, real in zip(said, truth, strict=True)]
            own = max(off, key=abs)
            others = [deepspeed_says(case, model), accelerate_says(model), formula_says(case, model)]
            line = [own, *(100 * (other / truth[worst] - 1) for other in others)]
            for name, value in zip(errors, line, strict=True):
                errors[name].append(abs(value))
            policy = "all" if case.checkpoints else "none"
            rows.append([case.model, case.layout, policy, f"{truth[worst] / 2**20:.2f}", *(f"{value:+.2f}" for value in line)])
    print("\n## Peak memory of a step: estimates against what a rank allocates\n")
    print(f"| model | layout | checkpoints | peak (MiB) | {' | '.join(f'{name} (%)' for name in errors)} |")
    print("|---|---|---|---|" + "---|" * len(errors))
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print(f"| **median** | {len(rows)} cases | | | {' | '.join(f'{median(values):.2f}' for values in errors.values())} |")
    print(f"| **worst** | | | | {' | '.join(f'{max(values):.2f}' for values in errors.values())} |")
    print(
        "\nSmall models in fp32 with AdamW, target `torch`. DeepSpeed and accelerate estimate model states alone; the closed "
        "formula adds the\nactivations of a transformer's layers."
    )
    for reason in refused:
        print(f"\nNot measured: {reason}")


if __name__ == "__main__":
    main()
