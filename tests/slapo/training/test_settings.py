"""Flags of ``slapo train`` that do not fit together, and models that are built from them."""

from __future__ import annotations

import pytest
import torch

from slapo.run_data.settings import Settings, SettingsError
from slapo.training.models import build_config, build_model
from slapo_core import UnknownNameError, init_empty_weights
from slapo_report import format_count

FAMILIES = [
    "gpt2",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "opt",
    "gpt_neox",
    "gptj",
    "bloom",
    "phi",
    "gemma2",
    "mixtral",
    "bart",
]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tp": 3}, r"--tp 3: 4 heads cannot be divided among 3 ranks; use 1, 2 or 4"),
        ({"pp": 6}, r"--pp 6: the model has 4 layers, fewer than 6 stages; use --layers 6 or more, or a smaller --pp"),
        (
            {"pp": 4, "schedule_kind": "zbv"},
            r"--pp 4: the model has 4 layers, fewer than 8 stages; use --layers 8 or more, or a smaller --pp",
        ),
        ({"batch": 10}, r"--batch 10: not divisible by 1 data-parallel rank x 4 micro-batches; use a multiple of 4"),
        ({"heads": 5}, r"--heads 5: --hidden 64 is not divisible by it; use 1, 2, 4, 8, 16, 32 or 64"),
        ({"sequence_parallel": True}, r"--sequence-parallel: there is nothing to split among 1 tensor-parallel rank"),
        ({"sequence_parallel": True, "tp": 2, "seq": 33}, r"--sequence-parallel: 33 bytes cannot be divided among 2 tensor"),
        ({"steps": 0}, r"--steps 0: not a positive number; use 1 or more"),
        ({"tp": 0}, r"--tp 0: not a positive number"),
        ({"seq": 1}, r"--seq 1: nothing to predict"),
        ({"dropout": 1.0}, r"--dropout 1.0: not a probability"),
        ({"lr": float("nan")}, r"--lr nan: not a learning rate; use a positive number"),
        ({"lr": -1.0}, r"--lr -1.0: not a learning rate"),
        ({"data_parallel": "fsdp", "target": "deepspeed"}, r"--data-parallel fsdp: target 'deepspeed' has no such option"),
        ({"schedule_kind": "zbv", "target": "megatron"}, r"--schedule-kind zbv: target 'megatron' has 1f1b and interleaved"),
        ({"schedule_kind": "interleaved", "target": "deepspeed"}, r"--schedule-kind interleaved: target 'deepspeed' has 1f1b"),
        ({"seed": 2**63}, r"--seed 9223372036854775808: out of range"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_flags_that_do_not_fit(flags: dict[str, int], message: str):
    with pytest.raises(SettingsError, match=message):
        Settings(**flags).check()


@pytest.mark.parametrize(("number", "words"), [(1, "1 micro-batch"), (2, "2 micro-batches")])
def test_a_number_and_its_noun_agree(number: int, words: str):
    assert format_count(number, "micro-batch", "micro-batches") == words


def test_defaults_fit():
    Settings().check()
    Settings(tp=2, pp=2, dp=2).check()


def test_a_schedule_file_may_split_what_it_likes():
    Settings(tp=3, schedule="mine.py").check()


@pytest.mark.parametrize("model", FAMILIES)
def test_sizes_reach_every_family(model: str):
    settings = Settings(model=model, layers=3, hidden=48, heads=4, seq=24)
    with init_empty_weights(include_buffers=True):
        built = build_model(settings)
    assert built.config.num_hidden_layers == 3
    assert built.config.hidden_size == 48
    assert built.config.num_attention_heads == 4
    assert built.config.vocab_size == 256
    assert sum(p.numel() for p in built.parameters()) < 2_000_000


@pytest.mark.parametrize("model", FAMILIES)
def test_every_family_learns_from_bytes(model: str):
    settings = Settings(model=model, layers=2, hidden=32, heads=4, seq=16)
    built = build_model(settings)
    ids = torch.randint(256, (2, 16))
    built(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.parametrize("model", ["gpt2", "opt", "llama", "gpt_neox"])
def test_dropout_is_set_everywhere(model: str):
    for value in (0.0, 0.3):
        built = build_model(Settings(model=model, dropout=value))
        assert {module.p for module in built.modules() if isinstance(module, torch.nn.Dropout)} <= {value}


def test_unknown_model_gets_a_suggestion():
    with pytest.raises(
        UnknownNameError, match="--model gtp2: transformers .* has no language model of type 'gtp2'; try .*gpt2"
    ):
        build_config(Settings(model="gtp2"))


def test_a_model_without_such_sizes_is_refused():
    with pytest.raises(SettingsError, match="--model mamba: its config has none of num_attention_heads, .* use another model"):
        build_config(Settings(model="mamba"))


@pytest.mark.parametrize("layers", [2, 3])
def test_a_pattern_of_layers_is_repeated(layers: int):
    config = build_config(Settings(model="gpt_neo", layers=layers))
    assert config.attention_layers == ["global", "local", "global"][:layers]


def test_what_transformers_says_of_sizes_is_in_the_sentence():
    with pytest.raises(SettingsError) as caught:
        build_config(Settings(model="llama", hidden=20, heads=4))
    said = "RoPE requires an even rotary dimension, but got `head_dim`=5"
    assert str(caught.value).startswith(f"--model llama: its config refuses these sizes: {said}")
    assert str(caught.value).endswith("; try other sizes")
    assert "\n" not in str(caught.value)
