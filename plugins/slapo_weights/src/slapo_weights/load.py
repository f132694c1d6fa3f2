"""Parameters on the meta device get their values from files, each rank reading what it holds and no byte more."""

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

from .huggingface.load_conversion import Known, known, may_be_missing
from .huggingface.unmodified_model import Unmodified
from .safetensors_files.reader import WeightFiles
from .tensor_views.box_view import View
from .tensor_views.fused_parameters import parts_of, view_of

_LISTED = 20


@dataclass(frozen=True)
class Weights:
    """Weights for a model that was made under ``init_empty_weights``: ``build(sch, target, weights=Weights(...))``.

    Where nothing but the place is to be said, ``weights="folder"`` does. What has values keeps them, but for the buffers of
    modules whose parameters have none; where the files have others for a parameter, ``unexpected`` has to name it.

    Args:
        source: A safetensors file, an index of several (``.json``), or a folder with either, as ``save_pretrained`` writes it.
        cast: Whether floating-point values become the model's dtype; without it another one is an error.
        missing: One pattern or several, as of ``fnmatch``, of names that the files may lack. They are initialised, as without
            weights.
        unexpected: The same of names that the model may lack. They are left out.
    """

    source: str | os.PathLike[str]
    cast: bool = False
    missing: str | Sequence[str] = ()
    unexpected: str | Sequence[str] = ()


class Filler:
    """What ``build`` calls when nothing refuses any more.

    Args:
        weights: What is given on this rank.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def agreed(self) -> list[str]:
        """What has to be the same on all ranks: the tensors, which each may have elsewhere, and the options.

        Raises:
            BuildError: there are no weights.
        """
        cast, missing, unexpected = (getattr(self._weights, name) for name in ("cast", "missing", "unexpected"))
        what = WeightFiles(self._weights.source).digest()[:16]
        return [f"weights of digest {what} with cast={cast}, missing={missing!r}, unexpected={unexpected!r}"]

    def __call__(self, program: Program, parts: list[nn.Module], device: str) -> Callable[..., None]:
        """``fill`` the program.

        Returns:
            What takes the values away again where it is called with an error.
        """
        tables = _tables((program.module, *(stage.module for stage in program.stages)))
        entries = ((table, name, tensor) for table in tables for name, tensor in table.items() if tensor is not None)
        before = [(table, name, tensor) for table, name, tensor in entries if tensor.is_meta or _stays(tensor)]

        def end(error: type[BaseException] | None, *_: Any) -> None:
            for table, name, tensor in before if error is not None else ():
                table[name] = tensor

        fill(program.module, parts, self._weights, device)
        return end


def filler(weights: Weights | str | os.PathLike[str]) -> Filler:
    """What fills a model with the weights that a user gave.

    Raises:
        BuildError: ``weights`` are neither a place nor ``Weights``.
    """
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
    return Filler(wanted)


def fill(root: nn.Module, parts: Iterable[nn.Module], weights: Weights, device: str = "cpu") -> int:
    """Give the meta parameters of ``parts``, and the buffers that go with them, this rank's parts of what the files hold.

    Every rank compares the whole model with the files, so that all fail alike.

    Returns:
        How many bytes of tensors were read.

    Raises:
        BuildError: all that is missing, unexpected, or of another shape or dtype; nothing has changed.
    """
    held = [*parts]
    unmodified = _unmodified(root)
    files = WeightFiles(weights.source)
    plan = Plan(root, files, known(files, unmodified), unmodified, weights)
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
            f"{_listed('parameters have values', others)}, which are not those of the weights in {files.source}; make them "
            "inside of slapo.init_empty_weights(), or say with unexpected= of slapo.Weights that they stay"
        )
    new |= {id(real): successor(real, real.to(device)) for real in _tensors(held) if id(real) not in new and _stays(real)}
    for table in _tables([root, *held]):
        table.update({name: new[id(tensor)] for name, tensor in table.items() if id(tensor) in new})
    return files.bytes_read


class Plan:
    """What each tensor of the model is made of.

    Args:
        root: The whole scheduled model.
        files: The files.
        found: What they hold, in the model's names.
        unmodified: The model before any step; None where it is none of Transformers'.
        weights: What was asked for.

    Attributes:
        views: First name of a tensor to what it is whole: of each of its names in the files.
        kept: The same of parameters that have values, which have to be those of the files.
    """

    def __init__(
        self, root: nn.Module, files: WeightFiles, found: Known, unmodified: Unmodified | None, weights: Weights
    ) -> None:
        self._files, self._found, self._weights = files, found, weights
        self._paths: dict[int, str] = {}
        self._problems: dict[str, list[str]] = defaultdict(list)
        self._unmodified = unmodified
        self._of_ties = {**_from_ties(found.views, unmodified), **found.views}
        self._optional = may_be_missing(unmodified)
        self.views: dict[str, list[View]] = {}
        self.kept: dict[str, View] = {}
        used: set[str] = set(found.left_out)
        for path, tensor, is_open in _places(root):
            self._paths.setdefault(id(tensor), path)
            used |= set(parameter_facts(tensor).names)
            if (made := parts_of(tensor)) is not None:
                used |= {name for name, _, _ in made.parts}
            if is_open:
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
        """Parameters of a row for each token, and their shapes; a scheduled model may have more rows."""
        if self._unmodified is None:
            return {}
        try:
            names = self._unmodified.vocabulary()
        except NotImplementedError:  # Transformers' own, of a class that embeds no tokens
            return {}
        shapes = self._unmodified.shapes()
        return {name: shapes[name] for name in names}

    def key(self, tensor: torch.Tensor) -> str:
        """The tensor's first name in the unmodified model; of one that a step brought in, its path."""
        return (parameter_facts(tensor).names or (self._paths.get(id(tensor), ""),))[0]

    def check(self) -> None:
        """Raise ``BuildError`` with all that is wrong."""
        unread = {"that cannot be read in parts": [*self._found.unread]}
        kinds = [_listed(kind, told) for kind, told in {**unread, **self._problems}.items() if told]
        if kinds:
            told = f"the weights in {self._files.source} are not this model's: {'; '.join(kinds)}"
            raise BuildError(f"{told}; give the model's own, or say with slapo.Weights what may differ")

    def _add(self, tensor: torch.Tensor) -> None:
        key = self.key(tensor)
        if key in self.views:
            return
        if (made := parts_of(tensor)) is not None and not parameter_facts(tensor).names:
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
            self.views[key] = [view for view in (self._fitting(key, tensor, view) for view in views) if view is not None]
        elif not (_matches(key, self._weights.missing) or (self._optional is not None and self._optional.search(key))):
            kind = "missing" if parameter_facts(tensor).names else "brought in by a step that does not say what of (made_of)"
            self._problems[kind].append(key)

    def _fitting(self, key: str, tensor: torch.Tensor, view: View) -> View | None:
        names, shape = ", ".join(view.names), _full_shape(tensor)
        of = f" of {key}" if names != key else ""
        both = view.dtype.is_floating_point and tensor.dtype.is_floating_point
        if view.dtype is not tensor.dtype and not (both and self._weights.cast):
            kind = "mis-typed, which cast=True casts" if both else "mis-typed"
            self._problems[kind].append(f"{names} is {_dtype(view.dtype)} for {_dtype(tensor.dtype)}{of}")
            return None
        is_less = view.shape[1:] == shape[1:] and view.shape[:1] < shape[:1]
        if is_less and view.shape == self._vocabulary.get(key):
            view = view.padded(shape[0])
        if view.shape != shape:
            self._problems["mis-shaped"].append(f"{names} is {list(view.shape)} for {list(shape)}{of}")
            return None
        return view


def _unmodified(root: nn.Module) -> Unmodified | None:
    try:
        return Unmodified.of(root)
    except BuildError as err:
        raise BuildError(str(err).replace("export_weights: ", "weights: ", 1)) from err


def _full_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    spec = shard_spec(tensor)
    return spec.full_shape if spec is not None else tuple(tensor.shape)


def _local(view: View, tensor: torch.Tensor) -> View:
    spec = shard_spec(tensor)
    return view.local(spec.dim, spec.ranges()) if spec is not None else view


def _listed(kind: str, told: list[str]) -> str:
    more = f" and {len(told) - _LISTED} more" if len(told) > _LISTED else ""
    return f"{len(told)} {kind}: {', '.join(told[:_LISTED])}{more}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _from_ties(views: Mapping[str, View], unmodified: Unmodified | None) -> dict[str, View]:
    """Names that files leave out, as they are tied in the unmodified model to one that is there."""
    groups: dict[int, list[str]] = defaultdict(list)
    for name, tensor in unmodified.model.named_parameters(remove_duplicate=False) if unmodified is not None else ():
        groups[id(tensor)].append(name)
    there = ((names, next((name for name in names if name in views), None)) for names in groups.values())
    return {name: views[first] for names, first in there if first is not None for name in names}


def _matches(name: str, patterns: str | Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in ([patterns] if isinstance(patterns, str) else patterns))


def _places(root: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Path of each tensor that is part of the model's state, the tensor, and whether it is to be read.

    What has values keeps them. ``init_empty_weights`` gives the buffers of a model some, which count as none.
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


def _stays(tensor: torch.Tensor) -> bool:
    """Whether it is a buffer with values, which goes where the parameters go."""
    return not tensor.is_meta and not isinstance(tensor, nn.Parameter)


def _tables(trees: Iterable[nn.Module]) -> list[dict[str, Any]]:
    modules = {id(module): module for tree in trees for module in tree.modules()}
    return [table for module in modules.values() for table in (module._parameters, module._buffers)]


def _tensors(trees: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Each once."""
    held = (tensor for table in _tables(trees) for tensor in table.values() if tensor is not None)
    return [*{id(tensor): tensor for tensor in held}.values()]
