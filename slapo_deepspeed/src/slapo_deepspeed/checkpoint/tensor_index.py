"""Index of the tensors in DeepSpeed's files by original names, written beside the unchanged files.

The files are intercepted before DeepSpeed writes them, so that they can be indexed, and written later.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from slapo_core import BuildError, Program
from slapo_training.checkpoint import Buffers, check_plain, copy_to_cpu, drop_other_buffers
from slapo_training.engines import bytes_of

from ..optimizer.local_tensors import Shares, unsupported_reason
from ..process_state._deepspeed_private import loss_scaler, replaced_save, saves_in_background

WEIGHT = ""
"""State name that stands for the weight itself, or for a buffer."""


class _TensorRequest(NamedTuple):
    """Elements to find in a file.

    Args:
        key: Name of an optimizer state, or ``WEIGHT``.
        start: Offset of the elements in this rank's shard.
        aliases: Names that a file may use for a copy of the weight.
    """

    name: str
    key: str
    start: int
    value: torch.Tensor
    aliases: tuple[str, ...]


class TensorIndex:
    """Recorder of where DeepSpeed writes this rank's elements. Tensors are identified by their memory.

    A tensor that DeepSpeed copies before it writes is identified by name and equal values. Elements that DeepSpeed does not
    write go into a file of their own.

    Args:
        model: DeepSpeed's engine.
        module: This rank's stage.
    """

    def __init__(self, model: Any, module: nn.Module, program: Program) -> None:
        self._found: list[tuple[Any, ...]] = []
        self._wanted: list[_TensorRequest] = []
        self._about: dict[str, Any] = {"why_not": unsupported_reason(model, module), "common": None, "scale": None}
        if not self._about["why_not"]:
            shares = Shares(model, module, program)
            self._collect(shares, module)
            scaler = loss_scaler(model)
            if scaler is not None:
                self._about["scale"] = type(scaler).__name__, dict(vars(scaler))

    def _collect(self, shares: Shares, module: nn.Module) -> None:
        numbers: dict[str, dict[str, Any]] = {}
        odd: dict[str, list[str]] = {}
        aliases: dict[int, list[str]] = {}
        for local, tensor in [*module.named_parameters(), *module.named_buffers()]:
            aliases.setdefault(id(tensor), []).extend((local, f"stage.{local}"))
        known = {name: tuple(aliases.get(key, ())) for key, name in shares.names.items()}
        for share in shares.own:
            self._wanted.append(_TensorRequest(share.name, WEIGHT, share.start, share.value, known[share.name]))
            if shares.optimizer is None or share.stepped is None:
                continue
            for key, value in shares.optimizer.state.get(share.stepped, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == share.stepped.shape:
                    self._wanted.append(_TensorRequest(share.name, key, share.start, share.of(value), ()))
                elif isinstance(value, torch.Tensor) and value.dim() == 0:
                    numbers.setdefault(share.name, {})[key] = (value.item(), value.dtype)
                elif not isinstance(value, torch.Tensor | list | tuple | dict):
                    numbers.setdefault(share.name, {})[key] = (value, None)
                else:
                    odd.setdefault(share.name, []).append(key)
        self._about.update(shares.layout(), numbers=numbers, odd=odd)

    def record_tensors(self, state: Any, file: str) -> None:
        """Record the tensors in the content of a file, before DeepSpeed writes it."""
        if isinstance(state, dict) and "lr_scheduler" in state and "global_steps" in state:
            self._about["common"] = file
        by_memory: dict[int, list[tuple[Any, torch.Tensor]]] = {}
        by_name: dict[Any, list[tuple[Any, torch.Tensor]]] = {}
        for at, tensor in tensors_in(state, ()):
            if tensor.layout is torch.strided and tensor.numel() and tensor.is_contiguous():
                by_memory.setdefault(tensor.untyped_storage().data_ptr(), []).append((at, tensor))
                by_name.setdefault(at[-1], []).append((at, tensor))
        left = []
        for each in self._wanted:
            candidates = by_memory.get(each.value.untyped_storage().data_ptr(), [])
            found = next(((at, offset) for at, own in candidates if (offset := _offset(each.value, own)) is not None), None)
            named = (pair for alias in each.aliases for pair in by_name.get(alias, [])) if found is None else iter(())
            found = found or next(((at, 0) for at, own in named if _is_copy(each.value, own)), None)
            if found is None:
                left.append(each)
            else:
                self._note(each, file, *found)
        self._wanted = left

    def files(self, place: int) -> dict[str, bytes]:
        """Return the index file, and if DeepSpeed left elements out, a file with their present values."""
        found: dict[str, bytes] = {}
        if self._wanted:
            rest = f"rest-{place}.pt"
            found[rest] = bytes_of([each.value.detach().cpu().clone() for each in self._wanted])
            for index, each in enumerate(self._wanted):
                self._note(each, rest, (index,), 0)
        self._about["found"] = self._found
        try:
            check_plain(self._about, "what is kept of the optimizer's groups")
        except BuildError as err:
            self._about = {"why_not": f"an optimizer of which {err}"}
        found[name_of(place)] = bytes_of(self._about)
        return found

    def _note(self, each: _TensorRequest, file: str, at: Any, offset: int) -> None:
        self._found.append((each.name, each.key, each.start, each.value.numel(), file, at, offset))


def name_of(place: int) -> str:
    return f"places-{place}.pt"


def tensors_in(value: Any, at: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Yield every tensor in nested dicts and lists, with the keys that lead to it."""
    if isinstance(value, torch.Tensor):
        yield at, value
    elif isinstance(value, dict):
        for key, each in value.items():
            if isinstance(key, str | int):
                yield from tensors_in(each, (*at, key))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from tensors_in(each, (*at, index))


def _offset(value: torch.Tensor, of: torch.Tensor) -> int | None:
    """Return the offset of ``value`` in a tensor of the same storage, or None if it is not a range of that tensor."""
    offset = int(value.storage_offset()) - int(of.storage_offset())
    fits = value.dtype is of.dtype and value.is_contiguous() and 0 <= offset <= of.numel() - value.numel()
    return offset if fits else None


def _is_copy(value: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        value.dtype is other.dtype
        and value.numel() == other.numel()
        and torch.equal(value.flatten().cpu(), other.flatten().cpu())
    )


class Files:
    """Checkpoint files of this rank.

    ``noting`` records each file's tensors before the file is written. ``copies`` are buffers for copies of the tensors'
    present values; with None each file is written at once.
    """

    def __init__(self, folder: Path, noting: TensorIndex, copies: Buffers | None) -> None:
        self._folder, self._noting, self._copies = folder, noting, copies
        self._left: list[Callable[[], None]] = []

    def take(self, model: Any) -> None:
        """Have DeepSpeed's engine hand over its files. Collective.

        An error of one rank is raised after DeepSpeed's save, because the other ranks wait inside it.

        Raises:
            BuildError: DeepSpeed's config has its own background writer.
        """
        errors, keys = list[Exception](), set[Any]()
        if saves_in_background(model):
            raise BuildError(
                "DeepSpeed's decoupled checkpoint engine writes on behind a save; leave it out of DeepSpeed's config"
            )

        def write_and_record(write: Any, state_dict: Any, path: str, *args: Any, **kwargs: Any) -> Any:
            name = Path(path).relative_to(self._folder).as_posix()
            try:
                self._noting.record_tensors(state_dict, name)
                if self._copies is None:
                    return write(state_dict, path, *args, **kwargs)
                state = _copy(state_dict, name, self._copies, keys)
                self._left.append(lambda: write(state, path, *args, **kwargs))
            except Exception as err:
                errors.append(err)

        with replaced_save(model, write_and_record):
            model.save_checkpoint(str(self._folder))
        if self._copies is not None:
            drop_other_buffers(keys, self._copies)
        if errors:
            raise errors[0]

    def write(self) -> None:
        for write in self._left:
            write()


def _copy(state: Any, name: str, copies: Buffers, keys: set[Any]) -> Any:
    """Return a copy of a file's content; ``keys`` collects those of the buffers in use.

    Each memory is copied once, and views keep sharing it. Buffers are by file and by index of the memory within it.
    """
    known: dict[int, Any] = {}
    memories: dict[Any, torch.UntypedStorage] = {}
    for _, tensor in tensors_in(state, ()):
        if not _is_plain(tensor):
            continue
        memory = tensor.untyped_storage()
        which = memory.data_ptr(), memory.nbytes(), tensor.device
        if which not in memories:
            key = name, len(memories)
            keys.add(key)
            of_bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory)
            memories[which] = copy_to_cpu(of_bytes, key, copies).untyped_storage()
        view = torch.empty(0, dtype=tensor.dtype)
        view.set_(memories[which], tensor.storage_offset(), tensor.shape, tensor.stride())
        is_parameter = isinstance(tensor, nn.Parameter)
        known[id(tensor)] = nn.Parameter(view, tensor.requires_grad) if is_parameter else view
    return copy.deepcopy(state, known)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return True for a plain view of memory; any other tensor is copied by its own ``__deepcopy__``."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and not vars(tensor)
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_meta or tensor.is_conj() or tensor.is_neg())
    )
