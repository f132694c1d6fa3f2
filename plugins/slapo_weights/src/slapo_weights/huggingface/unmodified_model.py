"""The unmodified Transformers' model on the meta device: names and shapes of its files, and conversions of its saving."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from slapo_core import BuildError, failure_reason

from ..safetensors_files.writer import TensorEntry

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Tensors = dict[str, torch.Tensor]
Convert = Callable[[Tensors], Mapping[str, torch.Tensor]]


class ConversionGroup(NamedTuple):
    """Tensors of the model that are converted together; ``renamed``: the only source becomes the only target unchanged."""

    sources: tuple[str, ...]
    targets: tuple[TensorEntry, ...]
    renamed: bool


def identity_groups(tensors: Mapping[str, torch.Tensor]) -> list[ConversionGroup]:
    """Return groups of one unchanged tensor each."""
    return [ConversionGroup((name,), (_entry(name, tensor),), True) for name, tensor in tensors.items()]


def conversion_groups(tensors: Mapping[str, torch.Tensor], convert: Convert) -> list[ConversionGroup]:
    """Return groups in the order of a conversion's results; the conversion runs on meta tensors.

    ``convert`` is a function of any of these groups of tensors.

    Raises:
        BuildError: the sources of a result cannot be tracked.
    """
    with _SourceTracker(tensors) as tracker:
        made = convert(dict(tensors))
    together: dict[str, set[str]] = {name: {name} for name in tensors}
    for name, tensor in made.items():
        sources = tracker.sources(tensor)
        if not sources:
            raise BuildError(f"export_weights: cannot tell what Transformers makes {name!r} of when it saves")
        merged = set().union(*(together[source] for source in sources))
        together.update(dict.fromkeys(merged, merged))
    targets: dict[int, list[str]] = {}
    for name, tensor in made.items():
        targets.setdefault(id(together[next(iter(tracker.sources(tensor)))]), []).append(name)
    groups = []
    for names in targets.values():
        members = together[next(iter(tracker.sources(made[names[0]])))]
        sources = tuple(name for name in tensors if name in members)
        renamed = len(sources) == len(names) == 1 and made[names[0]] is tensors[sources[0]]
        groups.append(ConversionGroup(sources, tuple(_entry(name, made[name]) for name in names), renamed))
    if left := tensors.keys() - {name for group in groups for name in group.sources}:
        raise BuildError(f"export_weights: Transformers writes nothing for {min(left)!r} when it saves")
    return groups


def convert_group(group: ConversionGroup, tensors: Tensors, convert: Convert) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors that a group is converted to; raise ``BuildError`` if they differ from the plan."""
    if group.renamed:
        yield group.targets[0].name, tensors[group.sources[0]]
        return
    made = convert({name: tensors[name] for name in group.sources})
    if tuple(sorted(_entry(name, tensor) for name, tensor in made.items())) != tuple(sorted(group.targets)):
        raise BuildError(
            f"export_weights: Transformers makes {sorted(made)} of {', '.join(group.sources)} alone, and of the whole model "
            f"{sorted(each.name for each in group.targets)}; export with another version of it"
        )
    yield from made.items()


def _entry(name: str, tensor: torch.Tensor) -> TensorEntry:
    return TensorEntry(name, tuple(tensor.shape), tensor.dtype)


class _SourceTracker(TorchFunctionMode):
    """Function mode that tracks the source tensors of each result."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._known: dict[int, tuple[torch.Tensor, frozenset[str]]] = {
            id(tensor): (tensor, frozenset((name,))) for name, tensor in tensors.items()
        }

    def sources(self, tensor: torch.Tensor) -> frozenset[str]:
        return self._known[id(tensor)][1] if id(tensor) in self._known else frozenset()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        sources = frozenset[str]().union(*map(self.sources, given))
        for each in pytree.tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self._known[id(each)] = each, sources | self.sources(each)
        return result


Shapes = dict[str, tuple[int, ...]]


class UnmodifiedModel:
    """The model that a schedule was created for, of the class ``cls`` before any step, built from its config on meta.

    Raises:
        BuildError: it cannot be built from its config, is quantized, or has adapters.
    """

    def __init__(self, root: Any, cls: type[PreTrainedModel]) -> None:
        self.name = cls.__name__
        if getattr(root, "_hf_peft_config_loaded", False) or getattr(root, "hf_quantizer", None) is not None:
            raise BuildError(f"export_weights: this {self.name} is quantized or has adapters; export one that has neither")
        self._config = copy.deepcopy(root.config)
        self._generation = copy.deepcopy(getattr(root, "generation_config", None))
        try:
            with torch.device("meta"), torch.random.fork_rng(devices=[]):
                self.model: Any = cls(copy.deepcopy(self._config))
        except Exception as err:
            raise BuildError(
                f"export_weights: {self.name} cannot be made of its config alone, which tells what it is to be written as: "
                f"{failure_reason(err)}"
            ) from err
        if (conversions := getattr(root, "_weight_conversions", None)) is not None:
            self.model._weight_conversions = conversions  # it is saved by the conversions with which it was loaded

    @classmethod
    def of(cls, root: nn.Module) -> UnmodifiedModel | None:
        """Return the unmodified model of a scheduled one; None if it is not a Transformers' model."""
        module = sys.modules.get("transformers.modeling_utils")
        if module is None:
            return None
        traced = vars(root).get("_traced_class", type(root))
        kind = next(each for each in traced.__mro__ if not any(base.__module__.startswith("slapo_") for base in each.__mro__))
        return cls(root, kind) if issubclass(kind, module.PreTrainedModel) else None

    def shapes(self) -> Shapes:
        return {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}

    def vocabulary(self) -> set[str]:
        """Return the names of the parameters with a row per token."""
        found = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        held = {id(tensor) for each in found if each is not None for tensor in each.parameters()}
        return {name for name, tensor in self.model.named_parameters(remove_duplicate=False) if id(tensor) in held}

    def written_names(self, tied: Iterable[tuple[str, ...]]) -> set[str]:
        """Return the name of each tied tensor that ``save_pretrained`` keeps; raise ``BuildError`` for a tie it refuses."""
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        groups = [names for names in tied if len(names) > 1]
        stand_ins = {name: tensor for names in groups for tensor in (torch.zeros(1),) for name in names}
        try:
            kept: set[str] = {*remove_tied_weights_from_state_dict(stand_ins, self.model)}
        except RuntimeError as err:
            raise BuildError(f"export_weights: {self.name} has a tie that Transformers does not know: {err}") from err
        return kept

    def groups(self, tensors: Mapping[str, torch.Tensor]) -> list[ConversionGroup]:
        return conversion_groups(tensors, self.convert)

    def convert(self, tensors: Tensors) -> Tensors:
        """Convert tensors by the model's names to those that ``save_pretrained`` writes."""
        from transformers.core_model_loading import revert_weight_conversion

        found: Tensors = revert_weight_conversion(self.model, tensors)
        return found

    def write_config(self, folder: Path, dtype: torch.dtype | None) -> None:
        """Write ``config.json``, with the dtype of the weights, and the other files that ``save_pretrained`` writes with it."""
        if dtype is not None:
            self._config.dtype = str(dtype).split(".")[1]
        self._config.architectures = [self.name]
        if self.model.is_remote_code():
            from transformers.dynamic_module_utils import custom_object_save

            custom_object_save(self.model, folder, config=self._config)
        self._config.save_pretrained(folder)
        if self._generation is not None and self.model.can_generate():
            self._generation.save_pretrained(folder)
