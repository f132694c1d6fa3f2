"""Error messages of ``use_kernels`` and of kernels; a refused step changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import Schedule, ScheduleError, create_schedule
from slapo_kernels import Implementation, choose, explain, op, run


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def make_schedule() -> Schedule:
    return create_schedule(nn.Sequential(nn.LayerNorm(8), MLP()))


@pytest.mark.parametrize(
    ("names", "force", "sentence"),
    [
        (3, None, "names is 3, not a kernel or a list of them; available: attention, bias_act"),
        (iter(["swiglu"]), None, "names is a list_iterator, which is used up; give a list"),
        (b"x", None, "names is b'x', not a kernel or a list of them"),
        ([3], None, "3 is not the name of a kernel; available: attention, bias_act"),
        ([["swiglu"]], None, "['swiglu'] is not the name of a kernel"),
        ({"swiglu": "eager"}, None, "names is a mapping; give implementations as force="),
        (None, {3: "eager"}, "3 is not the name of a kernel; available: *, attention"),
        (None, "eager", "force is 'eager', not a mapping of kernels to implementations, such as {'*': 'eager'}"),
        (None, ["swiglu"], "force is ['swiglu'], not a mapping of kernels to implementations, such as {'rms_norm': 'native'}"),
        (None, {"swiglu": 3}, "force has 3 for 'swiglu', which is not the name of an implementation"),
        (None, {"swiglu": None}, "force has None for 'swiglu', which is not the name of an implementation"),
        (None, {"bias_act": "liger"}, "kernel 'bias_act' has no implementation 'liger', but eager and inductor"),
        (None, {"swiglu": "inducter"}, "no implementation 'inducter' of kernel 'swiglu'; did you mean 'inductor'?"),
        (
            None,
            {"*": "liger"},
            "none of the kernels can use the implementation 'liger', where the weights are: implementation 'liger' of kernel "
            "'rms_norm' works on cuda, not on cpu",
        ),
        ("bias_act", {"*": "flash"}, "none of the kernels has the implementation 'flash'"),
        (
            "layer_norm",
            {"swiglu": "eager"},
            "force has 'swiglu', which is not among the names; add it to the names, or leave it out of force",
        ),
        (None, {"embedding": "eager"}, "force has 'embedding', which is served only where it is named"),
    ],
)
def test_use_kernels(names: Any, force: Any, sentence: str) -> None:
    schedule = make_schedule()
    before = [type(module) for module in schedule.mod.modules()]
    with pytest.raises(ScheduleError) as caught:
        schedule.use_kernels(names, force=force)
    assert sentence in str(caught.value)
    assert [type(module) for module in schedule.mod.modules()] == before
    assert not len(schedule.journal)


class TestTwice:
    @pytest.mark.parametrize(
        ("path", "force", "what"),
        [
            ("", {"swiglu": "eager"}, "computes 'swiglu'"),
            ("", {"*": "eager"}, "kernels serve"),
            ("1", {"swiglu": "eager"}, "computes 'swiglu'"),
            ("", {"swiglu": "eager", "rms_norm": "eager"}, "computes 'swiglu'"),
        ],
    )
    def test_what_is_served_already_cannot_be_forced(self, path: str, force: dict[str, str], what: str) -> None:
        schedule = make_schedule()
        schedule.use_kernels()
        modules = list(schedule.mod.modules())
        schedule.use_kernels()  # nothing new, and nothing asked for
        again = schedule[path] if path else schedule
        sentence = rf"all from here down that {what} is served already, and nothing is forced; undo\(\) the step"
        with pytest.raises(ScheduleError, match=sentence):
            again.use_kernels(force=force)
        assert list(map(id, schedule.mod.modules())) == list(map(id, modules))
        schedule.undo()
        schedule.undo()
        schedule.use_kernels(force=force)

    def test_what_is_served_in_a_graph(self) -> None:
        schedule = create_schedule(MLP(), example_inputs=(X,))
        schedule.trace(flatten=True)
        schedule.use_kernels()
        with pytest.raises(ScheduleError, match="all from here down that computes 'swiglu' is served already"):
            schedule.use_kernels(force={"swiglu": "eager"})

    def test_what_is_not_served_yet_can_be(self) -> None:
        schedule = make_schedule()
        schedule["1"].use_kernels("swiglu")
        schedule.use_kernels(force={"*": "eager"})
        assert [type(module).__name__ for module in schedule.mod] == ["KernelLayerNorm", "KernelMLP"]  # type: ignore[arg-type]

    def test_what_nothing_computes_is_no_error_of_the_default(self) -> None:
        schedule = make_schedule()
        schedule.use_kernels(force={"rms_norm": "native"})
        schedule.use_kernels(force={"rms_norm": "native"})
        assert set(schedule.metadata.primitives["use_kernels"]) == {"swiglu", "layer_norm"}


X, W = torch.randn(4, 8), torch.ones(8)
LABELS = torch.tensor([1, 2, 3, 0])
ROWS = torch.randn(1, 2, 2, 8)
RUNS: dict[str, tuple[Callable[[], Any], str]] = {
    "numbers": (lambda: run("swiglu", 3, 4), "run('swiglu'): gate is 3, not a tensor; swiglu takes gate, up"),
    "missing": (lambda: run("swiglu", X), "run('swiglu'): missing a required argument: 'up'; swiglu takes gate, up"),
    "none": (lambda: run("swiglu"), "run('swiglu'): missing a required argument: 'gate'; swiglu takes gate, up"),
    "many": (lambda: run("swiglu", X, X, X), "run('swiglu'): too many positional arguments; swiglu takes gate, up"),
    "by name": (lambda: run("swiglu", gate=X, up=X), "run('swiglu'): gate is to be given by its position; swiglu takes"),
    "weighed": (lambda: run("embedding", LABELS, weight=X), "run('embedding'): weight is to be given by its position"),
    "option": (
        lambda: run("bias_act", X, None),
        "missing a required argument: 'activation'; bias_act takes x, bias, activation=",
    ),
    "activation": (
        lambda: run("bias_act", X, W, activation="foo"),
        "run('bias_act'): no activation 'foo', but gelu, gelu_tanh,",
    ),
    "cast": (
        lambda: run("rms_norm", X, W, eps=1e-6, cast="up"),
        "run('rms_norm'): no cast 'up', but input, weight; rms_norm takes",
    ),
    "eps": (
        lambda: run("rms_norm", X, W, eps="a", choice="native"),
        "run('rms_norm'): eps is 'a', not a number; rms_norm takes",
    ),
    "kernel": (lambda: run(["swiglu"], X, X), "['swiglu'] is not the name of a kernel; available: attention"),  # type: ignore[arg-type]
    "choice": (lambda: run("swiglu", X, X, choice=[]), "run('swiglu'): choice is [], not the name of an implementation"),  # type: ignore[arg-type]
    "class": (
        lambda: run("linear_cross_entropy", X, X, LABELS + 6),
        "run('linear_cross_entropy'): label 7 is none of 4 classes",
    ),
    "few": (
        lambda: run("linear_cross_entropy", X, X, LABELS[:2]),
        "run('linear_cross_entropy'): labels are of shape [2], and the rows of hidden states of [4]",
    ),
    "labels": (
        lambda: run("linear_cross_entropy", X, X, torch.cat([LABELS, LABELS])),
        "run('linear_cross_entropy'): labels are of shape [8], and the rows of hidden states of [4]",
    ),
    "int32": (lambda: run("linear_cross_entropy", X, X, LABELS.int()), "labels are of torch.int32; give them as torch.int64"),
    "mars": (lambda: choose("layer_norm", "mars", None), "'mars' is not a device; give one such as 'cpu' or 'cuda:0'"),
    "no device": (lambda: explain("layer_norm", None), "None is not a device; give one such as"),  # type: ignore[arg-type]
    "dtype": (lambda: choose("layer_norm", "cpu", "float32"), "'float32' is not a dtype; give one such as torch.bfloat16"),  # type: ignore[arg-type]
    "list": (lambda: choose([], "cpu", None), "[] is not the name of a kernel"),  # type: ignore[arg-type]
    "forced": (
        lambda: choose("swiglu", "cpu", None, 3),
        "3 is not the name of an implementation; kernel 'swiglu' has eager, inductor and",
    ),  # type: ignore[arg-type]
    "devices": (lambda: Implementation("a:b", devices="cuda"), "devices of an Implementation are 'cuda'; give a tuple such as"),  # type: ignore[arg-type]
    "dtypes": (
        lambda: Implementation("a:b", dtypes=torch.float32),
        "dtypes of an Implementation are torch.float32; give a tuple",
    ),  # type: ignore[arg-type]
    "packages": (lambda: Implementation("a:b", packages="x"), "packages of an Implementation are 'x'; give a tuple such as"),  # type: ignore[arg-type]
    "needs": (lambda: Implementation("a:b", needs=3), "needs of an Implementation is 3, not a function"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", RUNS)
def test_kernels(name: str) -> None:
    call, sentence = RUNS[name]
    with pytest.raises(ScheduleError) as caught:
        call()
    assert sentence in str(caught.value)


@pytest.mark.parametrize("choice", ["eager", "native"])
@pytest.mark.parametrize("labels", [LABELS[:2], torch.cat([LABELS, LABELS]), LABELS.int(), LABELS.float()], ids=str)
def test_labels_that_are_not_one_for_each_row(choice: str, labels: torch.Tensor) -> None:
    with pytest.raises(ScheduleError, match=r"run\('linear_cross_entropy'\): labels are of"):
        run("linear_cross_entropy", X, X, labels, choice=choice)


@pytest.mark.parametrize("choice", ["eager", "native", None])
def test_a_mask_beside_causality(choice: str | None) -> None:
    with pytest.raises(ValueError, match="attention takes a mask or is_causal, not both"):
        run("attention", ROWS, ROWS, ROWS, torch.ones(2, 2, dtype=torch.bool), is_causal=True, choice=choice)


def test_what_a_kernel_itself_says_is_said() -> None:
    with pytest.raises(RuntimeError, match="must match the size"):
        run("swiglu", X, X[:, :3])


MODULES: dict[str, tuple[Callable[[], Any], str]] = {
    "no heads": (lambda: op.FusedQKV(8, 0), "a width of 8 is not divisible by 0 heads"),
    "fewer": (lambda: op.FusedQKV(8, -2), "a width of 8 is not divisible by -2 heads"),
    "no ranks": (lambda: op.FusedQKV(8, 2, 0), "2 heads cannot be split over 0 ranks"),
    "no layers": (lambda: op.FusedQKV.from_separate(nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 8), 2), "not Identity"),  # type: ignore[arg-type]
    "no heads of attention": (lambda: op.FlashAttention(8, 0), "a width of 8 is not divisible by 0 heads"),
    "dropout": (lambda: op.FlashAttention(8, 2, attn_pdrop=2), "attn_pdrop has to be a probability, not 2"),
    "no batch": (lambda: op.FlashAttention(8, 2)(X), r"FlashAttention takes \[batch, length, width\], not \[4, 8\]"),
    "whole masks": (
        lambda: op.FlashAttention(8, 2, is_decoder=True)(X[None], torch.ones(1, 1, 4, 4).long()),
        "takes a mask of bools or of what is added to the scores, not of torch.int64",
    ),
    "p": (lambda: op.LinearWithDropout(8, 8, p="a"), "p has to be a probability, not 'a'"),  # type: ignore[arg-type]
    "sync": (lambda: op.LinearWithAct(8, 8, sync_fn=3), "sync_fn is called with the product, and 3 is not a function"),  # type: ignore[arg-type]
    "activation": (lambda: op.FusedMLP(8, 16, []), r"no activation \[\]; available: gelu"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    call, sentence = MODULES[name]
    with pytest.raises(ValueError, match=sentence):
        call()
