"""Arguments of the script: by name for configurations, and with the values of a trial in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slapo_tune.trial.script_arguments import ScriptArguments, substitute, uses_symbol

LINE = [
    "slapo-megatron",
    "--model",
    "gpt2",
    "--gpus",
    "8",
    "--fp16",
    "--lr=-1e-3",
    "--shift",
    "-1",
    "-b",
    "4",
    "--seq-len",
    "512",
]


def test_flags_and_words_by_name() -> None:
    args = ScriptArguments(LINE)
    assert "slapo-megatron" in args
    assert "megatron" not in args
    assert args["model"] == "gpt2"
    assert int(args["gpus"]) == 8
    assert args["fp16"] is True
    assert (args["lr"], args["shift"], args["b"]) == ("-1e-3", "-1", "4")
    assert args["seq-len"] == args["seq_len"] == args["--seq-len"] == "512"
    assert args.get("seed", 0) == 0
    assert len(args) == len([*args]) == 8
    with pytest.raises(KeyError):
        args["batch-size"]


def test_the_last_of_a_flag_counts() -> None:
    assert ScriptArguments(["--gpus", "8", "--gpus=4"])["gpus"] == "4"


VALUES = {"batch_size": 16, "ckpt_ratio": 0.5}


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("batch_size", "16"),
        ("--batch-size=batch_size", "--batch-size=16"),
        ("{batch_size},64", "16,64"),
        ("--sizes={batch_size}x{ckpt_ratio}", "--sizes=16x0.5"),
        ("--batch_size", "--batch_size"),
        ("batch_sizes", "batch_sizes"),
        ("name=batch_size", "name=batch_size"),
        ('{"lr": {other}}', '{"lr": {other}}'),
        ("--a=b=batch_size", "--a=b=batch_size"),
        ("", ""),
    ],
)
def test_names_are_replaced_where_they_stand_alone_or_in_braces(argument: str, expected: str) -> None:
    assert substitute(argument, VALUES) == expected


@given(st.text("ab{}=-_ "))
def test_text_without_a_name_stays(text: str) -> None:
    assert substitute(text, {}) == text


def test_whether_a_script_takes_a_symbol() -> None:
    assert uses_symbol(["--ratio", "ckpt_ratio"], "ckpt_ratio")
    assert uses_symbol(["--ratio={ckpt_ratio}"], "ckpt_ratio")
    assert not uses_symbol(["--ckpt_ratio", "0.5"], "ckpt_ratio")
