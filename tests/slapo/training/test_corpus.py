"""The text that ``slapo train`` reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slapo.run_data.settings import Settings, SettingsError
from slapo.training.corpus import read_corpus


def test_default_is_the_standard_library_the_same_each_time():
    first, second = read_corpus(Settings()), read_corpus(Settings())
    assert "standard library" in first.source
    assert torch.equal(first.tokens, second.tokens)
    assert b"import" in bytes(first.tokens[:10_000].tolist())


def test_files_are_joined_in_the_order_given(tmp_path: Path):
    (tmp_path / "b").write_bytes(b"second " * 20)
    (tmp_path / "a").write_bytes(b"first " * 20)
    corpus = read_corpus(Settings(data=(str(tmp_path / "b"), str(tmp_path / "a"))))
    assert bytes(corpus.tokens.tolist()) == b"second " * 20 + b"first " * 20


def test_batches_are_pieces_of_the_text(tmp_path: Path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(200)))
    settings = Settings(data=(str(path),), steps=3, batch=4, microbatches=2, seq=16)
    batches = list(read_corpus(settings).batches(settings))
    assert len(batches) == 3
    for batch in batches:
        assert batch["input_ids"].shape == (4, 16)
        assert torch.equal(batch["input_ids"].diff(dim=1), torch.ones(4, 15, dtype=torch.long))
        assert torch.equal(batch["input_ids"], batch["labels"])


def test_batches_do_not_depend_on_the_layout_or_the_generator():
    corpus = read_corpus(Settings())
    one = list(corpus.batches(Settings(steps=2)))
    torch.rand(7)
    other = list(corpus.batches(Settings(steps=2, tp=2, pp=2, dp=2, microbatches=2)))
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(one, other, strict=True))


def test_another_seed_gives_other_batches():
    corpus = read_corpus(Settings())
    one, other = (next(corpus.batches(Settings(seed=seed)))["input_ids"] for seed in (0, 1))
    assert not torch.equal(one, other)


def test_one_sequence_is_enough(tmp_path: Path):
    path = tmp_path / "text"
    path.write_bytes(b"x" * 16)
    settings = Settings(data=(str(path),), seq=16)
    assert next(read_corpus(settings).batches(settings))["input_ids"].shape == (8, 16)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"missing: cannot be read, no such file or directory; give a readable file"),
        (b"", r"empty: the file is empty; give a file with text in it"),
        (b"short", r"5 bytes, fewer than one sequence of --seq 128; give more text or a smaller --seq"),
    ],
    ids=["missing", "empty", "short"],
)
def test_data_that_cannot_be_used(tmp_path: Path, content: bytes | None, message: str):
    path = tmp_path / ("missing" if content is None else "short" if content else "empty")
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError, match=message):
        read_corpus(Settings(data=(str(path),)))


def test_a_folder_is_no_file(tmp_path: Path):
    with pytest.raises(SettingsError, match="cannot be read, is a directory"):
        read_corpus(Settings(data=(str(tmp_path),)))


def test_a_device_without_end_is_no_data():
    with pytest.raises(SettingsError, match="--data /dev/zero: not a file of a known size"):
        read_corpus(Settings(data=("/dev/zero",)))
