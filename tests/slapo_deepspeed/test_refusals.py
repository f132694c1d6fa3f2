"""Refusals of unsupported or contradictory options: one sentence, the same on all ranks, before anything is built."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import StepLR

import slapo_deepspeed.plugin
import slapo_pipeline.plugin
import slapo_sharding.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, Schedule, build, create_schedule
from slapo_deepspeed.configuration.options import DeepSpeedOptions
from slapo_deepspeed.dialect import DeepSpeedDialect
from slapo_testing import run_distributed
from tests.slapo_sharding.handwritten import Net
from tests.slapo_sharding.handwritten_branches import ListOfHeads
from tests.slapo_torch.layouts import adamw, mesh_of, message_of

PLUGINS = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_deepspeed.plugin, slapo_pipeline.plugin])
TOP = Path(__file__).resolve().parents[2]
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero_stage": 2}, "no option 'zero_stage' of target 'deepspeed'"),
        ({"microbatchs": 2}, "did you mean 'microbatches'"),
        ({"microbatches": 2, "config": {"gradient_accumulation_steps": 4}}, "microbatches=2, but DeepSpeed's config says"),
        ({"clip": 1.0, "config": {"gradient_clipping": 0.5}}, "clip=1.0, but DeepSpeed's config says gradient_clipping=0.5"),
        ({"precision": "bf16", "config": {"fp16": {"enabled": True}}}, "precision='bf16', but DeepSpeed's config says fp16"),
        ({"precision": "bf16", "config": {"bf16": {"enabled": False}}}, "precision='bf16', but DeepSpeed's config says fp32"),
        ({"config": {"fp16": {"enabled": True}, "bf16": {"enabled": True}}}, "enables bf16 and fp16"),
        ({"precision": "int8"}, "precision is 'int8'; give one of fp32, bf16, fp16"),
        ({"optimizer": adamw, "config": ADAMW}, "optimizer= and the optimizer in DeepSpeed's config are two"),
        ({"config": {"zero_optimization": True}}, "zero_optimization in DeepSpeed's config is True; it has to be an object"),
        ({"config": {"gradient_accumulation_steps": 0}}, "it has to be 1 or more"),
        (
            {"config": {"gradient_accumulation_steps": "two"}},
            "gradient_accumulation_steps in DeepSpeed's config is 'two'; it has",
        ),
        ({"config": {"gradient_clipping": "x"}}, "gradient_clipping in DeepSpeed's config is 'x'; it has to be a number"),
        ({"config": "no/such.json"}, "'no/such.json' cannot be read"),
        ({"config": 3}, "config is a int"),
        ({"config": {"gradient_clipping": -1}}, "gradient_clipping in DeepSpeed's config is -1.0; it has to be 0 or more"),
        *(
            ({"config": {name: {"enabled": value}}}, f"enabled of {name} in DeepSpeed's config is {value!r}; it has to be true")
            for name in ("bf16", "fp16")
            for value in (1, "True", "true", None)
        ),
        *(
            (
                {"config": {"zero_optimization": {"stage": value}}},
                f"stage of zero_optimization in DeepSpeed's config is {value!r}",
            )
            for value in (1.5, True, "1", "one")
        ),
        *(
            (
                {"config": {"train_micro_batch_size_per_gpu": value}},
                f"per_gpu in DeepSpeed's config is {value!r}; it has to be a",
            )
            for value in ("2", 0, True)
        ),
        ({"config": {"optimizer": "AdamW"}}, "optimizer in DeepSpeed's config is 'AdamW'; it has to be an object"),
        ({"config": {"optimizer": {}}}, "the optimizer in DeepSpeed's config has no type; give the name of its class"),
        ({"config": {"optimizer": {"params": {"lr": 1}}}}, "the optimizer in DeepSpeed's config has no type"),
        ({"config": {"optimizer": {"type": 3}}}, "the optimizer in DeepSpeed's config has type 3"),
        (
            {"config": {"optimizer": {"type": "AdamW", "params": 3}}},
            "params of the optimizer in DeepSpeed's config is 3; it has",
        ),
        *(
            (
                {"config": {"optimizer": {"type": "AdamW", "params": {"lr": value}}}},
                f"lr of the optimizer .* is {value!r}; it has",
            )
            for value in ("auto", "1e-3", "high")
        ),
        ({"optimizer": adamw, "config": {"scheduler": {}}}, "the scheduler in DeepSpeed's config has no type"),
        (
            {"config": {"scheduler": {"type": "WarmupLR"}}},
            "a scheduler in DeepSpeed's config, but no optimizer; give optimizer=",
        ),
        (
            {"lr_scheduler": StepLR, "config": ADAMW},
            "lr_scheduler= is for optimizer=, and the optimizer is in DeepSpeed's config",
        ),
        ({"lr_scheduler": StepLR, "optimizer": adamw}, "with the optimizer alone, and StepLR needs step_size; give a factory"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        DeepSpeedOptions.of(options)


def test_a_configuration_may_be_a_file_and_says_what_we_do_not(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"gradient_accumulation_steps": 4, "gradient_clipping": 0.5, "bf16": {"enabled": True}}))
    options = DeepSpeedOptions.of({"optimizer": adamw, "config": file})
    assert (options.parts, options.largest_norm, options.settled_precision, options.zero_stage) == (4, 0.5, "bf16", 1)
    settled = options.full_config()
    assert settled["zero_optimization"]["stage"] == 1
    assert settled["gradient_clipping"] == 0.5
    file.write_text("{")
    with pytest.raises(BuildError, match="is not JSON"):
        DeepSpeedOptions.of({"config": file})
    file.write_text('{"zero_optimization": {"stage": 1, "stage": 2}}')
    with pytest.raises(BuildError, match="DeepSpeed's config has 'stage' twice in one object; leave one of them out"):
        DeepSpeedOptions.of({"config": file})


def test_old_names_and_what_is_left_to_the_engine() -> None:
    options = DeepSpeedOptions.of({"config": {"bfloat16": {"enabled": True}, "gradient_clipping": "auto"}})
    assert options.settled_precision == "bf16"
    assert DeepSpeedOptions.of({"config": {"bf16": {"enabled": "auto"}}, "precision": "bf16"}).settled_precision == "bf16"
    assert options.full_config()["bf16"]["enabled"] is True
    assert options.full_config()["gradient_clipping"] == 0.0
    assert "bfloat16" not in options.full_config()


def test_clipping_is_off_unless_asked_for_though_deepspeeds_own_default_is_not() -> None:
    assert DeepSpeedOptions.of({"optimizer": adamw}).full_config()["gradient_clipping"] == 0.0


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_adam_is_torchs_on_a_cpu_alone(kind: str) -> None:
    options = DeepSpeedOptions.of({"config": {"optimizer": {"type": kind, "params": {"lr": 1e-3}}}})
    assert options.full_config("cpu")["optimizer"]["params"] == {"lr": 1e-3, "torch_adam": True}
    assert options.full_config("cuda")["optimizer"]["params"] == {"lr": 1e-3}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def one_key_head() -> nn.Module:
    """Two tensor-parallel ranks both need its keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, **heads, use_cache=False))


def asked(rank: int) -> dict[str, str]:
    """The messages of what cannot be built, each of a new schedule, and how many process groups were made."""
    mesh, example = mesh_of(pp=2), {"input": torch.zeros(2, 4)}

    def attempt(stages: int, made: Any = mesh, **options: Any) -> str:
        schedule = create_schedule(model(), mesh=made, example_inputs=example, plugins=PLUGINS)
        if stages > 1:
            schedule.pipeline(stages)
        return message_of(lambda: build(schedule, "deepspeed", loss_fn=nn.functional.mse_loss, optimizer=adamw, **options))

    def frozen(mesh: DeviceMesh) -> Schedule:
        """Only its first stage has something to train."""
        half = model()
        half[2:].requires_grad_(False)
        return create_schedule(half, mesh=mesh, example_inputs=example, plugins=PLUGINS)["1"].cut_pipeline_stage()

    def plateau(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    whole = model()
    given = adamw(whole.parameters())
    flat = mesh_of(dp=2)
    turned = DeviceMesh("cpu", [1, 0], mesh_dim_names=("dp",))
    unscaled = create_schedule(Scaled(), mesh=flat, plugins=PLUGINS)
    summed = create_schedule(model(), mesh=flat, plugins=PLUGINS)
    plain = create_schedule(whole, mesh=flat, plugins=PLUGINS)

    def typed(dtype: torch.dtype, precision: str) -> str:
        schedule = create_schedule(model().to(dtype), mesh=flat, plugins=PLUGINS)
        return message_of(lambda: build(schedule, "deepspeed", precision=precision))

    def configured(**config: Any) -> str:
        return message_of(lambda: build(summed, "deepspeed", config=config))

    shared = create_schedule(
        one_key_head(),
        mesh=mesh_of(tp=2),
        plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_deepspeed.plugin, slapo_sharding.plugin]),
    )
    shared.tensor_parallel()
    dealt = create_schedule(
        Net(ListOfHeads),
        mesh=mesh_of(tp=2),
        example_inputs={"tokens": torch.zeros(2, 4, dtype=torch.long)},
        plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_deepspeed.plugin, slapo_sharding.plugin]),
    )
    dealt.tensor_parallel()
    before = dist.new_group([0, 1]).group_name
    found = {
        "ZeRO-2": attempt(2, config={"zero_optimization": {"stage": 2}}),
        "ZeRO-3": attempt(2, config={"zero_optimization": {"stage": 3}}),
        "several": attempt(4),
        "no cuts": attempt(1),
        "fp16": attempt(1, flat, precision="fp16"),
        "bf16": attempt(1, flat, precision="bf16", config={"zero_optimization": {"stage": 0}}),
        "no optimizer": message_of(lambda: build(summed, "deepspeed", config={"zero_optimization": {"stage": 2}})),
        "turned": attempt(1, turned),
        "no mesh": attempt(3, None),
        "no dimensions": message_of(lambda: build(unscaled, "deepspeed")),
        "nothing to train": message_of(lambda: build(frozen(mesh), "deepspeed", optimizer=adamw)),
        "plateau": message_of(lambda: build(plain, "deepspeed", optimizer=given, lr_scheduler=plateau(given))),
        "recomputes": attempt(1, flat, config={"pipeline": {"activation_checkpoint_interval": 1}}),
        "accumulates": attempt(1, flat, config={"managed_gradient_accumulation": False}),
        "type": typed(torch.float64, "fp32"),
        "bf16 type": typed(torch.bfloat16, "fp32"),
        "half type": typed(torch.float16, "bf16"),
        "its plateau": attempt(1, flat, config={"scheduler": {"type": "ReduceLROnPlateau"}}),
        "partitioned": attempt(2, config={"pipeline": {"pipe_partitioned": True}}),
        "AutoTP": attempt(1, flat, config={"tensor_parallel": {"autotp_size": 2}}),
        "lamb": configured(optimizer={"type": "Lamb"}),
        "lion": configured(optimizer={"type": "Lion"}),
        "muon": configured(optimizer={"type": "Muon"}),
        "fused": configured(optimizer={"type": "Adam", "params": {"torch_adam": False}}),
        "adagrad": configured(
            optimizer={"type": "Adagrad"}, zero_optimization={"stage": 1, "offload_optimizer": {"device": "cpu"}}
        ),
        "copies": message_of(lambda: build(shared, "deepspeed", optimizer=adamw, clip=1.0)),
        "branches": message_of(lambda: build(dealt, "deepspeed", optimizer=adamw, config={"zero_optimization": {"stage": 3}})),
        "sum": message_of(lambda: build(summed, "deepspeed", loss_fn=nn.MSELoss(reduction="sum"))),
    }
    assert int(dist.new_group([0, 1]).group_name) == int(before) + 1, "groups are numbered"
    return found


@pytest.mark.multiproc
def test_what_deepspeed_cannot_do_is_refused_before_any_group_is_made() -> None:
    first, second = run_distributed(asked, 2)
    assert first == second
    expected = {
        "ZeRO-2": "stage 2 or 3 of ZeRO with a pipeline (stage 2); use stage 1, or target='torch' with data_parallel='fsdp'",
        "ZeRO-3": "stage 2 or 3 of ZeRO with a pipeline (stage 3); use stage 1",
        "several": "several stages on a rank (4 stages with pp=2); make pp as large",
        "no cuts": "a number of stages that is not a multiple of pp (1 stage with pp=2); cut the model into as many "
        "stages as pp",
        "type": "with bf16 bfloat16, or with fp16 float16 (0.weight is torch.float64); turn the model into float32, give",
        "bf16 type": "parameters of another type than float32, or with bf16 bfloat16, or with fp16 float16 (0.weight is",
        "half type": "or with fp16 float16 (0.weight is torch.float16); turn the model into float32, give precision=",
        "its plateau": "ReduceLROnPlateau, as it steps a learning rate's schedule without the loss; use another one",
        "partitioned": "a pipeline with messages partitioned, where one value with a gradient could cross (pipe_partitioned); ",
        "AutoTP": "tensor_parallel in the config; leave it out, and use tensor_parallel() or shard() of the schedule",
        "lamb": "on a CPU an optimizer in the config that DeepSpeed compiles (Lamb); give optimizer=, or Adam or AdamW",
        "lion": "that DeepSpeed compiles (Lion)",
        "muon": "that DeepSpeed compiles (Muon)",
        "fused": "that DeepSpeed compiles (torch_adam off)",
        "adagrad": "that DeepSpeed compiles (Adagrad)",
        "branches": "stage 3 of ZeRO where tensor-parallel ranks run different branches of a module",
        "copies": "clipping where several ranks hold the same part of a parameter",
        "fp16": "fp16 on a CPU; use precision='bf16'",
        "bf16": "bf16 with stage 0 of ZeRO, which steps the optimizer once as it is made; use stage 1",
        "no optimizer": "stages 1 to 3 of ZeRO without an optimizer (stage 2); give optimizer=, or stage 0",
        "turned": "in another order than row-major over pp, dp, tp; make it with init_device_mesh(",
        "no mesh": "several ranks without a mesh that do not fit the stages or the group (2 ranks); give create_schedule mesh=",
        "no dimensions": "a parameter without dimensions ('scale'); give it the shape (1,)",
        "nothing to train": "a stage with nothing to train (stage 1 of 2); cut elsewhere, or use target='torch'",
        "plateau": "ReduceLROnPlateau, as it steps a learning rate's schedule without the loss; use another one",
        "recomputes": "activation_checkpoint_interval, which runs a stage twice; use checkpoint() of the schedule",
        "accumulates": "managed_gradient_accumulation off, as micro-batches are accumulated; leave it on",
    }
    assert "loss_fn has reduction='sum'" in first.pop("sum")
    assert set(first) == set(expected)
    for what, message in expected.items():
        assert message in first[what], first[what]
        assert first[what].startswith("BuildError: target 'deepspeed' cannot do ")
    for limit in DeepSpeedDialect.limits:
        assert any(limit.asked in message for message in first.values()), f"nothing asks for {limit.asked}"


def misread(rank: int, file: str) -> dict[str, str]:
    """Messages for configurations that DeepSpeed ignores or refuses, and for batches of another size than configured."""
    flat, x = mesh_of(dp=2), torch.zeros(4, 4)

    def attempt(config: Any, rows: int = 4) -> str:
        def run() -> None:
            schedule = create_schedule(model(), mesh=flat, plugins=PLUGINS)
            own = None if isinstance(config, dict) and "optimizer" in config else adamw
            given = {"loss_fn": nn.functional.mse_loss, "optimizer": own, "microbatches": 2}
            engine: Any = build(schedule, "deepspeed", **given, config=config)
            try:
                engine.train_batch(input=x[:rows], labels=x[:rows])
            finally:
                engine.close()

        return message_of(run)

    return {
        "top": attempt({"zero_optimisation": {"stage": 2}}),
        "file": attempt(file),
        "section": attempt({"optimizer": {"type": "AdamW", "parms": {"lr": 1e-2}}}),
        "ours": attempt({"zero_optimization": {"stag": 1}}),
        "inner": attempt({"zero_optimization": {"stage": 1, "offload_optimizer": {"devic": "cpu"}}}),
        "value": attempt({"zero_optimization": {"stage": 7}}),
        "removed": attempt({"sparse_attention": {}}),
        "size": attempt({"train_batch_size": 7}),
        "rows": attempt({"train_micro_batch_size_per_gpu": 4}),
        "all rows": attempt({"train_batch_size": 8}, rows=2),
        "right": attempt({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "wandb": {"enabled": False}}),
        "its own": attempt({**ADAMW, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}}),
        "torch's": attempt({"optimizer": {"type": "AdamW"}, "scheduler": {"type": "StepLR", "params": {"step_size": 3}}}),
        "its defaults": attempt({"optimizer": {"type": "SGD"}, "scheduler": {"type": "LRRangeTest"}}),
        "optimizer": attempt({"optimizer": {"type": "AdmW"}}),
        "lrr": attempt({"optimizer": {"type": "AdamW", "params": {"lrr": 1e-3}}}),
        "norm": attempt({"optimizer": {"type": "SGD", "params": {"max_grad_norm": 1.0}}}),
        "refused": attempt({"optimizer": {"type": "AdamW", "params": {"lr": -1}}}),
        "mup": attempt({"optimizer": {"type": "MuAdam"}}),
        "scheduler": attempt({"scheduler": {"type": "WarmupLRR"}}),
        "warmup": attempt({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}}),
        "total": attempt({"scheduler": {"type": "WarmupDecayLR"}}),
        "of torch": attempt({"scheduler": {"type": "StepLR", "params": {"step_size": 1}}, "zero_optimization": {"stage": 1}}),
        "pipeline": attempt({"pipeline": {"stges": 2}}),
        "accumulated": attempt({"data_types": {"grad_accum_dtype": "bf16"}}),
        "offloaded": attempt({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}),
    }


@pytest.mark.multiproc
def test_what_deepspeed_would_pass_over_in_its_config_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"gradient_clippin": 1.0}))
    first, second = run_distributed(misread, 2, str(file))
    assert first == second
    refuses = "DeepSpeed refuses its config: "
    expected = {
        "top": "no key 'zero_optimisation' of DeepSpeed's config; did you mean 'zero_optimization'?; available: ",
        "file": "no key 'gradient_clippin' of DeepSpeed's config; did you mean 'gradient_clipping'?",
        "section": "no key 'parms' of optimizer in DeepSpeed's config; did you mean 'params'?",
        "ours": f"{refuses}zero_optimization.stag: Extra inputs are not permitted, did you mean 'stage'?",
        "inner": f"{refuses}zero_optimization.offload_optimizer.devic: Extra inputs are not permitted, did you mean 'device'?",
        "value": f"{refuses}zero_optimization.stage: Input should be 0, 1, 2",
        "removed": f"{refuses}DeepSpeed Sparse Attention has been removed",
        "size": f"{refuses}Check batch related parameters",
        "rows": "a micro-batch has 2 rows, but by train_micro_batch_size_per_gpu in DeepSpeed's config it has 4; leave it out",
        "optimizer": "no optimizer 'AdmW' of DeepSpeed's config; did you mean 'AdamW'?; available: ",
        "lrr": "no parameter 'lrr' of the optimizer 'AdamW' in DeepSpeed's config; did you mean 'lr'?; available: ",
        "norm": "no parameter 'max_grad_norm' of the optimizer 'SGD' in DeepSpeed's config; ",
        "refused": "DeepSpeed cannot be initialised: Invalid learning rate: -1",
        "mup": "the optimizer 'MuAdam' in DeepSpeed's config needs the package mup; install it",
        "scheduler": "no scheduler 'WarmupLRR' of DeepSpeed's config; did you mean 'WarmupLR'?; available: ",
        "warmup": "no parameter 'warmup_steps' of the scheduler 'WarmupLR' in DeepSpeed's config; did you mean ",
        "total": "the scheduler 'WarmupDecayLR' in DeepSpeed's config needs total_num_steps; give it in its params",
        "of torch": "the scheduler 'StepLR' in DeepSpeed's config is torch's, which takes no optimizer of ZeRO; give",
        "pipeline": "no key 'stges' of pipeline in DeepSpeed's config; ",
        "accumulated": "DeepSpeed cannot be initialised: unsupported mix of model_dtype=torch.float32 and grad_accum_dtype=",
        "offloaded": "offload_optimizer steps DeepSpeed's own optimizers, and optimizer= gave AdamW; give the optimizer in the",
        "all rows": "a micro-batch has 1 rows, but by train_batch_size in DeepSpeed's config it has 2; leave it out",
    }
    assert {first.pop(what) for what in ("right", "its own", "torch's", "its defaults")} == {"no error"}
    assert set(first) == set(expected)
    for what, message in expected.items():
        assert first[what].startswith(f"BuildError: {message}"), first[what]


def test_the_page_of_limits_has_those_that_are_declared() -> None:
    page = (TOP / "docs" / "limits.md").read_text().replace("`", "").partition("\n## DeepSpeed\n")[2].partition("\n## ")[0]
    (table,) = re.findall(r"\| asked \| instead \|\n\|---\|---\|\n((?:\|.*\n)+)", page)
    rows = [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in table.splitlines()]
    assert rows == [(limit.asked, limit.instead) for limit in DeepSpeedDialect.limits]


def test_the_version_that_was_tested_is_the_one_installed_here() -> None:
    assert metadata.version(DeepSpeedDialect.distribution) == DeepSpeedDialect.tested


def test_importing_the_dialect_does_not_import_deepspeed() -> None:
    import subprocess
    import sys

    code = "import slapo_deepspeed.plugin, slapo_deepspeed.dialect, sys; assert 'deepspeed' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
