"""Small models and layouts whose estimates are compared with steps on real ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import slapo_core as slapo
from slapo_plan import Estimate, estimate, fake_ranks, measure_step
from slapo_plan.estimation.process_groups import MeshGroups
from slapo_training import CollectiveRecord

from .user_models import USER_MODELS

LENGTH = 32
Totals = Mapping[tuple[str, str, int], int]
"""Number of collectives by kind, axis and bytes."""


class Layout(NamedTuple):
    """One way to train: sizes of the mesh, micro-batches, and options of ``build``."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    stages: int = 0
    microbatches: int = 1
    checkpoints: bool = False
    options: Mapping[str, Any] = {}

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.tp


FSDP = {"data_parallel": "fsdp"}
LAYOUTS = {
    "one": Layout(microbatches=2),
    "one-microbatch": Layout(),
    "fp16": Layout(options={"precision": "fp16"}),
    "tp": Layout(tp=2, options={"clip": 1.0}),
    "ddp": Layout(dp=2, microbatches=2, options={"clip": 1.0}),
    "ddp-fp16": Layout(dp=2, options={"precision": "fp16"}),
    "checkpoints": Layout(dp=2, checkpoints=True),
    "fsdp": Layout(dp=2, microbatches=2, options=FSDP),
    "fsdp-bf16": Layout(dp=2, options={**FSDP, "precision": "bf16", "clip": 1.0}),
    "fsdp-checkpoints": Layout(dp=2, checkpoints=True, options=FSDP),
    "fsdp-whole": Layout(dp=2, options={**FSDP, "fsdp_units": []}),
    "1f1b": Layout(pp=2, microbatches=4, options={"clip": 1.0}),
    "gpipe": Layout(pp=2, microbatches=4, options={"pipeline_schedule": "gpipe"}),
    "interleaved": Layout(pp=2, stages=4, microbatches=4, options={"pipeline_schedule": "interleaved"}),
    "zero-bubble": Layout(pp=2, stages=4, microbatches=4, options={"pipeline_schedule": "zero_bubble"}),
    "zbv": Layout(pp=2, stages=4, microbatches=4, options={"pipeline_schedule": "zbv"}),
    "dualpipev": Layout(pp=2, stages=4, microbatches=6, options={"pipeline_schedule": "dualpipev"}),
    "tp-pp": Layout(pp=2, tp=2, microbatches=4),
    "pp-fsdp": Layout(pp=2, dp=2, microbatches=4, options=FSDP),
    "pp-ddp-interleaved": Layout(pp=2, dp=2, stages=4, microbatches=4, options={"pipeline_schedule": "interleaved"}),
    "tp-fsdp": Layout(dp=2, tp=2, options=FSDP),
}


class Perceptron(nn.Module):
    """Plain model of equal layers with a loss of its own, and one parameter that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.spare = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.pow(2).mean()


class ConvNet(nn.Module):
    """Down and up again with a skip connection, as a U-Net, with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU())
        self.up = nn.ConvTranspose2d(32, 16, 2, 2)
        self.head = nn.Conv2d(32, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x)
        return self.head(torch.cat([skip, self.up(self.middle(skip))], 1)).pow(2).mean()


def make(name: str) -> nn.Module:
    """Return a model by name, without dropout."""
    import transformers

    torch.manual_seed(0)
    if name in USER_MODELS:
        return USER_MODELS[name].make()
    plain = {"vocab_size": 256, "use_cache": False}
    size = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if name == "gpt2":
        dropout = {
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "n_positions": LENGTH,
        }
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=4, n_embd=64, n_head=4, **plain, **dropout))
    if name == "t5":
        numbers = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(decoder_start_token_id=0, pad_token_id=0, **plain, **numbers)
        )
    if name == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=256, **size, **off))
    if name == "vit":
        images = {"image_size": 32, "patch_size": 8, "num_labels": 10}
        return transformers.ViTForImageClassification(transformers.ViTConfig(**size, **off, **images))
    if name == "mixtral":
        config = transformers.MixtralConfig(num_key_value_heads=2, num_local_experts=4, **plain, **size)
        config._experts_implementation = "batched_mm"  # torch's grouped_mm refuses fp32 on fake tensors
        return transformers.MixtralForCausalLM(config)
    if name == "perceptron":
        return Perceptron()
    if name == "conv":
        return ConvNet()
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **plain, **size))
    if name == "lora":
        import peft

        return peft.get_peft_model(llama, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
    return llama


def batch_of(name: str, rows: int) -> dict[str, Any]:
    if name in USER_MODELS:
        return USER_MODELS[name].batch(rows)
    numbers = torch.Generator().manual_seed(1)
    if name == "perceptron":
        return {"x": torch.randn(rows, 64, generator=numbers)}
    if name == "conv":
        return {"x": torch.randn(rows, 3, 16, 16, generator=numbers)}
    if name == "vit":
        labels = torch.randint(10, (rows,), generator=numbers)
        return {"pixel_values": torch.randn(rows, 3, 32, 32, generator=numbers), "labels": labels}
    ids = torch.randint(3, 256, (rows, LENGTH), generator=numbers)
    return {"input_ids": ids, "labels": ids.clone()}


def schedule(name: str, layout: Layout, mesh: Any, device: str) -> slapo.Schedule:
    with torch.device(device):
        model = make(name)
    example = batch_of(name, 2)
    if "loss_fn" in layout.options:
        example.pop("labels")
    sch = slapo.create_schedule(model, mesh=mesh, example_inputs=example)
    if layout.tp > 1:
        sch.tensor_parallel()
    lists = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    for path in lists if layout.checkpoints else ():
        for block in sch.select(f"{path}.*"):
            block.checkpoint()
    if layout.pp > 1:
        sch.pipeline(layout.stages or layout.pp)
    return sch


def options_of(layout: Layout) -> dict[str, Any]:
    return {"microbatches": layout.microbatches, "optimizer": torch.optim.AdamW, **layout.options}


def measure(rank: int, cases: Sequence[tuple[str, str]]) -> list[tuple[int, int, Totals]]:
    """Measure a later step of each case on this rank: bytes held, bytes at the peak, and collectives."""
    return [_measured(name, LAYOUTS[layout]) for name, layout in cases]


def _measured(name: str, layout: Layout) -> tuple[int, int, Totals]:
    sizes = (layout.pp, layout.dp, layout.tp)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp")) if layout.ranks > 1 else None
    sch = schedule(name, layout, mesh, "cpu")  # held while the engine runs, as in scripts of users
    engine = slapo.build(sch, target="torch", check=False, **options_of(layout))
    batch = batch_of(name, 2 * layout.microbatches)
    for _ in range(2):
        engine.train_batch(**batch)
    steps = [measure_step(lambda: engine.train_batch(**batch)) for _ in range(3)]
    step = min(steps, key=lambda each: each.peak)  # gloo's threads may keep a tensor a moment longer
    engine.close()
    found = [each for each in step.work if isinstance(each, CollectiveRecord)]
    return step.held, step.peak, Counter((each.kind, MeshGroups(mesh).name(each.ranks), each.nbytes) for each in found)


def estimated(name: str, layout: Layout) -> Estimate:
    """Estimate the same step in this process, with weights on meta."""
    with fake_ranks(pp=layout.pp, dp=layout.dp, tp=layout.tp) as mesh:
        batch = batch_of(name, 2 * layout.microbatches)
        return estimate(schedule(name, layout, mesh, "meta"), batch, **options_of(layout))


def totals(found: Estimate, rank: int) -> Totals:
    """Return the collectives of a rank along ``pp``."""
    counts: Counter[tuple[str, str, int]] = Counter()
    for each in found.collectives:
        if each.rank == rank:
            counts[each.kind, each.axis, each.nbytes] += each.count
    return counts
