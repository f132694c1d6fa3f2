"""Split a small model of a Transformers family over the ranks and compare it with the unmodified one."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, Schedule, ScheduleError, build, create_schedule
from slapo_sharding import plugin
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent
from tests.slapo_sharding.logged_warnings import warnings_told
from tests.zoo.families import FAMILIES

FAST = tuple(
    """
    albert bart bert bloom clip deepseek_v3 distilbert falcon gemma2 gemma3_text glm gpt2 gpt_neo gpt_neox gpt_oss gptj
    granitemoe llama mistral mixtral modernbert mpnet opt openai-gpt phi3 qwen2 qwen2_moe qwen3 qwen3_moe roberta stablelm t5
    vit whisper xglm
    """.split()
)
"""Those of which the others are variations."""

ON_FOUR = frozenset({"llama"})
"""Those of them that the fast runs split on four ranks too."""

UNLIKE = {"deepseek_v3", "gemma2", "gemma3_text", "gpt_neo", "gpt_oss", "modernbert"}
"""Those whose two layers are of different make."""

ROUNDING = {"blenderbot", "clip", "exaone4", "gemma2", "gemma3_text", "mpt", "mt5", "nemotron"}
"""Families of which single gradients are sums of much larger numbers: they are compared in float64."""


class Whole(NamedTuple):
    """Parts of a sharded family that stay whole: ``attention``, ``MLP`` or both; and the place that a warning names."""

    what: str
    why: str
    told: str = ""


NONE = "it has none"

LEFT_WHOLE = {
    "bloom": Whole("attention", "its position biases (ALiBi) are computed for all heads", "modeling_bloom.py:"),
    "convbert": Whole("attention", "its queries meet what convolutions make of all channels", "modeling_convbert.py:"),
    "convnext": Whole("attention", NONE),
    "deberta-v2": Whole(
        "attention", "heads and batch are one dimension, along which positions are repeated", "modeling_deberta_v2.py:"
    ),
    "deepseek_v3": Whole("", "norms lie between its projections", "kv_a_proj_with_mqa stays whole"),
    "fnet": Whole("attention", NONE),
    "led": Whole("", "its attention is to windows that overlap in memory", "modeling_led.py:"),
    "mamba": Whole("attention and MLP", "its scan mixes all channels with those of the input projection", "modeling_mamba.py:"),
    "mobilebert": Whole("", "a scale of all widths follows the layers of its bottlenecks", ".bottleneck"),
    "poolformer": Whole("attention", NONE),
    "qwen2_moe": Whole("", "the gate of its shared expert has one output", "modeling_qwen2_moe.py:"),
    "resnet": Whole("attention", NONE),
    "segformer": Whole("", "its first attention has one head", "q_proj stays whole"),
    "squeezebert": Whole("attention and MLP", "its layers are grouped convolutions", "none of its layers can be split"),
    "xlnet": Whole("attention", NONE),  # split by the heads of its parameters, which no step of a layer shows
}
"""Families of which more than single tables stays whole."""

ALONG_ON_TWO = {"gpt_oss"}
"""Those of which nothing but the experts is split along the sequence on four ranks."""

LEFT_WHOLE_ON_FOUR = {
    "gpt_oss": Whole(
        "attention", "its sinks are of all heads, and ranks would hold its key heads in copies", "modeling_gpt_oss.py:"
    )
}
"""Those of which it does where the ranks do not divide the key heads."""

LEFT_WHOLE_ALONG = {
    "deepseek_v3": Whole("attention", "norms lie between its projections", "modeling_deepseek_v3.py:"),
    "deberta": Whole("attention", "biases of all heads are parameters outside of its projection", "modeling_deberta.py:"),
    "olmo2": Whole("attention", "its norms are of all heads at once", "modeling_olmo2.py:"),
}
"""Those of which it does with sequence parallelism alone, for which no published plan is used."""


class Refused(NamedTuple):
    """Why a family is refused, as the page of limits says it, and a part of the message."""

    why: str
    told: str


_TOKENS = Refused(
    "16 patches and one more token are not divisible by the number of ranks", "has length 17, not divisible by 2 ranks"
)
_EXPERTS = Refused("nothing but its experts is split", "only 'model.layers.0.mlp.experts' and its like are split")
_NO_LAYERS = "no list of layers (nn.ModuleList, or nn.Sequential of one class) has inputs of shape [batch, sequence, width]"

ALONG_REFUSED = {
    "beit": _TOKENS,
    "clip": _TOKENS,
    "convnext": Refused("it has no sequence", _NO_LAYERS),
    "ctrl": Refused(
        "its attention takes the length from one of three inputs", "the length of the whole sequence as an argument at view"
    ),
    "dinov2": _TOKENS,
    "mamba": Refused("nothing but its vocabulary is split", "nothing of the MambaForCausalLM can be split"),
    "led": Refused("it takes the width from the shape of its input", "is invalid for input of size"),
    "olmoe": _EXPERTS,
    "poolformer": Refused("it has no sequence", _NO_LAYERS),
    "resnet": Refused("it has no sequence", _NO_LAYERS),
    "segformer": Refused("the lists of its blocks are given images", _NO_LAYERS),
    "squeezebert": Refused("its layers are given [batch, width, sequence]", _NO_LAYERS),
    "swin": Refused(
        "its windows are cut by the height and width of the image", "the length of the whole sequence as an argument at view"
    ),
    "vit": _TOKENS,
    "xlnet": Refused(
        "its layers are given [sequence, batch, width]", "inputs of shape [12, 2, 32], not [batch, sequence, width]"
    ),
}
"""Families that are split, but not along the sequence, and why."""

WHOLE_ALONG = {"mobilebert"}
"""Families whose layers are gathered before anything in them is split."""

DEEP = {"bert", "gpt2", "llama", "mixtral", "opt", "t5"}
"""Those that have two layers here: what is found for one is done to all like it."""


class Found(NamedTuple):
    """The steps a plan took, and its warnings."""

    steps: list[str]
    told: list[str]

    def check_what_is_whole(self, name: str, sequence_parallel: bool = False, ranks: int = 2) -> None:
        """Attention and feed-forward are split but where the table says otherwise; what a warning names is whole."""
        paths = [found[1] for step in self.steps if (found := re.match(r"sch\['([^']*)'\]\.shard\(", step))]
        layers = [path for path in paths if re.search(r"\.\d+\.", path)]
        split = {"attention" if "att" in path.lower() else "MLP" for path in layers}
        table = {**LEFT_WHOLE, **(LEFT_WHOLE_ALONG if sequence_parallel else {}), **(LEFT_WHOLE_ON_FOUR if ranks == 4 else {})}
        left = table.get(name, Whole("", "nothing does"))
        assert {"attention", "MLP"} - split == set(left.what.split(" and ")) - {""}, left.why
        assert left.told in "; ".join(self.told), self.told
        for whole in (message.split()[1] for message in self.told):
            assert not any(f"{path}.".startswith(f"{whole}.") for path in paths), self.told


def depth_of(name: str) -> int | None:
    """One layer of each kind."""
    return None if name in UNLIKE else 1


def family(name: str, depth: int | None = None, **sizes: int) -> tuple[nn.Module, dict[str, Any]]:
    """A model that keeps no cache, and a batch; ``sizes`` are of its config."""
    known = FAMILIES[name]
    model, batch = dataclasses.replace(known, config={**known.config, **sizes}).model(depth=depth), known.batch()
    for module in model.modules():
        if hasattr(config := getattr(module, "config", None), "use_cache"):
            config.use_cache = False
    if "use_cache" in inspect.signature(type(model).forward).parameters:
        batch["use_cache"] = False  # type: ignore[assignment]
    return model, batch


def of_dtype(dtype: torch.dtype, model: nn.Module, batch: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """Both with what they hold of floating point numbers in this type."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return model.to(dtype), {key: cast(value) for key, value in batch.items()}


def split(model: nn.Module, batch: dict[str, Any], sequence_parallel: bool) -> Schedule:
    """A built schedule with this one step."""
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]), example_inputs=batch)
    sch.tensor_parallel(sequence_parallel=sequence_parallel)
    assert len(sch.journal) == 1
    build(sch)
    return sch


def three_steps(model: nn.Module, batch: dict[str, Any]) -> None:
    """Train with plain SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()


def steps_of_same(rank: int, name: str, ways: tuple[bool, ...] = (False,), depth: int | None = None) -> list[Found]:
    """Split a family and compare outputs, loss, gradients and three steps with the unmodified model's.

    Args:
        rank: This process's.
        name: Of the family.
        ways: For each split, whether along the sequence too.
        depth: Layers in each stack; default: the family's.
    """
    before, batch = family(name, depth)
    if name in ROUNDING:
        before, batch = of_dtype(torch.float64, before, batch)
    found, trained = [], []
    for sequence_parallel in ways:
        model = copy.deepcopy(before)
        with warnings_told() as told:
            sch = split(model, batch, sequence_parallel)
        assert_equivalent(before, model, atol=1e-5, rtol=1e-5, **batch)
        three_steps(model, batch)
        found.append(Found([str(child) for child in sch.journal.steps[0].children], told))
        trained.append(sch.full_state())
    three_steps(before, batch)
    expected = {name: parameter.detach() for name, parameter in before.named_parameters(remove_duplicate=False)}
    for state in trained:
        torch.testing.assert_close(state, {name: expected[name] for name in state}, atol=1e-5, rtol=1e-5)
    return found


def check_on_two_and_four_ranks(name: str, ways: tuple[bool, ...]) -> None:
    """Compare a family on 2 ranks and, those of ``ON_FOUR``, on 4, without and with sequence parallelism."""
    whole = name not in FAST or name in DEEP  # one layer of each kind tells as much in half the time
    check(name, 2, ways, None if whole else depth_of(name))
    if name in ON_FOUR:
        check(name, 4, ways, depth_of(name))


def check(name: str, ranks: int, ways: tuple[bool, ...], depth: int | None) -> None:
    """Compare a family, and look at what was split."""
    for found, sequence_parallel in zip(
        run_distributed(steps_of_same, ranks, name, ways, depth, timeout=200)[0], ways, strict=True
    ):
        found.check_what_is_whole(name, sequence_parallel, ranks)
        if sequence_parallel:
            assert any("'scatter'" in step for step in found.steps)
            assert any("'fwd_post', 'reduce_scatter'" in step for step in found.steps) == (name not in WHOLE_ALONG)


def refusal(rank: int, name: str, sequence_parallel: bool = False) -> str:
    """The message for a family that cannot be split, which it leaves as it is."""
    model, batch = family(name)
    names = dict(model.named_parameters())
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]), example_inputs=batch)
    with pytest.raises(ScheduleError) as caught:
        sch.tensor_parallel(sequence_parallel=sequence_parallel)
    assert all(names[path] is parameter for path, parameter in model.named_parameters())
    return str(caught.value)
