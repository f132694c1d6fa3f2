"""The files of DeepSpeed's checkpoint: as it hands them to what writes, which may do so later."""

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
from .tensor_index import Places, tensors_in


class Files:
    """Those of this rank.

    Args:
        folder: Where they go.
        noting: Sees each before it is written.
        copies: Memory that their tensors are copied to as they are now; None to write each at once.
    """

    def __init__(self, folder: Path, noting: Places, copies: Buffers | None) -> None:
        self._folder, self._noting, self._copies = folder, noting, copies
        self._left: list[Callable[[], None]] = []

    def take(self, model: Any) -> None:
        """Have DeepSpeed hand them over. Collective; what one rank cannot write is an error behind it, as others wait in it.

        Args:
            model: DeepSpeed's engine.

        Raises:
            BuildError: what writes does so behind a save by itself.
        """
        errors, keys = list[Exception](), set[Any]()
        if saves_in_background(model):
            raise BuildError(
                "DeepSpeed's decoupled checkpoint engine writes on behind a save; leave it out of DeepSpeed's config"
            )

        def noted(write: Any, state_dict: Any, path: str, *args: Any, **kwargs: Any) -> Any:
            name = Path(path).relative_to(self._folder).as_posix()
            try:
                self._noting.see(state_dict, name)
                if self._copies is None:
                    return write(state_dict, path, *args, **kwargs)
                state = _copy(state_dict, name, self._copies, keys)
                self._left.append(lambda: write(state, path, *args, **kwargs))
            except Exception as err:
                errors.append(err)

        with replaced_save(model, noted):
            model.save_checkpoint(str(self._folder))
        if self._copies is not None:
            drop_other_buffers(keys, self._copies)
        if errors:
            raise errors[0]

    def write(self) -> None:
        """Write what was copied."""
        for write in self._left:
            write()


def _copy(state: Any, name: str, copies: Buffers, keys: set[Any]) -> Any:
    """What is written to a file, as it is now: the memory behind its tensors once, in that of the file, as views share it.

    Args:
        state: It.
        name: Of the file.
        copies: Memory by file and by number within it.
        keys: Of what is used of it; added to.
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
    """Whether it is nothing but a view of memory; any other is copied as it says itself."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and not vars(tensor)
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_meta or tensor.is_conj() or tensor.is_neg())
    )
