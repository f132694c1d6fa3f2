"""The folder of an export: whatever happens at whatever moment, what is read there is one export and not parts of two."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import slapo
from slapo_core import BuildError
from slapo_weights import export_weights
from slapo_weights.safetensors_files.writer import DTYPES

SIZES = {"one": "1GB", "some": "2KB", "many": "1KB"}


class Killed(BaseException):
    """As if the process had ended: nobody cleans up."""


def model_of(number: int) -> nn.Module:
    """All of its numbers are this one."""
    model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(6)))
    for parameter in model.parameters():
        nn.init.constant_(parameter, number)
    return model


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Read the single file, or else the files of the index, as ``from_pretrained`` does."""
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return {name: load_file(folder / file)[name] for name, file in index.items()}


def numbers(folder: Path) -> set[float]:
    found = read(folder)
    assert found.keys() == model_of(0).state_dict().keys()
    return {value for tensor in found.values() for value in tensor.unique().tolist()}


def ending_at(moment: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the change number ``moment`` of the folder fail."""
    seen = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == moment:
                raise error("stopped here")
            return call(*args, **kwargs)

        return made

    monkeypatch.setattr(os, "replace", counted(os.replace))
    monkeypatch.setattr(Path, "unlink", counted(Path.unlink))
    monkeypatch.setattr(Path, "rmdir", counted(Path.rmdir))


CHANGES = [("one", "many"), ("many", "one"), ("one", "one"), ("many", "some"), ("many", "many")]
MOMENTS = [
    pytest.param(before, after, error, marks=[pytest.mark.slow] * (number > 1 or error is OSError))
    for number, (before, after) in enumerate(CHANGES)
    for error in (Killed, OSError)
]


@pytest.mark.parametrize(("before", "after", "error"), MOMENTS)
def test_what_is_read_is_one_export_at_every_moment(
    before: str, after: str, error: type[BaseException], tmp_path: Path
) -> None:
    found = []
    for moment in range(1, 100):
        folder = tmp_path / str(moment)
        export_weights(slapo.create_schedule(model_of(0)), folder, max_shard_size=SIZES[before])
        with pytest.MonkeyPatch.context() as patched:
            ending_at(moment, error, patched)
            try:
                export_weights(slapo.create_schedule(model_of(1)), folder, max_shard_size=SIZES[after])
                break
            except (error, BuildError):
                (number,) = numbers(folder)
                found.append(number)
        export_weights(slapo.create_schedule(model_of(2)), folder, max_shard_size=SIZES[after])
        assert numbers(folder) == {2}
        index = [] if after == "one" else ["model.safetensors.index.json"]
        shards = [file.name for file in folder.glob("*.safetensors")]
        assert sorted(file.name for file in folder.iterdir()) == sorted([*shards, *index])
        assert sum(file.stat().st_size for file in folder.glob("*.safetensors")) < 6 * (12 * 13 * 4 + 400)
    assert found == sorted(found)
    assert found[0] == 0
    assert numbers(folder) == {1}


def gpt2(number: int) -> nn.Module:
    """All of its numbers are this one, and its config tells which."""
    activation = ["relu", "gelu"][number]
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_head=2, n_layer=1, activation_function=activation)
    )
    for parameter in model.parameters():
        nn.init.constant_(parameter, number)
    return model


@pytest.mark.sampled(2)
@pytest.mark.parametrize("error", [Killed, OSError])
@pytest.mark.parametrize(("before", "after"), [("one", "some"), ("some", "one"), ("one", "one"), ("some", "some")])
def test_weights_are_never_read_with_the_config_of_others(
    before: str, after: str, error: type[BaseException], tmp_path: Path
) -> None:
    found = []
    for moment in range(1, 100):
        folder = tmp_path / str(moment)
        export_weights(slapo.create_schedule(gpt2(0)), folder, max_shard_size=SIZES[before])
        with pytest.MonkeyPatch.context() as patched:
            ending_at(moment, error, patched)
            try:
                export_weights(slapo.create_schedule(gpt2(1)), folder, max_shard_size=SIZES[after])
                break
            except (error, BuildError):
                if error is OSError or {"model.safetensors", "model.safetensors.index.json"} & {*os.listdir(folder)}:
                    (number,) = {value for tensor in read(folder).values() for value in tensor.unique().tolist()}
                    found.append(number)
                    activation = json.loads((folder / "config.json").read_text())["activation_function"]
                    assert activation == ["relu", "gelu"][int(number)]
                else:
                    found.append(0.5)
    assert found == sorted(found)
    assert found[0] == 0
    assert (0.5 in found) == (error is Killed)


def test_a_file_has_every_type(tmp_path: Path) -> None:
    model = nn.Module()
    for number, dtype in enumerate(DTYPES):
        model.register_buffer(f"buffer{number}", torch.arange(5).to(dtype))
    export_weights(slapo.create_schedule(model), tmp_path)
    found, expected = load_file(tmp_path / "model.safetensors"), model.state_dict()
    assert [name for name in expected if found[name].dtype is not expected[name].dtype] == []
    assert [name for name in expected if not torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8))] == []
