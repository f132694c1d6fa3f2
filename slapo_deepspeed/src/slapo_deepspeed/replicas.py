"""Checkpoints of ZeRO for another number of replicas, by DeepSpeed's universal format."""

from __future__ import annotations

import io
import shutil
import tempfile
from argparse import Namespace
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core.agreement import gather
from slapo_core.errors import BuildError
from slapo_core.program import Program
from slapo_training.meeting import on_all
from slapo_training.quiet import without_warnings

_ADAM = {"exp_avg", "exp_avg_sq"}
_STATE = "optimizer_state_dict"


def check(model: Any, zero_stage: int) -> None:
    """Refuse what DeepSpeed's universal format leaves out.

    Raises:
        BuildError: optimizer states are on NVMe, or with stage 3 there are frozen parameters.
    """
    if model.zero_nvme_offload_optimizer():
        raise BuildError("optimizer states on NVMe are not converted for another dp; load them at the same")
    if zero_stage == 3 and any(not parameter.requires_grad for parameter in model.module.parameters()):
        raise BuildError("stage 3 of ZeRO with frozen parameters is not converted for another dp; load it at the same")


def converted(folder: Path, program: Program, dp: int) -> Path:
    """Convert a checkpoint of ``dp`` replicas in a new folder inside its own; changes no engine. Collective.

    Returns:
        The converted one, the same on every rank.

    Raises:
        BuildError: on every rank: it cannot be converted.
    """
    made: list[str] = []

    def convert() -> None:
        if dist.get_rank() != 0:
            return
        try:
            made.append(tempfile.mkdtemp(prefix="universal-", dir=folder))
            _convert(folder, Path(made[0], "universal"))
        except Exception as err:
            for each in made:
                shutil.rmtree(each, ignore_errors=True)
            raise BuildError(
                f"{str(folder)!r} cannot be converted for another dp: {type(err).__name__}: {err}; nothing has changed, and "
                f"dp={dp} can load it"
            ) from err

    on_all(convert, program)
    return Path(next(each for each in gather(made, program.mesh) if each)[0], "universal")


def _convert(folder: Path, target: Path) -> None:
    source = folder / (folder / "latest").read_text().strip()
    _check_states(source)
    with without_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        from deepspeed.checkpoint import ds_to_universal

        options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "inject_missing_state": True}
        ds_to_universal.main(Namespace(input_folder=str(source), output_folder=str(target), strict=True, **options))


def _check_states(source: Path) -> None:
    """The format has Adam's two states."""
    file = sorted(source.glob("*_optim_states.pt"))[0]
    saved = torch.load(file, map_location="cpu", weights_only=False, mmap=True)[_STATE]
    base = saved[_STATE] if _STATE in saved else saved["base_optimizer_state"]
    for state in base["state"].values() if isinstance(base["state"], dict) else base["state"]:
        if set(state) - {"step"} != _ADAM:
            raise BuildError(f"its optimizer has the states {', '.join(sorted(state))}, and DeepSpeed converts Adam's alone")


def load(model: Any, folder: Path, universal: Path) -> None:
    """Load a converted checkpoint, and what DeepSpeed then leaves out."""
    config = model._config
    config.load_universal_checkpoint = True
    try:
        if model.load_checkpoint(str(universal.parent))[0] is None:
            raise FileNotFoundError("DeepSpeed finds no checkpoint")
    finally:
        config.load_universal_checkpoint = False
    _load_untrained(model.module, folder / (folder / "latest").read_text().strip())
    _load_groups(model.optimizer.optimizer, universal)


@torch.no_grad()
def _load_untrained(module: nn.Module, source: Path) -> None:
    """Buffers and frozen parameters, which the format does not have."""
    files = sorted(source.glob("mp_rank_00_model_states.pt")) or sorted(source.glob("*_model_states.pt"))
    whole = torch.load(files[0], map_location="cpu", weights_only=False, mmap=True)["module"]
    frozen = [(name, parameter) for name, parameter in module.named_parameters() if not parameter.requires_grad]
    for name, tensor in [*module.named_buffers(), *frozen]:
        if name in whole:
            tensor.copy_(whole[name])


def _load_groups(optimizer: torch.optim.Optimizer, universal: Path) -> None:
    """What stage 3 of ZeRO gets wrong: all groups have the options of the first, and count their steps in one tensor."""
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()
    saved = torch.load(universal / "zero" / "optimizer_state.pt", map_location="cpu", weights_only=False, mmap=True)
    if _STATE in saved:
        for own, group in zip(optimizer.param_groups, saved[_STATE]["param_groups"], strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})
