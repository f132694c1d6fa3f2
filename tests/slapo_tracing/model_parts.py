"""The parts of a model, the calls that it is made, and what the unmodified model computes in them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from slapo_core import Schedule, create_schedule
from slapo_tracing.graphs import TracedModule
from tests.zoo.families import VOCAB, Family, layers

Batch = dict[str, Any]
Result = tuple[torch.Tensor, dict[str, torch.Tensor | None]]
"""The loss, and the gradient of each parameter."""

_KINDS = {
    "norm": r"Norm",
    "attention": r"Attention|Attn|Mixer|FourierTransform|PoolFormerPooling",
    "mlp": r"MLP|Mlp|FeedForward|FFN|DenseAct|DenseGated|LayerFF|Intermediate|SparseMoe|Experts|MoE",
}


def kind_of(path: str, module: nn.Module, repeated: list[str]) -> str:
    """``"layer"``, ``"attention"``, ``"mlp"``, ``"norm"`` or ``"other"``: by a module's place and the name of its class."""
    if path in repeated:
        return "layer"
    name = type(module).__name__
    return next((kind for kind, pattern in _KINDS.items() if re.search(pattern, name)), "other")


def parts_of(model: nn.Module, batch: Batch) -> dict[str, str]:
    """Path and kind of one module of each sort: of a class, at a place in the layer, with settings that others do not have.

    Those of ``torch.nn`` that are not norms are left out, and what does not run on the batch.
    """
    repeated, found = layers(model), dict[Any, tuple[str, str]]()
    for path, module in _called(model, batch):
        kind = kind_of(path, module, repeated)
        if path and not (kind == "other" and type(module).__module__.startswith("torch.nn")):
            settings = {name: repr(value) for name, value in vars(module).items() if isinstance(value, (str, bool))}
            key = type(module), re.sub(r"\d+", "*", path), tuple(sorted(settings.items()))
            found.setdefault(key, (path, kind))
    return dict(found.values())


def _called(model: nn.Module, batch: Batch) -> list[tuple[str, nn.Module]]:
    names, called = {module: path for path, module in model.named_modules()}, dict[nn.Module, None]()
    hooks = [module.register_forward_pre_hook(lambda module, args: called.setdefault(module)) for module in names]
    model(**batch)
    for hook in hooks:
        hook.remove()
    return [(names[module], module) for module in called]


# ---- calls


def _ids(generator: torch.Generator, rows: int, length: int) -> torch.Tensor:
    return torch.randint(5, VOCAB, (rows, length), generator=generator)


def _mask(rows: int, length: int, padded: bool) -> torch.Tensor:
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[-1, -3:] = not padded
    return mask


def _text(generator: torch.Generator, rows: int, length: int, padded: bool | None = None) -> Batch:
    batch: Batch = {"input_ids": _ids(generator, rows, length), "labels": _ids(generator, rows, length)}
    return batch if padded is None else {**batch, "attention_mask": _mask(rows, length, padded)}


def _seq2seq(generator: torch.Generator, rows: int, length: int, padded: bool | None = None) -> Batch:
    batch: Batch = {"input_ids": _ids(generator, rows, 4 * (1 + length // 4)), "labels": _ids(generator, rows, length)}
    masks = {"attention_mask": _mask(*batch["input_ids"].shape, bool(padded))}
    return batch if padded is None else {**batch, **masks, "decoder_attention_mask": _mask(rows, length, padded)}


def _image(generator: torch.Generator, rows: int, length: int, padded: bool | None = None) -> Batch:
    return {"pixel_values": torch.randn(rows, 3, 32, 32, generator=generator), "labels": torch.arange(rows) % 2}


def _speech(generator: torch.Generator, rows: int, length: int, padded: bool | None = None) -> Batch:
    batch = {"input_features": torch.randn(rows, 8, 32, generator=generator), "labels": _ids(generator, rows, length)}
    return batch if padded is None else {**batch, "decoder_attention_mask": _mask(rows, length, padded)}


def _pair(generator: torch.Generator, rows: int, length: int, padded: bool | None = None) -> Batch:
    batch: Batch = {"input_ids": _ids(generator, rows, length), "return_loss": True}
    batch["pixel_values"] = torch.randn(rows, 3, 32, 32, generator=generator)
    return batch if padded is None else {**batch, "attention_mask": _mask(rows, length, padded)}


_BATCHES: dict[str, Callable[..., Batch]] = {
    "text": _text,
    "masked": _text,
    "seq2seq": _seq2seq,
    "image": _image,
    "speech": _speech,
    "pair": _pair,
}
SHAPES: dict[str, tuple[int, int, bool | None]] = {
    "example": (2, 12, None),
    "mask of ones": (2, 12, False),
    "padding": (2, 12, True),
    "others": (3, 7, None),
    "others, padding": (3, 7, True),
    "one row": (1, 16, None),
}


def calls(family: Family, *names: str) -> dict[str, Batch]:
    """Batches with and without a mask, with padding, of other sizes, by name; all by default. The first is the example."""
    generator, make = torch.Generator().manual_seed(3), _BATCHES[family.inputs]
    made = {name: make(generator, *shape) for name, shape in SHAPES.items() if not names or name in names}
    return {
        name: batch
        for name, batch in made.items()
        if "mask" in str(batch.keys()) or SHAPES[name][2] is None  # images have no mask
    }


# ---- what is compared


def run(model: nn.Module, batch: Batch) -> Result:
    """Loss and gradients of a forward that draws the same random numbers every time."""
    model.zero_grad()
    torch.manual_seed(5)
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_close(found: Result, expected: Result, **tolerance: float) -> None:
    """Compare two results."""
    tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found[0], expected[0], **tolerance)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert (found[1][name] is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(found[1][name], gradient, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


class Reference:
    """A model, and what it computes before anything is done to it.

    Args:
        model: The model.
        batches: The calls.
        keys: Mode, ``True`` for training, and name of each call; default: every call in both modes.
    """

    def __init__(self, model: nn.Module, batches: Mapping[str, Batch], keys: Sequence[tuple[bool, str]] | None = None) -> None:
        self.model, self.batches = model, batches
        self.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self.expected: dict[tuple[bool, str], Result] = {}
        for training, name in keys or [(training, name) for training in (True, False) for name in batches]:
            loss, gradients = run(model.train(training), batches[name])
            self.expected[training, name] = loss, {key: None if g is None else g.clone() for key, g in gradients.items()}
            self.put_back(model)
        model.train()

    def put_back(self, model: nn.Module) -> None:
        """Give the buffers their values of before, as a batch norm's."""
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in self.buffers:
                    buffer.copy_(self.buffers[name])

    def check(self, model: nn.Module, key: tuple[bool, str], **tolerance: float) -> None:
        """Run a call on a model of the same parameters, and compare."""
        assert_close(run(model.train(key[0]), self.batches[key[1]]), self.expected[key], **tolerance)
        self.put_back(model)


class Part:
    """A part that is traced alone, in a model that is compared.

    Args:
        reference: Of the model.
        path: Of the part.
        schedule: Of the model; default: a new one, with the first batch as its example.
    """

    def __init__(self, reference: Reference, path: str, schedule: Schedule | None = None) -> None:
        self.reference, self.path = reference, path
        example = next(iter(reference.batches.values()))
        self.schedule = schedule or create_schedule(reference.model, example_inputs=copy.copy(example))
        self.original = self.schedule[path].mod
        self.schedule[path].trace()

    @property
    def traced(self) -> list[TracedModule]:
        """The part, and what was traced inside of it."""
        return [module for module in self.schedule[self.path].mod.modules() if isinstance(module, TracedModule)]

    def variants(self) -> Iterator[Any]:
        """The graphs of each."""
        return (module._variants for module in self.traced)

    def check(self, times: int = 2, **tolerance: float) -> None:
        """All calls, each some times: the later ones are not traced again."""
        for number, key in enumerate(self.reference.expected):
            counts = []
            for _ in range(times):
                self.reference.check(self.schedule.mod, key, **tolerance)
                counts.append([(len(variants.others), sum(map(len, variants.calls.values()))) for variants in self.variants()])
            assert counts[0] == counts[-1], f"{self.path}: {key} is traced at every call"
            if number == 0:
                outer = next(self.variants())
                by_graph = outer.first.function is not None or outer.guard.checks_inside  # which runs its own forward
                assert by_graph, f"{self.path}: the example did not run by its graph"
        self.schedule.mod.train()

    def without_graph(self) -> set[str]:
        """Names of the classes whose own forward ran in some call."""
        return {
            each.label
            for each in self.variants()
            if any(variant is None for kept in each.calls.values() for _, variant in kept)
        }

    def undo(self) -> None:
        """Take the trace back and compare once more."""
        self.schedule.undo()
        assert self.schedule[self.path].mod is self.original
        assert not any(isinstance(module, TracedModule) for module in self.original.modules())
        self.reference.check(self.schedule.mod, next(iter(self.reference.expected)))
