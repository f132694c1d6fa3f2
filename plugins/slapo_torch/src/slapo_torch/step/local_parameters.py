"""Stages of this rank as one module, and checks and reductions over the ranks that hold the same parameters."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from slapo_core import BuildError, Program, is_sharded, raise_on_all_ranks, successor
from slapo_training.distributed import clip_grad_norm_, compare_gradients
from slapo_training.engines import check_same_start

from ..fsdp.replica_spec import replica_tensor, without_replica_sharding
from ..gradients.reduction import sum_gradients


def merge_stages(stages: Sequence[nn.Module]) -> nn.Module:
    """Return one tree with all parameters, buffers and modules of some stages, under their names in the whole model.

    The tree is for traversal and for switching modes; it cannot be called. Modules of one stage are the same objects; a parent
    of modules of several stages is a new bare ``nn.Module``.
    """
    if len(stages) == 1:
        return stages[0]
    tree = nn.Module()
    tree.training = stages[0].training
    for table in ("_parameters", "_buffers"):
        for stage in stages:
            getattr(tree, table).update(getattr(stage, table))
    tree._non_persistent_buffers_set = set().union(*(stage._non_persistent_buffers_set for stage in stages))
    for name in dict.fromkeys(name for stage in stages for name in stage._modules):
        found = {id(child): child for stage in stages if (child := stage._modules.get(name)) is not None}
        tree._modules[name] = merge_stages([*found.values()]) if found else None
    return tree


class LocalParameters:
    """Parameters of this rank, and the ranks that share some of them.

    Args:
        program: The program, with a rank for each stage.
        module: This rank's stages.
    """

    def __init__(self, program: Program, module: nn.Module) -> None:
        self._program = program
        self._stage = module
        self.trainable = [parameter for parameter in self._stage.parameters() if parameter.requires_grad]
        self._known_ids = {id(parameter) for parameter in self.trainable}
        named = dict(program.module.named_parameters(remove_duplicate=False))
        rank = program.axis_rank("pp")
        staged = len(program.stages) > 1
        placed = [(tuple(sorted({program.rank_of(stage) for stage in tie.stages})), tie) for tie in program.ties if staged]
        self._own_ties = [(ranks, tie, named[tie.names[0]]) for ranks, tie in placed if rank in ranks]
        self._shared: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for ranks, _, parameter in sorted(self._own_ties, key=lambda tie: tie[0]):
            if parameter.requires_grad and len(ranks) > 1:
                self._shared.setdefault(ranks, []).append(parameter)
        named = dict(self._stage.named_parameters())
        trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        whole = {name: parameter for name, parameter in trained.items() if not is_sharded(replica_tensor(parameter))}
        has_shards = len(whole) < len(trained)
        self._unchecked = {name: parameter for name, parameter in whole.items() if parameter.numel() and has_shards}

    def is_outdated(self) -> bool:
        """Return True if parameters were unfrozen since this object was made."""
        return any(parameter.requires_grad and id(parameter) not in self._known_ids for parameter in self._stage.parameters())

    def sparse_gradient(self, clips: bool) -> BuildError | None:
        """Return the error that ``reduce_ties``, or ``clip`` if it follows, would raise on this rank alone, or None."""
        for _, tie, parameter in self._own_ties:
            if _is_sparse(parameter):
                return BuildError(
                    f"the sparse gradient of the tied {tie.names[0]!r} cannot be summed over stages; build it with sparse=False"
                )
        for name, parameter in self._stage.named_parameters() if clips else ():
            if _is_sparse(parameter):
                return BuildError(
                    f"the sparse gradient of {name!r} cannot be clipped; build it with sparse=False, or without clip"
                )
        return None

    def reduce_ties(self) -> None:
        """Sum the gradients of tied parameters over the stages that share them."""
        if self._shared:
            assert self._program.mesh is not None
            sum_gradients(self._shared, self._program.mesh["pp"].get_group())

    def scale(self, factor: float) -> None:
        """Multiply all gradients by ``factor``; gradients are dense."""
        for parameter in self.trainable:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def check_equal_weights(self) -> None:
        """Compare the values of parameters that several ranks hold, see ``check_same_start``. Collective."""
        check_same_start(self._program, dict(self._stage.named_parameters()), replica_tensor=replica_tensor)

    def num_unchecked(self, used: Collection[int] = ()) -> int:
        """Return the number of unsharded parameters with a first gradient, which ``check_gradients`` compares.

        ``used`` are the ids of parameters that get a gradient once the replicas have reduced it.
        """
        return sum(parameter.grad is not None or id(parameter) in used for parameter in self._unchecked.values())

    def check_gradients(self, low_precision: bool) -> None:
        """Compare the first gradients of unsharded parameters over the tensor-parallel ranks. Collective.

        With ``low_precision`` the tolerance is that of bf16 and fp16.

        Raises:
            BuildError: on every rank: each rank has a partial gradient of the named parameter.
        """
        named = {name: without_replica_sharding(parameter) for name, parameter in self._stage.named_parameters()}
        wrong, seen = compare_gradients(named, {name: named[name] for name in self._unchecked}, low_precision)
        raise_on_all_ranks(BuildError(wrong) if wrong else None, self._program.mesh)
        self._unchecked = {name: parameter for name, parameter in self._unchecked.items() if name not in seen}

    def free_other_stages(self) -> None:
        """Free the parameters that only other stages use, and put meta tensors with the same facts in their places."""
        if len(self._program.stages) == 1:
            return
        mine = {id(parameter) for parameter in self._stage.parameters()}
        trees = [self._program.module, *(stage.module for stage in self._program.stages)]
        empty: dict[int, torch.Tensor] = {}
        for tree in trees:
            for module in tree.modules():
                for name, parameter in [*module._parameters.items()]:
                    if parameter is not None and id(parameter) not in mine and not parameter.is_meta:
                        empty.setdefault(
                            id(parameter),
                            successor(parameter, torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")),
                        )
                        if type(module).__setattr__ is nn.Module.__setattr__:
                            module._parameters[name] = empty[id(parameter)]  # type: ignore[assignment]
                        else:  # recurrent layers keep their own list of weights
                            setattr(module, name, empty[id(parameter)])

    def clip(self, largest: float) -> torch.Tensor:
        """Scale all gradients so that their norm over the model is at most ``largest``; return the old norm. Collective."""
        rank = self._program.axis_rank("pp")
        elsewhere = {id(parameter) for ranks, _, parameter in self._own_ties if ranks[0] != rank}
        mesh = self._program.mesh
        stages = [mesh["pp"].get_group()] if mesh is not None and self._program.axis_size("pp") > 1 else []
        # without trainable parameters, the reduction over stages takes its device from this tensor
        nothing = torch.empty(0, device=mesh.device_type if mesh is not None else None)
        trained: Sequence[torch.Tensor] = self.trainable or [nothing]
        return clip_grad_norm_(trained, largest, extra_groups=stages, counts=lambda parameter: id(parameter) not in elsewhere)


def device_of(program: Program) -> torch.device:
    first = next(program.module.parameters(), None)
    kind = first.device.type if first is not None else "cpu"
    if program.mesh is not None:
        kind = program.mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _is_sparse(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and parameter.grad.layout != torch.strided
