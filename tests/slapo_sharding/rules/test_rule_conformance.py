"""Every sharding rule of ours passes the conformance kit that authors of plugins are given."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import default_registry
from slapo_kernels.op import LinearWithAct, LinearWithSeparateBias
from slapo_testing.conformance import Check, Refused, RuleExample, sharding_rule_checks

pytestmark = pytest.mark.multiproc

X = torch.linspace(-1, 1, 48).view(2, 3, 8).sin()
IDS = torch.tensor([[0, 3, 9], [5, 6, 3]])


def conv1d() -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return Conv1D(10, 8)


def embedding(**options: Any) -> nn.Module:
    return nn.Embedding(10, 8, **options)


def scaled_embedding() -> nn.Module:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    return Gemma3TextScaledWordEmbedding(10, 8, padding_idx=3, embed_scale=2.5)


def llama4_experts() -> nn.Module:
    from transformers import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

    made = Llama4TextExperts(Llama4TextConfig(hidden_size=8, intermediate_size=16, num_local_experts=4))
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def prelu() -> nn.Module:
    return nn.PReLU(8)


def group_norm() -> nn.Module:
    return nn.GroupNorm(4, 8)


def attention(**options: Any) -> nn.Module:
    return nn.MultiheadAttention(8, 4, batch_first=True, **options)


def convolution(name: str, **options: Any) -> nn.Module:
    return getattr(nn, name)(8, 10, 3, padding=1, **options)


def grouped(name: str) -> nn.Module:
    return getattr(nn, name)(8, 8, 3, groups=4)


def norm(name: str, **options: Any) -> nn.Module:
    return getattr(nn, name)(8, **options)


def experts(kind: str) -> nn.Module:
    from transformers import GptOssConfig, MixtralConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config, cls = {"mixtral": (MixtralConfig, MixtralExperts), "gpt_oss": (GptOssConfig, GptOssExperts)}[kind]
    made = cls(config(hidden_size=8, intermediate_size=16, num_local_experts=4))
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def tokens() -> tuple[torch.Tensor, ...]:
    weights, chosen = torch.randn(10, 4).softmax(-1).topk(2, dim=-1)
    return torch.randn(10, 8), chosen, weights


def images(name: str) -> torch.Tensor:
    return torch.randn(3, 8, *(5,) * int(name[-2]), generator=torch.Generator().manual_seed(0))


def no_split(match: str, *axes: int) -> list[Refused]:
    return [Refused(match, ("weight", axis)) for axis in axes]


RULES: dict[str, list[RuleExample]] = {
    "Linear": [RuleExample(partial(nn.Linear, 8, 10), (X,), refused=no_split("out of range", 2))],
    "LinearWithAct": [RuleExample(partial(LinearWithAct, 8, 10), (X,), refused=no_split("cannot be split along 1", 1))],
    "LinearWithSeparateBias": [RuleExample(partial(LinearWithSeparateBias, 8, 10), (X,))],
    "Embedding": [
        RuleExample(embedding, (IDS,)),
        RuleExample(partial(embedding, padding_idx=3), (IDS,), name="with padding"),
        RuleExample(scaled_embedding, (IDS,), name="scaled"),
        RuleExample(partial(embedding, scale_grad_by_freq=True), (IDS,), refused=no_split("counts indices", 0)),
        RuleExample(partial(embedding, max_norm=1.0), (IDS,), refused=no_split("max_norm=1.0 rescales", 0, 1)),
        RuleExample(partial(embedding, sparse=True), (IDS,), refused=no_split("sparse gradients", 0, 1)),
    ],
    "Transformers Conv1D": [RuleExample(conv1d, (X,))],
    "BatchNorm": [
        RuleExample(partial(norm, "BatchNorm2d"), (images("BatchNorm2d"),)),
        RuleExample(partial(norm, "BatchNorm1d"), (images("BatchNorm1d"),)),
        RuleExample(partial(norm, "BatchNorm2d", affine=False), (images("BatchNorm2d"),), name="statistics alone"),
    ],
    "GroupNorm": [RuleExample(group_norm, (images("BatchNorm2d"),))],
    "InstanceNorm": [RuleExample(partial(norm, "InstanceNorm2d", affine=True), (images("BatchNorm2d"),))],
    "PReLU": [RuleExample(prelu, (images("BatchNorm2d"),))],
    "MultiheadAttention": [
        RuleExample(attention, (X, X, X)),
        RuleExample(partial(attention, bias=False), {"query": X, "key": X, "value": X, "need_weights": False}, name="no bias"),
    ],
    "stack of experts": [RuleExample(partial(experts, kind), tokens, name=kind) for kind in ("mixtral", "gpt_oss")],
    "Llama 4's stack of experts": [RuleExample(llama4_experts, (torch.randn(12, 8),))],
    **{
        name: [RuleExample(partial(convolution, name), (images(name),))]
        for name in (f"Conv{kind}{dims}d" for kind in ("", "Transpose") for dims in (1, 2, 3))
    },
    **{
        f"grouped {name}": [RuleExample(partial(grouped, name), (images(name),))]
        for name in (f"Conv{kind}{dims}d" for kind in ("", "Transpose") for dims in (1, 2, 3))
    },
}
ALWAYS = {"Linear", "Embedding", "Transformers Conv1D", "Conv2d", "grouped Conv2d", "BatchNorm"}
"""Rules whose first example is for always."""


def parameters() -> list[Any]:
    """Checks of all rules; most examples are marked slow."""
    found = []
    for kind, examples in RULES.items():
        for check in sharding_rule_checks(kind, examples):
            slow = check.example is not None and (kind not in ALWAYS or check.example != examples[0])
            found.append(pytest.param(check, marks=[pytest.mark.slow] * slow, id=str(check)))
    return found


@pytest.mark.parametrize("check", parameters())
def test_our_sharding_rules_conform(check: Check) -> None:
    check()


def test_no_rule_is_missing() -> None:
    from slapo_sharding.rules import rulebook

    assert set(RULES) == {rule.kind for rule, _ in rulebook._load(default_registry())}
