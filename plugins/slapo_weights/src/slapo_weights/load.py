"""Loading of weights into meta parameters: each rank reads exactly the bytes of its shards from the files."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from torch import nn

from slapo_core import BuildError, Program, parameter_facts, shard_spec, successor

from .huggingface.load_conversion import LoadedNames, ignorable_names, load_names
from .huggingface.unmodified_model import UnmodifiedModel
from .safetensors_files.reader import WeightFiles
from .tensor_views.box_view import TensorView
from .tensor_views.fused_parameters import fused_parts, view_of

_LISTED = 20


@dataclass(frozen=True)
class Weights:
    """Weights for a model that was made under ``init_empty_weights``: ``build(sch, target, weights=Weights(...))``.

    Without options, ``weights="folder"`` is enough. Tensors with values keep them, except buffers of modules whose parameters
    have none; if the files have other values for such a parameter, ``unexpected`` must name it.

    Args:
        source: A safetensors file, an index of several (``.json``), or a folder with either, as from ``save_pretrained``.
        cast: Whether floating-point values are cast to the model's dtype; otherwise a different dtype is an error.
        missing: One ``fnmatch`` pattern or several, of names that the files may lack. These are initialised.
        unexpected: One ``fnmatch`` pattern or several, of names that the model may lack. These are ignored.
    """

    source: str | os.PathLike[str]
    cast: bool = False
    missing: str | Sequence[str] = ()
    unexpected: str | Sequence[str] = ()


class WeightLoader:
    """Loader of this rank's weights that ``build`` calls after all of its checks."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def agreed(self) -> list[str]:
        """Return the lines that must be equal on all ranks: a digest of the files, whose paths may differ, and the options.

        Raises:
            BuildError: there are no weights.
        """
        cast, missing, unexpected = (getattr(self._weights, name) for name in ("cast", "missing", "unexpected"))
        what = WeightFiles(self._weights.source).digest()[:16]
        return [f"weights of digest {what} with cast={cast}, missing={missing!r}, unexpected={unexpected!r}"]

    def __call__(self, program: Program, parts: list[nn.Module], device: str) -> Callable[..., None]:
        """Load the weights, see ``fill``; return a function that restores the tensors if it is called with an error."""
        tables = _tables((program.module, *(stage.module for stage in program.stages)))
        entries = ((table, name, tensor) for table in tables for name, tensor in table.items() if tensor is not None)
        before = [(table, name, tensor) for table, name, tensor in entries if tensor.is_meta or _is_real_buffer(tensor)]

        def end(error: type[BaseException] | None, *_: Any) -> None:
            for table, name, tensor in before if error is not None else ():
                table[name] = tensor

        fill(program.module, parts, self._weights, device)
        return end


def make_loader(weights: Weights | str | os.PathLike[str]) -> WeightLoader:
    """Return the loader for the weights of a user; raise ``BuildError`` if they are neither a path nor ``Weights``."""
    if not isinstance(weights, Weights | str | os.PathLike):
        raise BuildError(f"weights is a {type(weights).__name__}; give a file, a folder or slapo_weights.Weights")
    wanted = weights if isinstance(weights, Weights) else Weights(weights)
    if not isinstance(wanted.source, str | os.PathLike):
        raise BuildError(f"the source of weights is {wanted.source!r}; give a file or a folder")
    if type(wanted.cast) is not bool:
        raise BuildError(f"cast is {wanted.cast!r}; give True or False")
    for what, patterns in (("missing", wanted.missing), ("unexpected", wanted.unexpected)):
        listed = [patterns] if isinstance(patterns, str) else patterns
        if not isinstance(listed, Iterable) or not all(isinstance(each, str) for each in listed):
            raise BuildError(f"{what} is {patterns!r}; give patterns of names")
    return WeightLoader(wanted)


def fill(root: nn.Module, parts: Iterable[nn.Module], weights: Weights, device: str = "cpu") -> int:
    """Load this rank's shards from the files into the meta parameters of ``parts`` and into their buffers.

    Every rank compares the whole model with the files, so that all ranks fail with the same error.

    Returns:
        Number of bytes of tensors that were read.

    Raises:
        BuildError: lists all tensors that are missing, unexpected, or of another shape or dtype; nothing has changed.
    """
    held = [*parts]
    unmodified = _unmodified_model(root)
    files = WeightFiles(weights.source)
    plan = LoadPlan(root, files, load_names(files, unmodified), unmodified, weights)
    plan.check()
    new: dict[int, torch.Tensor] = {}
    untied, others = [], []
    for tensor in _tensors(held):
        if (kept := plan.kept.get(plan.key(tensor))) is not None and not tensor.is_meta:
            value = tensor.detach().cpu()
            if kept.shape != _full_shape(tensor) or not torch.equal(_local(kept, tensor).read(files, tensor.dtype), value):
                others.append(plan.key(tensor))
        if not (views := plan.views.get(plan.key(tensor), [])):
            continue
        value, *copies = (_local(view, tensor).read(files, tensor.dtype) for view in views)
        if any(not torch.equal(value, copy) for copy in copies):
            untied.append(" = ".join(parameter_facts(tensor).names))
        new[id(tensor)] = successor(tensor, value.to(device))
    if untied:
        raise BuildError(f"the weights in {files.source} have several values for one tensor: {', '.join(untied)}")
    if others:
        raise BuildError(
            f"{_problem('parameters have values', others)}, which are not those of the weights in {files.source}; make them "
            "inside of slapo.init_empty_weights(), or say with unexpected= of slapo.Weights that they stay"
        )
    new |= {
        id(real): successor(real, real.to(device)) for real in _tensors(held) if id(real) not in new and _is_real_buffer(real)
    }
    for table in _tables([root, *held]):
        table.update({name: new[id(tensor)] for name, tensor in table.items() if id(tensor) in new})
    return files.bytes_read


class LoadPlan:
    """Views of the files for each tensor of the model.

    Args:
        found: Their tensors, by the model's names.
        unmodified: The model before any step; None if it is not a Transformers' model.

    Attributes:
        views: First name of a tensor to views of the whole tensor, one per name of it in the files.
        kept: First name of each parameter with values to the view that must have the same values.
    """

    def __init__(
        self, root: nn.Module, files: WeightFiles, found: LoadedNames, unmodified: UnmodifiedModel | None, weights: Weights
    ) -> None:
        self._files, self._found, self._weights = files, found, weights
        self._paths: dict[int, str] = {}
        self._problems: dict[str, list[str]] = defaultdict(list)
        self._unmodified = unmodified
        self._of_ties = {**_views_of_ties(found.views, unmodified), **found.views}
        self._optional = ignorable_names(unmodified)
        self.views: dict[str, list[TensorView]] = {}
        self.kept: dict[str, TensorView] = {}
        used: set[str] = set(found.ignored)
        for path, tensor, is_read in _places(root):
            self._paths.setdefault(id(tensor), path)
            used |= set(parameter_facts(tensor).names)
            if (made := fused_parts(tensor)) is not None:
                used |= {name for name, _, _ in made.parts}
            if is_read:
                self._add(tensor)
            elif isinstance(tensor, nn.Parameter):
                there = next((name for name in (*parameter_facts(tensor).names, path) if name in found.views), None)
                if there is not None and not _matches(there, weights.unexpected):
                    self.kept[self.key(tensor)] = found.views[there]
                    used.add(there)
        if not any(tensor.is_meta for tensor in root.parameters()):
            raise BuildError("weights were given, and the model has values; make it inside of slapo.init_empty_weights()")
        self._problems["unexpected"] = sorted(
            name for name in found.views if name not in used and not _matches(name, weights.unexpected)
        )

    @cached_property
    def _vocabulary(self) -> dict[str, tuple[int, ...]]:
        """Names of the parameters with a row per token, and their unmodified shapes; a scheduled model may have more rows."""
        if self._unmodified is None:
            return {}
        try:
            names = self._unmodified.vocabulary()
        except NotImplementedError:  # raised by Transformers for a class without token embeddings
            return {}
        shapes = self._unmodified.shapes()
        return {name: shapes[name] for name in names}

    def key(self, tensor: torch.Tensor) -> str:
        """Return the tensor's first name in the unmodified model, or its path if a step added it."""
        return (parameter_facts(tensor).names or (self._paths.get(id(tensor), ""),))[0]

    def check(self) -> None:
        """Raise ``BuildError`` with all problems."""
        unread = {"that cannot be read in parts": [*self._found.unread]}
        kinds = [_problem(kind, told) for kind, told in {**unread, **self._problems}.items() if told]
        if kinds:
            told = f"the weights in {self._files.source} are not this model's: {'; '.join(kinds)}"
            raise BuildError(f"{told}; give the model's own, or say with slapo.Weights what may differ")

    def _add(self, tensor: torch.Tensor) -> None:
        key = self.key(tensor)
        if key in self.views:
            return
        if (made := fused_parts(tensor)) is not None and not parameter_facts(tensor).names:
            if missing := [name for name, _, _ in made.parts if name not in self._of_ties]:
                self._problems["missing"] += dict.fromkeys(missing)
                return
            try:
                views = [view_of(made, self._of_ties)]
            except ValueError as err:
                self._problems["mis-shaped"].append(f"{key} of {', '.join(dict.fromkeys(n for n, _, _ in made.parts))}: {err}")
                return
        else:
            views = [*dict.fromkeys(self._of_ties[name] for name in parameter_facts(tensor).names if name in self._of_ties)]
        if views:
            self.views[key] = [view for view in (self._fit_view(key, tensor, view) for view in views) if view is not None]
        elif not (_matches(key, self._weights.missing) or (self._optional is not None and self._optional.search(key))):
            kind = "missing" if parameter_facts(tensor).names else "added by a step that does not declare its origin (made_of)"
            self._problems[kind].append(key)

    def _fit_view(self, key: str, tensor: torch.Tensor, view: TensorView) -> TensorView | None:
        names, shape = ", ".join(view.names), _full_shape(tensor)
        of = f" of {key}" if names != key else ""
        both = view.dtype.is_floating_point and tensor.dtype.is_floating_point
        if view.dtype is not tensor.dtype and not (both and self._weights.cast):
            kind = "mis-typed, which cast=True casts" if both else "mis-typed"
            self._problems[kind].append(f"{names} is {_dtype(view.dtype)} for {_dtype(tensor.dtype)}{of}")
            return None
        is_less = view.shape[1:] == shape[1:] and view.shape[:1] < shape[:1]
        if is_less and view.shape == self._vocabulary.get(key):
            view = view.pad(shape[0])
        if view.shape != shape:
            self._problems["mis-shaped"].append(f"{names} is {list(view.shape)} for {list(shape)}{of}")
            return None
        return view


def _unmodified_model(root: nn.Module) -> UnmodifiedModel | None:
    try:
        return UnmodifiedModel.of(root)
    except BuildError as err:
        raise BuildError(str(err).replace("export_weights: ", "weights: ", 1)) from err


def _full_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    spec = shard_spec(tensor)
    return spec.full_shape if spec is not None else tuple(tensor.shape)


def _local(view: TensorView, tensor: torch.Tensor) -> TensorView:
    spec = shard_spec(tensor)
    return view.local(spec.dim, spec.ranges()) if spec is not None else view


def _problem(kind: str, told: list[str]) -> str:
    more = f" and {len(told) - _LISTED} more" if len(told) > _LISTED else ""
    return f"{len(told)} {kind}: {', '.join(told[:_LISTED])}{more}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _views_of_ties(views: Mapping[str, TensorView], unmodified: UnmodifiedModel | None) -> dict[str, TensorView]:
    """Return views for names that are tied in the unmodified model to a name in the files."""
    groups: dict[int, list[str]] = defaultdict(list)
    for name, tensor in unmodified.model.named_parameters(remove_duplicate=False) if unmodified is not None else ():
        groups[id(tensor)].append(name)
    there = ((names, next((name for name in names if name in views), None)) for names in groups.values())
    return {name: views[first] for names, first in there if first is not None for name in names}


def _matches(name: str, patterns: str | Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in ([patterns] if isinstance(patterns, str) else patterns))


def _places(root: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield path and tensor of each entry of the model's state, and whether it is read from the files.

    Tensors with values keep them. Buffers get values even under ``init_empty_weights``; those are read all the same.
    """
    for path, module in root.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield prefix + name, parameter, parameter.is_meta
        is_empty = all(parameter is None or parameter.is_meta for parameter in module._parameters.values())
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield prefix + name, buffer, buffer.is_meta or (is_empty and bool(parameter_facts(buffer).names))


def _is_real_buffer(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is a buffer with values, which only moves to the device."""
    return not tensor.is_meta and not isinstance(tensor, nn.Parameter)


def _tables(trees: Iterable[nn.Module]) -> list[dict[str, Any]]:
    modules = {id(module): module for tree in trees for module in tree.modules()}
    return [table for module in modules.values() for table in (module._parameters, module._buffers)]


def _tensors(trees: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Return the parameters and buffers of the modules, each once."""
    held = (tensor for table in _tables(trees) for tensor in table.values() if tensor is not None)
    return [*{id(tensor): tensor for tensor in held}.values()]
