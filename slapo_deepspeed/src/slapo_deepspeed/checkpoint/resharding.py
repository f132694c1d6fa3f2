"""Resharding on load, for another layout or stage of ZeRO: each rank reads its part of each tensor by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slapo_core import BuildError, Program, gather_objects
from slapo_training.engines import check_shapes

from ..optimizer.local_tensors import Share, Shares
from ..process_state._deepspeed_private import COUNTERS, loss_scaler, set_counters
from .tensor_index import WEIGHT
from .tensor_reader import SAME_LAYOUT, CheckpointReader


class ReshardedState:
    """Data that an engine reads from a checkpoint; the engine is unchanged until ``put``. The constructor is collective."""

    def __init__(self, model: Any, shares: Shares, program: Program) -> None:
        self._model, self._shares = model, shares
        self._groups = self._shares.groups()
        named = {name: piece.full_shape for name, piece in self._shares.pieces.items()}
        everyone = gather_objects((named, [name for group in self._groups for name in group["names"]]), program.mesh)
        self._shapes = {name: shape for own, _ in everyone for name, shape in own.items()}
        self._stepped = {name for _, own in everyone for name in own}
        self._options: list[dict[str, Any]] = []
        self._weights: list[torch.Tensor] = []
        self._states: dict[int, dict[str, Any]] = {}
        self._common: Mapping[str, Any] = {}
        self._scale: Any = None

    def read(self, saved: CheckpointReader) -> None:
        """Read this rank's data. Not collective.

        Raises:
            BuildError: the checkpoint is of another model, or of an optimizer whose states do not fit.
        """
        check_shapes(saved.shapes(), self._shapes)
        if self._shares.optimizer is not None:
            self._options = self._group_options(saved)
        self._common = self._chosen_common(saved)
        self._scale = next((each["scale"] for each in saved.places if each["scale"] is not None), None)
        self._weights = [self._read_elements(saved, share, WEIGHT) for share in self._shares.held]
        stepped: dict[int, tuple[torch.Tensor, list[Share]]] = {}
        for share in self._shares.held:
            if share.stepped is not None:
                stepped.setdefault(id(share.stepped), (share.stepped, []))[1].append(share)
        for number, (tensor, shares) in stepped.items():
            if state := self._state(saved, tensor, shares):
                self._states[number] = state

    @torch.no_grad()
    def put(self) -> None:
        with self._shares.write_context():
            for share, numbers in zip(self._shares.held, self._weights, strict=True):
                share.value.copy_(numbers.view(share.value.shape))
            if self._shares.optimizer is not None:
                self._shares.put_states(self._states, self._options)
        scaler = loss_scaler(self._model)
        if getattr(scaler, "dynamic", False) and self._scale is not None and self._scale[0] == type(scaler).__name__:
            vars(scaler).update(self._scale[1])
        if self._model.lr_scheduler is not None:
            self._model.lr_scheduler.load_state_dict(self._common["lr_scheduler"])
        set_counters(self._model, self._common)

    def _read_elements(self, saved: CheckpointReader, share: Share, key: str) -> torch.Tensor:
        return saved.read(share.name, key, self._shares.pieces[share.name], share.start, share.value.numel())

    def _state(self, saved: CheckpointReader, stepped: torch.Tensor, shares: list[Share]) -> dict[str, Any]:
        """Return the optimizer's state for one stepped tensor; elements without a saved state get zeros."""
        state: dict[str, Any] = {}
        found: dict[str, dict[tuple[Any, Any], str]] = {}
        for share in shares:
            for key in saved.keys(share.name):
                numbers = self._read_elements(saved, share, key)
                if key not in state:
                    state[key] = torch.zeros(stepped.shape, dtype=numbers.dtype)
                part = share.of(state[key])
                part.copy_(numbers.view(part.shape))
            for key, values in saved.numbers(share.name).items():
                found.setdefault(key, {}).update(dict.fromkeys(values, share.name))
        for key, by_value in found.items():
            (value, kind), *others = by_value
            if others:
                names = " and ".join(f"{each[0]} for {name!r}" for each, name in [*by_value.items()][:2])
                raise BuildError(f"the optimizer's {key!r} is {names}, which stages of ZeRO keep once; {SAME_LAYOUT}")
            state[key] = value if kind is None else torch.tensor(value, dtype=kind)
        return state

    def _group_options(self, saved: CheckpointReader) -> list[dict[str, Any]]:
        """Return the saved options of this rank's groups.

        Raises:
            BuildError: the optimizer had other parameters or states of other shapes, or parameters of one group had
                different options.
        """
        options: dict[str, dict[str, Any]] = {}
        for each in saved.places:
            for group in each["groups"]:
                options |= dict.fromkeys(group["names"], group["options"])
        for name in sorted(options.keys() ^ self._stepped):
            where = "the checkpoint's, not this engine's" if name in options else "this engine's, not the checkpoint's"
            raise BuildError(f"{name!r} is in a group of {where} optimizer; build with the same parameters to train")
        for name in sorted(self._stepped):
            if odd := saved.unsupported_state(name):
                raise BuildError(
                    f"{odd!r} in the state of {type(self._shares.optimizer).__name__} is no number for each element of "
                    f"{name!r}; {SAME_LAYOUT}"
                )
        found = []
        for number, group in enumerate(self._groups):
            if not group["names"]:
                places = (each["groups"] for each in saved.places if len(each["groups"]) == len(self._groups))
                found.append(next((each[number]["options"] for each in places), group["options"]))
                continue
            own = {repr(options[name]): options[name] for name in group["names"]}
            if len(own) > 1:
                raise BuildError("the checkpoint's optimizer has other groups of parameters; build with the same")
            found.append(next(iter(own.values())))
        return found

    def _chosen_common(self, saved: CheckpointReader) -> dict[str, Any]:
        """Return the counters and the state of the learning-rate schedule, from a rank with the same group options.

        Raises:
            BuildError: no rank had groups with the same options.
        """
        wanted = [repr(each) for each in self._options]
        for each in saved.places:
            is_one = self._model.lr_scheduler is None or [repr(group["options"]) for group in each["groups"]] == wanted
            if each["common"] is not None and is_one:
                whole = saved.file(each["common"])
                return {key: whole[key] for key in (*COUNTERS, "lr_scheduler")}
        raise BuildError(
            f"the learning rate's schedule was saved of other groups of parameters than the {len(wanted)} of this rank's "
            f"stage; {SAME_LAYOUT}"
        )
