"""Text to train on, as bytes: one token is one byte."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from slapo_report import format_count

from ..run_data.settings import Settings, SettingsError


@dataclass(frozen=True)
class Corpus:
    """Bytes to draw sequences from.

    Args:
        tokens: uint8, shape (bytes,).
        source: Where they come from, in words.
    """

    tokens: torch.Tensor
    source: str

    def batches(self, settings: Settings) -> Iterator[dict[str, torch.Tensor]]:
        """The run's batches: ``input_ids`` and ``labels``, int64, shape (batch, seq).

        They depend on the seed, the bytes, ``batch`` and ``seq`` alone, so that every rank of every layout, and the
        reference, sees the same.
        """
        generator = torch.Generator().manual_seed(settings.seed)
        offsets = torch.arange(settings.seq)
        for _ in range(settings.steps):
            starts = torch.randint(len(self.tokens) - settings.seq + 1, (settings.batch, 1), generator=generator)
            ids = self.tokens[starts + offsets].long()
            yield {"input_ids": ids, "labels": ids.clone()}


def read_corpus(settings: Settings) -> Corpus:
    """Read the files of ``--data`` in the order given, or the standard library's source in alphabetical order.

    Raises:
        SettingsError: a file cannot be read or is empty, or all of them are shorter than one sequence.
    """
    if settings.data:
        parts = [_read(Path(name)) for name in settings.data]
        source = ", ".join(settings.data)
    else:
        parts, source = _standard_library()
    tokens = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
    if len(tokens) < settings.seq:
        raise SettingsError(
            f"--data {source}: {format_count(len(tokens), 'byte')}, fewer than one sequence of --seq {settings.seq}; "
            "give more text or a smaller --seq"
        )
    return Corpus(tokens, source)


def _read(path: Path) -> bytes:
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise SettingsError(f"--data {path}: not a file of a known size; give files")
    try:
        content = path.read_bytes()
    except OSError as err:
        raise SettingsError(
            f"--data {path}: cannot be read, {(err.strerror or str(err)).lower()}; give a readable file"
        ) from err
    if not content:
        raise SettingsError(f"--data {path}: the file is empty; give a file with text in it")
    return content


def _standard_library() -> tuple[list[bytes], str]:
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if not files:
        raise SettingsError(f"no --data, and no Python source in {folder}; give a file with --data")
    return [path.read_bytes() for path in files], f"the Python standard library's source ({len(files)} files in {folder})"
