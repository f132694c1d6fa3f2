"""Boxes of tensors in safetensors files: their values, the bytes that reading them takes, and what is not such a file."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from slapo_core import BuildError
from slapo_weights.huggingface.load_conversion import UnreadTensor
from slapo_weights.safetensors_files.reader import WeightFiles
from slapo_weights.tensor_views import box_view
from slapo_weights.tensor_views.box_view import TensorView, concatenate, stack


def bytes_of_this_process() -> int:
    """That it has read of files, as the kernel counts."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "model.safetensors"
    tensors = {
        "cube": torch.randn(4, 6, 10),
        "half": torch.randn(300, 500).to(torch.bfloat16),
        "bits": torch.rand(7) > 0.5,
        "none": torch.empty(0, 3),
        "one": torch.tensor(3, dtype=torch.int64),
    }
    save_file(tensors, path)
    torch.save(tensors, path.with_name("tensors.pt"))
    return path


def whole(file: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(file.with_name("tensors.pt"))
    return found


def test_every_dtype_and_shape_is_read(file: Path) -> None:
    files = WeightFiles(file)
    for name, tensor in whole(file).items():
        assert (files.entries[name].shape, files.entries[name].dtype) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(files.read(name, [0] * tensor.dim(), tensor.shape), tensor)


@given(st.data())
def test_a_box_is_the_slice_and_no_other_byte_is_read(file: Path, data: st.DataObject) -> None:
    files, shape = WeightFiles(file), (4, 6, 10)
    starts = [data.draw(st.integers(0, size - 1)) for size in shape]
    sizes = [data.draw(st.integers(0, size - start)) for size, start in zip(shape, starts, strict=True)]
    found = files.read("cube", starts, sizes)
    place = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
    assert torch.equal(found, whole(file)["cube"][place])
    assert files.bytes_read == prod(sizes) * 4


@pytest.mark.parametrize(("starts", "sizes"), [((75, 0), (75, 500)), ((0, 125), (300, 125))], ids=["rows", "columns"])
def test_the_kernel_counts_the_same_bytes(file: Path, starts: tuple[int, int], sizes: tuple[int, int]) -> None:
    files = WeightFiles(file)
    files.read("half", starts, sizes)
    before = bytes_of_this_process()
    alone = bytes_of_this_process() - before  # what counting itself reads
    before = bytes_of_this_process()
    files.read("half", starts, sizes)
    assert bytes_of_this_process() - before - alone == prod(sizes) * 2


def test_put_together_turned_and_cut_it_is_what_torch_makes(file: Path) -> None:
    files, tensors = WeightFiles(file), whole(file)
    cube, view = tensors["cube"], TensorView.of(files, "cube")
    made = stack([view.narrow(0, 1, 3), view.narrow(0, 2, 4)], 1).transpose(0, 3)
    same = torch.stack([cube[1:3], cube[2:4]], 1).transpose(0, 3)
    assert torch.equal(made.read(files, torch.float32), same)
    cut = concatenate([made.narrow(2, 0, 2), made.narrow(2, 4, 6)], 2).local(0, [(7, 9), (0, 3)])
    expected = torch.cat([same[:, :, :2], same[:, :, 4:]], 2)
    expected = torch.cat([expected[7:9], expected[:3]])
    before = files.bytes_read
    assert torch.equal(cut.read(files, torch.float64), expected.double())
    assert files.bytes_read - before == expected.numel() * 4
    assert torch.equal(made.narrow(1, 1, 2).squeeze(1).read(files, torch.float32), same[:, 1])


Change = Callable[[Any], Any]
CHANGES: dict[str, Change] = {
    "merged": lambda x: x.reshape(4, -1),
    "all": lambda x: x.reshape(-1),
    "split": lambda x: x.view(2, 2, 3, 2, 10),
    "ones": lambda x: x.reshape([1, 4, 1, 60, 1]),
    "interleaved": lambda x: x.reshape(4, 3, 2, 10).transpose(1, 2).reshape(x.shape),
    "heads turned": lambda x: x.reshape(24, 10).view(2, 6, 2, 10).transpose(1, 2).reshape(24, 10),
    "turned": lambda x: x.transpose(0, 2).reshape(5, 2, 24),
    "chunk": lambda x: torch.chunk(x, 3, 1)[1].reshape(2, 4, 10).transpose(0, 1).reshape(8, 10),
    "cat": lambda x: torch.cat([x, x]).reshape(16, 30).transpose(0, 1).reshape(3, 10, 16),
}


@pytest.mark.parametrize("change", CHANGES)
def test_in_another_shape_it_is_what_torch_makes(change: str, file: Path) -> None:
    files, expected = WeightFiles(file), CHANGES[change](whole(file)["cube"])
    found = CHANGES[change](UnreadTensor(TensorView.of(files, "cube")))
    assert (found.shape, found.ndim, found.dtype) == (expected.shape, expected.ndim, expected.dtype)
    assert torch.equal(found.source.read(files, torch.float32), expected)
    assert files.bytes_read == expected.numel() * 4
    half = found.source.narrow(0, 0, expected.shape[0] // 2)
    assert torch.equal(half.read(files, torch.float32), expected[: expected.shape[0] // 2])


@pytest.mark.parametrize(("shape", "told"), [((5, 48), "4 cannot be parts of 5"), ((4, 7), r"\[4, 6, 10\] cannot be \[4, 7\]")])
def test_a_shape_that_does_not_fit_is_refused(shape: tuple[int, int], told: str, file: Path) -> None:
    with pytest.raises(ValueError, match=told):
        TensorView.of(WeightFiles(file), "cube").reshape(shape)


def test_what_is_empty_has_no_boxes_in_any_shape(file: Path) -> None:
    files = WeightFiles(file)
    assert TensorView.of(files, "none").reshape((3, 0)).read(files, torch.float32).shape == (3, 0)


@pytest.mark.parametrize("limit", [1, 40, 100])
def test_what_is_cast_or_turned_is_read_in_parts(limit: int, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_view, "_COPIED", limit)
    files, cube = WeightFiles(file), whole(file)["cube"]
    view = TensorView.of(files, "cube").narrow(1, 2, 6)
    assert torch.equal(view.read(files, torch.float64), cube[:, 2:6].double())
    assert files.bytes_read == 4 * 4 * 10 * 4
    both = stack([view.transpose(0, 2), view.transpose(0, 2)], 1)
    assert torch.equal(both.read(files, torch.float32), torch.stack([cube[:, 2:6].transpose(0, 2)] * 2, 1))


def test_rows_behind_the_last_are_zeros(file: Path) -> None:
    files = WeightFiles(file)
    found = TensorView.of(files, "half").pad(304).local(0, [(152, 304)]).read(files, torch.bfloat16)
    assert torch.equal(found[:148], whole(file)["half"][152:])
    assert not found[148:].any()


def test_tensors_that_do_not_go_together_are_refused(file: Path) -> None:
    files = WeightFiles(file)
    with pytest.raises(ValueError, match=r"tensors of torch.bfloat16 \[300, 500\], torch.float32 \[4, 6, 10\] do not go"):
        concatenate([TensorView.of(files, "cube"), TensorView.of(files, "half")], 0)


Damage = Callable[[Path], None]


def header(changes: dict[str, object]) -> Damage:
    def write(folder: Path) -> None:
        entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}
        told = json.dumps({"w": entry}).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(told)) + told + bytes(8))

    return write


def shards(folder: Path) -> dict[str, str]:
    """Two files with an index."""
    (folder / "model.safetensors").unlink()
    save_file({"a": torch.ones(2)}, folder / "x-1.safetensors")
    save_file({"b": torch.ones(2)}, folder / "x-2.safetensors")
    index(folder, named := {"a": "x-1.safetensors", "b": "x-2.safetensors"})
    return named


def index(folder: Path, named: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))


def rewritten(**changes: str) -> Damage:
    return lambda folder: index(folder, {**shards(folder), **changes})


def only_index(named: object) -> Damage:
    def write(folder: Path) -> None:
        nothing(folder)
        index(folder, named)

    return write


def nothing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def content(data: bytes) -> Damage:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(data)

    return write


def cut(size: int) -> Damage:
    def write(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:size])

    return write


def without_a_shard(folder: Path) -> None:
    shards(folder)
    (folder / "x-2.safetensors").unlink()


def swapped(folder: Path) -> None:
    shards(folder)
    (folder / "x-1.safetensors").rename(folder / "x")
    (folder / "x-2.safetensors").rename(folder / "x-1.safetensors")
    (folder / "x").rename(folder / "x-2.safetensors")


def twice(folder: Path) -> None:
    shards(folder)
    save_file({"a": torch.ones(2), "b": torch.zeros(2)}, folder / "x-2.safetensors")


def another_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter.safetensors")


def pickles(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


BAD: dict[str, tuple[Damage, str]] = {
    "nothing": (nothing, "no weights in .*; it has neither model.safetensors nor"),
    "another name": (another_name, "nor model.safetensors.index.json; give the path of adapter.safetensors, if it is that"),
    "pickles": (pickles, "weights as pickles only, pytorch_model.bin, which run code when read; convert it with"),
    "no bytes": (cut(0), "is not a whole safetensors file: its header is longer than the file"),
    "half a header": (cut(20), "is not a whole safetensors file: its header is longer than the file"),
    "truncated": (cut(-1), r"not a whole safetensors file: it has \d+ bytes and its header says \d+"),
    "longer": (content(b"\2" + bytes(7) + b"{}x"), "not a whole safetensors file: it has 11 bytes and its header says 10"),
    "no header": (content(bytes(8) + b"{}"), "not a whole safetensors file"),
    "a list": (content(b"\2" + bytes(7) + b"[]"), "is not a whole safetensors file: its header is not a table"),
    "unknown dtype": (header({"dtype": "F4"}), "holds w as F4, which no torch tensor is"),
    "other size": (header({"shape": [3]}), "w does not lie where it says"),
    "negative shape": (header({"shape": [-1, -2]}), "what it says of w cannot be read"),
    "a broken shape": (header({"shape": [2.0]}), "what it says of w cannot be read"),
    "an endless shape": (header({"shape": [float("inf")]}), "what it says of w cannot be read"),
    "a shape in words": (header({"shape": "2"}), "what it says of w cannot be read"),
    "a deep header": (content((9**5).to_bytes(8, "little") + b"[" * 9**5), "not a whole safetensors file: .*recursion"),
    "a long name": (rewritten(a="x" * 300), "names the file x+, which is not beside it"),
    "no offsets": (header({"data_offsets": None}), "what it says of w cannot be read"),
    "a missing shard": (without_a_shard, "names the file x-2.safetensors, which is not beside it"),
    "swapped shards": (swapped, "names 2 tensors that its files lack: a, b"),
    "a tensor that is not there": (rewritten(c="x-1.safetensors"), "names 1 tensors that its files lack: c"),
    "a tensor of another file": (rewritten(a="x-2.safetensors"), "names 1 tensors that its files lack: a|does not name"),
    "a tensor in two files": (twice, "a is in .*x-1.safetensors and in .*x-2.safetensors; one of them has to go"),
    "a file elsewhere": (rewritten(a="../x-1.safetensors"), "names '../x-1.safetensors', which is not in its folder"),
    "an index of nothing": (only_index({}), "names no tensors"),
    "an index that is none": (only_index([1]), "is not an index of safetensors files"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_weights_is_refused(name: str, tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    damage, match = BAD[name]
    damage(tmp_path)
    with pytest.raises(BuildError, match=match):
        WeightFiles(tmp_path)


def test_no_such_folder_and_no_such_kind(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no weights at .*nowhere: there is no such file or folder"):
        WeightFiles(tmp_path / "nowhere")
    torch.save({}, tmp_path / "model.pt")
    with pytest.raises(BuildError, match="model.pt is not a safetensors file; convert it"):
        WeightFiles(tmp_path / "model.pt")


def test_a_file_that_shrinks_while_it_is_read_is_told(file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "w.safetensors"
    copy.write_bytes(file.read_bytes())
    files = WeightFiles(copy)
    copy.write_bytes(copy.read_bytes()[:400])
    with pytest.raises(BuildError, match=r"cannot read half from .*w.safetensors: it ends too early"):
        files.read("half", (0, 0), (300, 500))


def test_a_folder_of_links_is_read_as_the_cache_has_it(file: Path, tmp_path: Path) -> None:
    """The cache of the hub keeps files under other names and links to them."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots" / "main").mkdir(parents=True)
    (tmp_path / "blobs" / "abc123").write_bytes(file.read_bytes())
    link = tmp_path / "snapshots" / "main" / "model.safetensors"
    link.symlink_to(Path("../../blobs/abc123"))
    for source in (link, link.parent):
        assert torch.equal(WeightFiles(source).read("cube", (0, 0, 0), (4, 6, 10)), whole(file)["cube"])
    link.rename(link.with_name("x-1.safetensors"))
    index(link.parent, dict.fromkeys(whole(file), "x-1.safetensors"))
    assert WeightFiles(link.parent).entries.keys() == whole(file).keys()
