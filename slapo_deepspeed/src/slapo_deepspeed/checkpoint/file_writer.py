"""Files of DeepSpeed's checkpoint, intercepted before DeepSpeed writes them so that they can be written later."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slapo_core import BuildError
from slapo_training.checkpoint import Buffers, copy_to_cpu, drop_other_buffers

from ..process_state._deepspeed_private import replaced_save, saves_in_background
from .tensor_index import TensorIndex, tensors_in


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
