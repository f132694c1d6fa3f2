"""``export_weights`` in one process: what it writes is what the unmodified model's ``save_pretrained`` does."""

from __future__ import annotations

import importlib
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import slapo
from slapo_core import BuildError
from slapo_weights import export_weights
from slapo_weights.export_plan.plan import parse_size
from slapo_weights.tensor_views.fused_parameters import made_of
from tests.engine_models import small
from tests.zoo.families import FAMILIES

FAST = ("gpt2", "bert", "t5", "mixtral", "gpt_neox", "vit")
"""Ties, an encoder, experts that are fused in memory, and names that Transformers changes."""


def written(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of an export."""
    files = sorted(folder.glob("*.safetensors"))
    tensors = [load_file(file) for file in files]
    assert len({name for each in tensors for name in each}) == sum(map(len, tensors))
    return {name: tensor for each in tensors for name, tensor in each.items()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in sorted(FAMILIES)]
)
def test_it_writes_what_save_pretrained_does(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    model: Any = family.model()
    model.save_pretrained(tmp_path / "theirs")
    export_weights(slapo.create_schedule(family.model()), tmp_path / "ours")
    assert sorted(os.listdir(tmp_path / "ours")) == sorted(os.listdir(tmp_path / "theirs"))
    for file in (tmp_path / "theirs").glob("*.json"):
        assert json.loads((tmp_path / "ours" / file.name).read_text()) == json.loads(file.read_text())
    ours, theirs = written(tmp_path / "ours"), written(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if ours[key].dtype != theirs[key].dtype or not torch.equal(ours[key], theirs[key])] == []


@pytest.mark.parametrize(("name", "head"), [("mixtral", "AutoModelForCausalLM"), ("gpt2", "AutoModel")])
def test_what_was_read_converted_is_written_as_it_was(name: str, head: str, tmp_path: Path) -> None:
    """Files of the whole model, and of its base model, whose names lack the prefix and the head."""
    FAMILIES[name].model().save_pretrained(tmp_path / "first")  # type: ignore[operator]
    model = getattr(transformers, head).from_pretrained(tmp_path / "first")
    model.save_pretrained(tmp_path / "theirs")
    export_weights(slapo.create_schedule(model), tmp_path / "ours")
    ours, theirs = written(tmp_path / "ours"), written(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("steps", ["trace", "flatten", "kernels", "cut"])
def test_the_unmodified_model_is_known_after_steps(steps: str, tmp_path: Path) -> None:
    model: Any = FAMILIES["mixtral" if steps != "cut" else "gpt2"].model()
    model.save_pretrained(tmp_path / "theirs")
    batch = FAMILIES["gpt2"].batch()
    sch = slapo.create_schedule(model, example_inputs=batch)
    if steps == "kernels":
        sch.use_kernels()
    elif steps == "cut":
        sch["transformer.h.0"].cut_pipeline_stage()
        sch["transformer.h.0.mlp"].checkpoint()
    else:
        sch.trace(recursive=steps == "flatten", flatten=steps == "flatten")
    export_weights(sch, tmp_path / "ours")
    assert written(tmp_path / "ours").keys() == written(tmp_path / "theirs").keys()
    config = json.loads((tmp_path / "ours/config.json").read_text())
    assert config == json.loads((tmp_path / "theirs/config.json").read_text())


def test_shards_have_the_index_of_save_pretrained_and_load(tmp_path: Path) -> None:
    model: Any = small("gpt2")
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    export_weights(slapo.create_schedule(model), tmp_path / "ours", max_shard_size="20KB")
    index = "model.safetensors.index.json"
    assert json.loads((tmp_path / "ours" / index).read_text()) == json.loads((tmp_path / "theirs" / index).read_text())
    ids = torch.arange(12)[None]
    again = type(model).from_pretrained(tmp_path / "ours")
    assert torch.equal(again(ids).logits, model.eval()(ids).logits)


def test_an_export_takes_the_place_of_another(tmp_path: Path) -> None:
    """Many files, fewer, one, and many again; a tokenizer stays."""
    (tmp_path / "tokenizer.json").write_text("{}")
    for number, size in enumerate(("20KB", "30KB", "1GB", "20KB")):
        model: Any = small("gpt2")
        with torch.no_grad():
            model.transformer.ln_f.bias.fill_(number)
        export_weights(slapo.create_schedule(model), tmp_path, max_shard_size=size)
        assert type(model).from_pretrained(tmp_path).transformer.ln_f.bias.eq(number).all()
        left = {"config.json", "generation_config.json", "tokenizer.json"}
        shards = {file.name for file in tmp_path.glob("model*.safetensors")}
        index = {"model.safetensors.index.json"} if size != "1GB" else set()
        assert {file.name for file in tmp_path.iterdir()} == left | shards | index
        assert len(written(tmp_path)) == len({*map(id, model.state_dict(keep_vars=True).values())})


def test_a_failed_export_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_weights(slapo.create_schedule(small("gpt2")), tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    (tmp_path / ".export-0123abcd").mkdir()  # what a crash has left
    model: Any = small("gpt2")
    model.transformer.ln_f.bias.data.fill_(3)
    monkeypatch.setattr(type(model.config), "save_pretrained", failing)
    with pytest.raises(BuildError, match="the config of GPT2LMHeadModel cannot be written: OSError: .* No space left"):
        export_weights(slapo.create_schedule(model), tmp_path, max_shard_size="20KB")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def failing(self: Any, folder: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_disk_is_told_and_leaves_the_export_before(tmp_path: Path) -> None:
    sch: Any = slapo.create_schedule(small("gpt2"))
    export_weights(sch, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, limits[1]))
    try:
        with pytest.raises(BuildError, match=rf"export_weights: '{tmp_path}' cannot be written to: .*File too large"):
            export_weights(sch, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_what_is_no_folder_and_a_name_that_files_keep_are_refused(tmp_path: Path) -> None:
    sch: Any = slapo.create_schedule(small("gpt2"))
    (tmp_path / "file").touch()
    for folder, said in (
        (None, "None; give a path"),
        ("", "''; give a path"),
        (b"x", "b'x'; give a path"),
        (3, "3; give a path"),
    ):
        with pytest.raises(BuildError, match=f"the folder is {said}"):
            export_weights(sch, folder)  # type: ignore[arg-type]
    for folder in (tmp_path / "file" / "below", tmp_path / ("x" * 300), tmp_path / "nul\0"):
        with pytest.raises(BuildError, match="cannot be written to"):
            export_weights(sch, folder)
    model = nn.Linear(2, 2)
    model.register_parameter("__metadata__", nn.Parameter(torch.ones(1)))
    with pytest.raises(BuildError, match="a tensor has the name '__metadata__', which safetensors files reserve"):
        export_weights(slapo.create_schedule(model), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_types(tmp_path: Path) -> None:
    """The model's own, and one that is asked for."""
    model: Any = small("llama").bfloat16()
    export_weights(slapo.create_schedule(model), tmp_path / "own")
    assert {tensor.dtype for tensor in written(tmp_path / "own").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "own/config.json").read_text())["dtype"] == "bfloat16"
    export_weights(slapo.create_schedule(model), tmp_path / "wide", dtype=torch.float32)
    assert {tensor.dtype for tensor in written(tmp_path / "wide").values()} == {torch.float32}
    assert json.loads((tmp_path / "wide/config.json").read_text())["dtype"] == "float32"


class Plain(nn.Module):
    """A tie, a type, an empty tensor, a number, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(3, 5), nn.Linear(3, 5), nn.BatchNorm1d(5)
        self.second.weight = self.first.weight
        self.register_buffer("kept", torch.tensor([True, False, True]))
        self.register_buffer("none", torch.empty(0, 4))
        self.register_buffer("derived", torch.arange(3.0), persistent=False)


def test_any_other_model_has_the_names_of_its_state_dict(tmp_path: Path) -> None:
    model = Plain()
    export_weights(slapo.create_schedule(model), tmp_path, dtype=torch.float16)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    found, expected = written(tmp_path), model.state_dict()
    assert found.keys() == expected.keys() - {"second.weight"}
    assert {found["norm.num_batches_tracked"].dtype, found["kept"].dtype} == {torch.int64, torch.bool}
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name].half() if expected[name].is_floating_point() else expected[name])


def test_rows_that_a_vocabulary_was_padded_with_are_not_written(tmp_path: Path) -> None:
    model: Any = small("gpt2")
    expected = model.lm_head.weight.detach().clone()
    sch = slapo.create_schedule(model)
    wide, head = nn.Embedding(72, 32), nn.Linear(32, 72, bias=False)
    wide.weight.data[:64] = expected
    head.weight = wide.weight
    sch["transformer.wte"].replace(wide)
    sch["lm_head"].replace(head)
    export_weights(sch, tmp_path)
    found = written(tmp_path)
    assert torch.equal(found["transformer.wte.weight"], expected)
    assert "lm_head.weight" not in found


def test_a_replaced_module_has_the_names_of_the_one_before(tmp_path: Path) -> None:
    model: Any = small("llama")
    sch = slapo.create_schedule(model)
    new = nn.Linear(32, 64, bias=False)
    sch["model.layers.1.mlp.up_proj"].replace(new)
    sch["model.norm"].replace(nn.RMSNorm(32))
    export_weights(sch, tmp_path)
    assert torch.equal(written(tmp_path)["model.layers.1.mlp.up_proj.weight"], new.weight)


class GateUp(nn.Module):
    """The two projections of a Llama's MLP as one."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        parts = [mlp.gate_proj.weight, mlp.up_proj.weight]
        self.gate_up, self.down_proj = nn.Linear(32, 128, bias=False), mlp.down_proj
        self.gate_up.weight = nn.Parameter(torch.cat([part.detach() for part in parts]))
        made_of(self.gate_up.weight, parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down_proj(nn.functional.silu(gate) * up)


def with_fused_layers(model: Any, **options: Any) -> Any:
    """The schedule of a Llama whose MLPs are replaced."""
    sch = slapo.create_schedule(model, **options)
    for layer in sch.select("model.layers.*"):
        layer["mlp"].replace(GateUp(layer["mlp"].mod))
    return sch


def test_a_fused_module_is_taken_apart_as_its_step_declares(tmp_path: Path) -> None:
    model: Any = small("llama")
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    export_weights(with_fused_layers(model), tmp_path)
    found = written(tmp_path)
    assert found.keys() == expected.keys() - {"lm_head.weight"}
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def with_fused_projections(model: Any, **options: Any) -> Any:
    """The schedule of a BERT whose attention has its three projections in one, rows by head."""
    sch = slapo.create_schedule(model, **options)
    for layer in sch.select("bert.encoder.layer.*.attention.self"):
        own = layer.mod
        attention = slapo.op.FlashAttention(own.all_head_size, own.num_attention_heads, fused_qkv=True)
        attention.qkv = slapo.op.FusedQKV.from_separate(own.query, own.key, own.value, own.num_attention_heads)
        layer.replace(attention)
    return sch


def test_fused_projections_go_out_and_come_in_by_the_original_names(tmp_path: Path) -> None:
    model: Any = FAMILIES["bert"].model()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sch = with_fused_projections(model)
    with torch.no_grad():  # as training does
        for parameter in model.parameters():
            parameter.mul_(2)
    export_weights(sch, tmp_path)
    found = written(tmp_path)
    assert "bert.encoder.layer.0.attention.self.key.weight" in found
    assert [name for name in found if not torch.equal(found[name], 2 * expected[name])] == []

    with slapo.init_empty_weights():
        empty: Any = type(model)(model.config)
    engine = slapo.build(with_fused_projections(empty), weights=tmp_path)
    for (name, one), other in zip(model.named_parameters(), engine.module.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_tensor_that_two_modules_claim_is_refused(tmp_path: Path) -> None:
    model: Any = nn.ModuleDict({"first": nn.Linear(2, 2, bias=False), "second": nn.Linear(2, 2, bias=False)})
    sch = slapo.create_schedule(model)
    new = nn.Linear(3, 2, bias=False)
    made_of(new.weight, [model["second"].weight])
    sch["first"].replace(new)
    with pytest.raises(BuildError, match=r"'first.weight' and 'second.weight' are both 'second.weight' of the unmodified"):
        export_weights(sch, tmp_path)


@pytest.mark.parametrize("parts", [[(0, 3)], [(1, 4)], [(0, 2), (0, 2)], [(0, 2), (3, 4)]], ids=str)
def test_rows_that_nobody_has_are_not_lost(parts: list[tuple[int, int]], tmp_path: Path) -> None:
    model: Any = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 4, bias=False)})
    sch = slapo.create_schedule(model)
    new = nn.Linear(2, sum(stop - start for start, stop in parts), bias=False)
    made_of(new.weight, [(model["second"].weight, *rows) for rows in parts])
    sch["second"].replace(nn.Sequential(new))
    with pytest.raises(
        BuildError, match=r"'second.0.weight' is declared to be made of 'second.weight' \(made_of\), but does not"
    ):
        export_weights(sch, tmp_path)


def fused(sch: Any) -> None:
    sch["transformer.h.0.mlp"].replace(nn.Sequential(nn.Linear(32, 32)))


def removed(sch: Any) -> None:
    sch["transformer.h.0.mlp"].replace(nn.Identity())


def longer(sch: Any) -> None:
    wide = nn.LayerNorm(32)
    wide.weight = nn.Parameter(torch.ones(40))
    sch["transformer.ln_f"].replace(wide)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (fused, r"'transformer.h.0.mlp.0.weight', 'transformer.h.0.mlp.0.bias' were added by a step that does not declare"),
        (removed, r"lacks 'transformer.h.0.mlp.c_fc.weight', 'transformer.h.0.mlp.c_fc.bias', .* of GPT2LMHeadModel, which a"),
        (longer, r"'transformer.ln_f.weight' has shape \(40,\), and \(32,\) in GPT2LMHeadModel as its config says"),
    ],
)
def test_what_the_unmodified_model_has_not_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    sch = slapo.create_schedule(small("gpt2"))
    change(sch)
    with pytest.raises(BuildError, match=message):
        export_weights(sch, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.int8}, r"dtype is torch.int8; give a floating-point type"),
        ({"dtype": "bf16"}, r"dtype is 'bf16'; give a floating-point type"),
        ({"max_shard_size": "5 apples"}, r"max_shard_size is '5 apples'; give a number of bytes, or a text like '5GB'"),
        ({"max_shard_size": 0}, r"max_shard_size is 0;"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=message):
        export_weights(slapo.create_schedule(nn.Linear(2, 2)), tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("given", "size"), [(7, 7), ("5GB", 5 * 10**9), ("1.5 KB", 1500), ("2MiB", 2**21)])
def test_sizes(given: Any, size: int) -> None:
    assert parse_size(given) == size


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="cannot export a Linear; give a schedule, or an engine that has pieces"):
        export_weights(nn.Linear(2, 2), tmp_path)  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match=r"file' is a file; give a folder"):
        export_weights(slapo.create_schedule(nn.Linear(2, 2)), tmp_path / "file")
    with slapo.init_empty_weights():
        empty = nn.Linear(2, 2)
    with pytest.raises(
        BuildError, match="no rank has values of 'weight'; build an engine of the schedule, or call consolidate"
    ):
        export_weights(slapo.create_schedule(empty), tmp_path)
    model = nn.Linear(2, 2)
    model.register_buffer("odd", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(BuildError, match=r"'odd' is of torch.complex128, which safetensors have no name for"):
        export_weights(slapo.create_schedule(model), tmp_path)
    sch = slapo.create_schedule(nn.Linear(2, 2))
    engine = slapo.build(sch, "torch", optimizer=torch.optim.SGD, loss_fn=nn.functional.mse_loss)
    with pytest.raises(BuildError, match="the schedule was built for 'torch'; give the engine that build returned"):
        export_weights(sch, tmp_path)
    engine.close()


def test_a_plain_engine(tmp_path: Path) -> None:
    engine = slapo.build(slapo.create_schedule(nn.Linear(2, 2)))
    export_weights(engine, tmp_path)
    assert written(tmp_path).keys() == {"weight", "bias"}


OWN_MODEL = """
import torch
from transformers import PretrainedConfig, PreTrainedModel

class OwnConfig(PretrainedConfig):
    model_type = "own-of-slapo"

class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(3, 3)
        self.post_init()

    def forward(self, x):
        return self.layer(x)

OwnConfig.register_for_auto_class()
OwnModel.register_for_auto_class("AutoModel")
"""


def test_the_code_of_a_registered_class_goes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_model_of_a_test.py").write_text(OWN_MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    own: Any = importlib.import_module("own_model_of_a_test")
    model = own.OwnModel(own.OwnConfig())
    model.save_pretrained(tmp_path / "theirs")
    export_weights(slapo.create_schedule(model), tmp_path / "ours")
    assert sorted(os.listdir(tmp_path / "ours")) == sorted(os.listdir(tmp_path / "theirs"))
    config = json.loads((tmp_path / "ours/config.json").read_text())
    assert config == json.loads((tmp_path / "theirs/config.json").read_text())
    assert config["auto_map"]["AutoModel"] == "own_model_of_a_test.OwnModel"


def test_a_class_that_needs_more_than_its_config_is_named(tmp_path: Path) -> None:
    class Extra(transformers.GPT2LMHeadModel):
        def __init__(self, config: Any, size: int) -> None:
            super().__init__(config)
            self.extra = nn.Linear(size, size)

    with pytest.raises(BuildError, match="Extra cannot be made of its config alone, .*: TypeError"):
        export_weights(slapo.create_schedule(Extra(small("gpt2").config, 3)), tmp_path)
