"""The classic configuration names: each does what the page says, or is refused with what replaces it."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo
import slapo_models.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, Schedule, ScheduleError, UnknownNameError
from slapo_models import Configuration, apply_schedule
from slapo_models.shared_steps.kernels import ATTENTIONS
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent
from tests.contracts.conftest import TOP
from tests.slapo_models.cases import CASES
from tests.slapo_models.residual import BasicBlock, WideResNet
from tests.zoo.families import FAMILIES

PAGE = (TOP / "docs/guides/models.md").read_text()


def steps(sch: Schedule) -> list[str]:
    return [str(step) for step in sch.journal]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gpt2", {"ckpt_ratio": 1.5}, r"ckpt_ratio is 1.5; give a share of the blocks from 0 to 1"),
    ("gpt2", {"ckpt_ratio": True}, r"ckpt_ratio is True; give a share"),
    ("gpt2", {"ckpt_ratio": 0.1}, r"ckpt_ratio=0.1 is none of 2 blocks; give 0, or at least 0.5"),
    ("gpt2", {"checkpoint_method": "tail"}, r"checkpoint_method is 'tail'; give 'uniform' or 'head'"),
    ("gpt2", {"bcast_input": "yes"}, r"bcast_input is 'yes'; give True or False"),
    ("gpt2", {"prefix": 3}, r"prefix is 3; give a string"),
    ("gpt2", {"prefix": ""}, r"there is no 'h' in the model at prefix ''; give prefix='transformer'"),
    ("gpt2", {"pipeline_cuts": 1}, r"pipeline_cuts is 1; give a list of numbers of blocks"),
    ("gpt2", {"pipeline_cuts": [2]}, r"pipeline_cuts has 2, and no stage can end there; give numbers of blocks out of 0, 1"),
    ("gpt2", {"pipeline_cuts": [[0]]}, r"pipeline_cuts has \[0\], and no stage can end there"),
    ("gpt2", {"pipeline_cuts": [1, 0]}, r"pipeline_cuts has \[1, 0\]; give each number once, in rising order"),
    ("gpt2", {"fp16": True, "bf16": True}, r"fp16 and bf16 are both asked for; give one of them"),
    ("gpt2", {"attn_op_name": "cutlas"}, r"no attention 'cutlas' of attn_op_name; did you mean 'cutlass'\?"),
    ("gpt2", {"attn_op_name": "cuda", "disable_flash_attn": True}, r"attn_op_name='cuda' says how to attend already"),
    ("gpt2", {"fuse_conv": True}, r"fuse_conv=True cannot be served, its schedules fuse no convolutions; call compile\(\)"),
    (
        "gpt2",
        {"model_config": FAMILIES["bert"].make_config()},
        r"model_config is a BertConfig, and the model's is a GPT2Config",
    ),
    ("gpt2", {"model_config": FAMILIES["gpt2"].make_config(depth=3)}, r"model_config is of another model, 'n_layer' differs"),
    ("bert", {"prefix": "encoder"}, r"there is no 'encoder.layer' in the model at prefix 'encoder'; give prefix='bert'"),
    ("opt", {"disable_fuse_bias_gelu": False}, r"disable_fuse_bias_gelu=False cannot be served, as the MLP is in the layer's"),
    ("gpt_neo", {"attn_op_name": "cuda"}, r"GPT-Neo cannot attend by 'cuda': .*leave attn_op_name .* out, or give 'eager'"),
    ("gpt_neo", {"disable_flash_attn": False}, r"GPT-Neo cannot attend by 'cuda'"),
    ("albert", {"pipeline_cuts": [0]}, r"pipeline_cuts has 0, and no stage can end there; give numbers of blocks out of 1"),
    ("albert", {"ckpt_ratio": 0.5}, r"ckpt_ratio=0.5 is none of 1 blocks; give 0, or at least 1"),
    ("t5", {"pipeline_cuts": [0]}, r"pipeline_cuts is \[0\]; give 2 lists of numbers"),
    ("wideresnet", {"pipeline_cuts": [0]}, r"pipeline_cuts is \[0\]; give 4 lists of numbers"),
    ("wideresnet", {"sequence_parallel": True}, r"sequence_parallel=True cannot be served, as images have no sequence"),
    ("wideresnet", {"parallel_loss": True}, r"parallel_loss=True cannot be served, as its head is whole on every rank"),
    ("gpt2", {"parallel_loss": True, "tensor_parallel": False}, r"parallel_loss=True needs tensor_parallel; leave tensor_"),
    ("wideresnet", {"attn_op_name": "cuda"}, r"attn_op_name='cuda' cannot be served, as a residual network has no attention"),
]


@pytest.mark.parametrize(("key", "config", "message"), REFUSED)
def test_it_is_refused(key: str, config: dict[str, Any], message: str) -> None:
    model = CASES[key].model()
    before = copy.deepcopy(model)
    with pytest.raises(ScheduleError, match=rf"^apply_schedule\('{key}'\): {message}"):
        apply_schedule(model, key, **config)
    assert [*model.state_dict()] == [*before.state_dict()]
    assert all(torch.equal(value, before.state_dict()[name]) for name, value in model.state_dict().items())


def test_an_unknown_name_has_a_suggestion() -> None:
    message = "no configuration name 'ckpt_ration' of the schedule 'gpt2'; did you mean 'ckpt_ratio'.*available: .*group, "
    with pytest.raises(UnknownNameError, match=message):
        apply_schedule(CASES["gpt2"].model(), "gpt2", ckpt_ration=0.5)


def test_a_model_of_another_family_is_refused() -> None:
    with pytest.raises(ScheduleError, match="no module of the BertForMaskedLM has 'h'; give the key of its own family"):
        apply_schedule(CASES["bert"].model(), "gpt2")
    pair = nn.ModuleList([CASES["bert"].model(), CASES["bert"].model()])
    with pytest.raises(
        ScheduleError, match="several modules have 'encoder.layer': '0.bert', '1.bert'; give one of them as prefix"
    ):
        apply_schedule(pair, "bert")
    assert steps(apply_schedule(pair, "bert", prefix="1.bert", ckpt_ratio=0.5)) == [
        "sch['1.bert.encoder.layer.1'].checkpoint()"
    ]


def test_every_name_is_on_the_page() -> None:
    rows = {
        name for row in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", PAGE, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    names = {name for name in Configuration.__dataclass_fields__ if name != "key"}
    assert rows >= names | {"group"} | {*CASES, "gpt"}
    assert all(f'"{name}"' in PAGE for name in ATTENTIONS)


@pytest.mark.parametrize(
    ("config", "attends"),
    [
        ({"attn_op_name": "eager"}, "eager"),
        ({"attn_op_name": "native_xformers"}, "eager"),
        ({"disable_flash_attn": True}, "eager"),
        ({"attn_op_name": "native"}, "sdpa"),
        ({"attn_op_name": "cutlass"}, "sdpa"),
        ({"attn_op_name": "cuda"}, "sdpa"),
        ({"disable_flash_attn": False}, "sdpa"),
    ],
)
def test_how_it_attends_on_a_cpu(config: dict[str, Any], attends: str) -> None:
    other = {"eager": "sdpa", "sdpa": "eager"}[attends]
    model: Any = CASES["gpt2"].model()
    model.set_attn_implementation(other)
    before = copy.deepcopy(model)
    apply_schedule(model, "gpt2", **config)
    assert model.config._attn_implementation.removeprefix("slapo_") == attends
    assert_equivalent(before, model, **CASES["gpt2"].batch())


def test_flash_attention_that_cannot_be_used_is_refused_with_the_reason() -> None:
    with pytest.raises(ScheduleError, match="it cannot attend by 'flash_attn': .* not on cpu; give 'auto'"):
        apply_schedule(CASES["gpt2"].model(), "gpt2", attn_op_name="flash_attn")


def test_kernels_that_are_not_installed_are_named() -> None:
    for name, value, kernel in (("attn_op_name", "cuda", "attention"), ("disable_fuse_bias_gelu", False, "bias_act")):
        with pytest.raises(ScheduleError, match=f"{kernel} by kernels needs slapo-kernels; pip install slapo-kernels"):
            apply_schedule(
                CASES["gpt2"].model(),
                "gpt2",
                plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_models.plugin]),
                **{name: value},
            )


def test_bias_and_activation_are_one_kernel() -> None:
    sch = apply_schedule(CASES["bert"].model(), "bert", disable_fuse_bias_gelu=False)
    blocks = [f"bert.encoder.layer.{number}.intermediate" for number in (0, 1)]
    assert [step.path for step in sch.journal.steps[0].children] == [*blocks, "cls.predictions.transform"]


@pytest.mark.parametrize(("method", "expected"), [("uniform", [1, 3]), ("head", [0, 1])])
def test_which_blocks_are_recomputed(method: str, expected: list[int]) -> None:
    model = FAMILIES["gpt2"].model(depth=4)
    sch = apply_schedule(model, "gpt2", ckpt_ratio=0.5, checkpoint_method=method)
    assert steps(sch) == [f"sch['transformer.h.{number}'].checkpoint()" for number in expected]


def test_the_encoder_and_the_decoder_have_cuts_and_recomputed_blocks_of_their_own() -> None:
    model: Any = CASES["t5"].model()
    model.config.use_cache = model.decoder.config.use_cache = False
    sch = apply_schedule(model, "t5", pipeline_cuts=[[0], [0]], ckpt_ratio=0.5)
    assert [step.path for step in sch.journal] == [
        *("encoder.block.1", "decoder.block.1"),
        *("encoder.block.0", "decoder.block.0", "encoder"),
    ]
    program = slapo.build_program(sch)
    assert len(program.stages) == 4


def test_groups_of_an_albert() -> None:
    from transformers import AlbertConfig, AlbertModel

    sizes = {"embedding_size": 8, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 32}
    model = AlbertModel(AlbertConfig(**sizes, num_hidden_layers=6, num_hidden_groups=3))
    sch = apply_schedule(model, "albert", pipeline_cuts=[1, 3], ckpt_ratio=0.67, checkpoint_method="head")
    groups = [f"encoder.albert_layer_groups.{number}" for number in (0, 1)]
    assert [step.path for step in sch.journal] == [*groups, *groups]
    assert len(slapo.build_program(sch).stages) == 3
    with pytest.raises(ScheduleError, match="give numbers of blocks out of 1, 3, 5"):
        apply_schedule(model, "albert", pipeline_cuts=[2])


@pytest.mark.parametrize(("config", "dtype"), [({"fp16": True}, torch.float16), ({"bf16": True}, torch.bfloat16)])
def test_half_precision(config: dict[str, Any], dtype: torch.dtype) -> None:
    model = CASES["gpt2"].model()
    before = copy.deepcopy(model).to(dtype)
    sch = apply_schedule(model, "gpt2", ckpt_ratio=1.0, **config)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert slapo.verify(before, sch).ok
    with pytest.raises(ScheduleError, match="converts the model, and its schedule has steps already; convert the model before"):
        apply_schedule(sch, "gpt2", **config)


def test_it_works_on_weights_that_are_not_made_yet() -> None:
    with slapo.init_empty_weights():
        model: Any = CASES["gpt2"].model()
    model.config.use_cache = False
    sch = apply_schedule(model, "gpt2", bf16=True, delay_init=True, ckpt_ratio=0.5, pipeline_cuts=[0])
    assert len(slapo.build_program(sch).stages) == 2
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


class Wrapped(nn.Module):
    """A wrapper that a training script puts around a network."""

    def __init__(self) -> None:
        super().__init__()
        self.model = WideResNet(BasicBlock)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


def split_basic_blocks(rank: int) -> None:
    torch.manual_seed(0)
    model = Wrapped()
    before = copy.deepcopy(model)
    sch = apply_schedule(model, "wideresnet", prefix="model", model_config={"block_size": 1})
    slapo.build(sch)
    assert_equivalent(before, model, torch.randn(3, 3, 8, 8, requires_grad=True), atol=1e-4)
    assert model.model.layer1[0].conv2.in_channels == 4  # type: ignore[union-attr,index]


@pytest.mark.multiproc
def test_basic_blocks_are_split_as_well() -> None:
    run_distributed(split_basic_blocks, 2)


def inputs_of_each_rank(rank: int) -> tuple[torch.Tensor, str]:
    """The loss of a model whose ranks are given other tokens, and what is said of an input that needs a gradient."""
    model = CASES["gpt2"].model()
    sch = apply_schedule(model, "gpt2", bcast_input=True)
    slapo.build(sch)
    ids = torch.arange(5, 21).view(2, 8) + rank
    loss = model(ids, labels=ids, use_cache=False).loss
    assert torch.equal(ids, torch.arange(5, 21).view(2, 8) + rank)
    with pytest.raises(ScheduleError) as refused:
        model(inputs_embeds=torch.zeros(2, 8, 32, requires_grad=True))
    return loss.detach(), str(refused.value)


@pytest.mark.multiproc
def test_the_inputs_are_those_of_the_first_rank() -> None:
    ids = torch.arange(5, 21).view(2, 8)
    expected = CASES["gpt2"].model()(ids, labels=ids).loss
    for loss, refused in run_distributed(inputs_of_each_rank, 2):
        torch.testing.assert_close(loss, expected.detach())
        assert refused.startswith(
            "sync(''): the input 'inputs_embeds' needs a gradient, which a broadcast does not carry; leave"
        )


def loss_of(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def classic(rank: int, target: str) -> float:
    """The loss of a step of a classic script, which gives no example inputs."""
    from functools import partial

    from tests.slapo_torch.layouts import mesh_of

    model: Any = CASES["gpt2"].model()
    model.config.use_cache = False
    sch = apply_schedule(
        model,
        "gpt2",
        model_config=model.config,
        prefix="transformer",
        attn_op_name="cuda",
        ckpt_ratio=0.5,
        bcast_input=True,
        group=None,
        pipeline_cuts=[0],
        delay_init=False,
        mesh=mesh_of(pp=2),
    )
    engine: Any = slapo.build(sch, target=target, loss_fn=loss_of, optimizer=partial(torch.optim.SGD, lr=0.1), microbatches=2)
    ids = torch.arange(5, 37).view(4, 8)
    loss = engine.train_batch(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).item()
    engine.close()
    return loss  # type: ignore[no-any-return]


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "target", ["torch", *(pytest.param(each, marks=pytest.mark.slow) for each in ("deepspeed", "megatron"))]
)
def test_a_classic_script_without_example_inputs(target: str) -> None:
    ids = torch.arange(5, 37).view(4, 8)
    expected = loss_of(CASES["gpt2"].model()(ids), ids).item()
    assert run_distributed(classic, 2, target) == pytest.approx([expected] * 2, abs=1e-5)
