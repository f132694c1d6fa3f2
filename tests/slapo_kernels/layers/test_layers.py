"""The classic modules, each against what torch or a model has for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model
from transformers.activations import ACT2FN
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Attention

from slapo import op
from slapo_core import ScheduleError, create_schedule
from slapo_kernels.implementations.eager import ACTIVATIONS
from slapo_tracing import Pattern
from slapo_verify.comparison import assert_equivalent

X = torch.randn(2, 5, 16)
TRAINING = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
BIAS = pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])


class Named(nn.Module):
    """Parts one after another, whose weights are those of ``linear``."""

    def __init__(self, linear: nn.Module, *others: nn.Module) -> None:
        super().__init__()
        self.linear, self.others = linear, nn.Sequential(*others)

    def forward(self, x: torch.Tensor) -> Any:
        return self.others(self.linear(x))


def with_weights_of(after: nn.Module, before: nn.Module) -> nn.Module:
    after.load_state_dict(before.state_dict())
    return after


@TRAINING
@BIAS
def test_a_linear_layer_with_its_bias_apart(bias: bool, training: bool) -> None:
    before = nn.Linear(16, 8, bias)
    after = with_weights_of(op.LinearWithSeparateBias(16, 8, bias), before)
    assert_equivalent(Named(before).train(training), Named(after).train(training), X)


@TRAINING
@BIAS
def test_a_linear_layer_with_dropout(bias: bool, training: bool) -> None:
    before = nn.Linear(16, 8, bias)
    after = with_weights_of(op.LinearWithDropout(16, 8, bias, p=0.4), before)
    assert_equivalent(Named(before, nn.Dropout(0.4)).train(training), Named(after).train(training), X)


@TRAINING
@BIAS
@pytest.mark.parametrize("act_fn", [*ACTIVATIONS, "gelu_pytorch_tanh", "swish"])
def test_a_linear_layer_with_an_activation(act_fn: str, bias: bool, training: bool) -> None:
    before, act = nn.Linear(16, 8, bias), ACT2FN["gelu_pytorch_tanh" if act_fn == "gelu_tanh" else act_fn]
    after = with_weights_of(op.LinearWithAct(16, 8, bias, act_fn), before)
    assert_equivalent(Named(before, act).train(training), Named(after).train(training), X)


def test_one_gelu_is_not_the_other() -> None:
    before = nn.Linear(16, 8)
    after = with_weights_of(op.LinearWithAct(16, 8, act_fn="gelu_new"), before)
    with pytest.raises(AssertionError, match="output"):
        assert_equivalent(Named(before, nn.GELU()), Named(after), X)


def test_an_activation_that_is_not_known() -> None:
    with pytest.raises(ValueError, match="no activation 'gelou'; available: gelu, gelu_new"):
        op.LinearWithAct(4, 4, act_fn="gelou")


def test_a_probability_that_is_none() -> None:
    with pytest.raises(ValueError, match="p has to be a probability, not 1.5"):
        op.LinearWithDropout(4, 4, p=1.5)


@pytest.mark.parametrize("kind", [op.LinearWithSeparateBias, op.LinearWithAct, op.LinearWithDropout])
def test_the_bias_comes_after_the_sum_over_ranks(kind: Any) -> None:
    plain, summed = kind(16, 8).eval(), kind(16, 8, sync_fn=lambda product: product * 2).eval()
    with_weights_of(summed, plain)
    expected = F.linear(X, plain.weight) * 2 + plain.bias
    if kind is op.LinearWithAct:
        expected = F.gelu(expected)
    torch.testing.assert_close(summed(X), expected)


def test_the_bias_is_an_operation_that_a_pattern_finds() -> None:
    sch = create_schedule(nn.Sequential(op.LinearWithSeparateBias(16, 8), nn.GELU()), example_inputs=(X,))
    sch.trace(flatten=True, leaf_modules=[])
    assert len(sch.find(lambda x, bias: x + bias)) == 1


@pytest.mark.parametrize(
    ("part", "other"),
    [
        (op.LinearWithAct(16, 8, act_fn="relu"), op.LinearWithAct(16, 8, act_fn="silu")),
        (op.LinearWithDropout(16, 8, p=0.1), op.LinearWithDropout(16, 8, p=0.2)),
        (op.FusedMLP(16, 8, "relu"), op.FusedMLP(16, 8, "relu", 0.5)),
    ],
    ids=["act", "dropout", "mlp"],
)
def test_they_can_be_looked_for(part: nn.Module, other: nn.Module) -> None:
    class Wanted(Pattern):
        def __init__(self) -> None:
            super().__init__()
            self.part = part

        def forward(self, x: Any) -> Any:
            return self.part(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = other, part

        def forward(self, x: torch.Tensor) -> Any:
            return self.first(x), self.second(x)

    sch = create_schedule(Model(), example_inputs=(X,))
    sch.trace(recursive=False)
    (match,) = sch.find(Wanted())
    assert [node.target for _, node in match] == ["second"]


@TRAINING
def test_the_mlp_is_gpt2s(training: bool) -> None:
    config = GPT2Config(n_embd=16, n_head=4, resid_pdrop=0.3)
    before, after = GPT2MLP(32, config), op.FusedMLP(16, 32, config.activation_function, config.resid_pdrop)
    for linear, conv in ((after.fc_in, before.c_fc), (after.fc_out, before.c_proj)):
        linear.load_state_dict({"weight": conv.weight.T, "bias": torch.nn.init.normal_(conv.bias)})
    assert list(after.state_dict()) == ["fc_in.weight", "fc_in.bias", "fc_out.weight", "fc_out.bias"]
    x = X.clone().requires_grad_()
    found = []
    for module in (before, after):
        torch.manual_seed(3)
        out = module.train(training)(x)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        found.append((out, grad))
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs)


class Projections(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16, bias) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        return tuple(each(x).unflatten(-1, (4, 4)) for each in (self.q, self.k, self.v))


@BIAS
def test_three_projections_are_one_and_three_again(bias: bool) -> None:
    before = Projections(bias)
    fused = op.FusedQKV.from_separate(before.q, before.k, before.v, 4)
    x = X.clone().requires_grad_()
    for ours, theirs in zip(fused(x), before(x), strict=True):
        torch.testing.assert_close(ours, theirs)
        weights = torch.randn(ours.shape)
        grads = [torch.autograd.grad((each * weights).sum(), x, retain_graph=True)[0] for each in (ours, theirs)]
        torch.testing.assert_close(*grads)
    for layer, original in zip(fused.to_separate(), (before.q, before.k, before.v), strict=True):
        assert all(map(torch.equal, layer.state_dict().values(), original.state_dict().values()))


def test_the_gradients_of_fused_projections_are_those_of_the_three() -> None:
    before = Projections(True)
    fused = op.FusedQKV.from_separate(before.q, before.k, before.v, 4)
    for module in (before, fused):
        torch.stack(module(X)).square().sum().backward()
    with torch.no_grad():
        for parameter in fused.parameters():
            parameter.copy_(parameter.grad)
    for layer, original in zip(fused.to_separate(), (before.q, before.k, before.v), strict=True):
        torch.testing.assert_close(layer.weight, original.weight.grad)
        torch.testing.assert_close(layer.bias, original.bias.grad)


def test_a_part_of_the_rows_is_whole_heads() -> None:
    fused = op.FusedQKV(16, 4, world_size=2)
    whole = [each[..., 2:, :] for each in fused(X)]
    linear = fused.fused_linear
    linear.weight, linear.bias = (nn.Parameter(each[24:]) for each in (linear.weight.data, linear.bias.data))
    for ours, theirs in zip(fused(X), whole, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_projections_that_do_not_fit_together() -> None:
    with pytest.raises(ValueError, match="a width of 16 is not divisible by 3 heads"):
        op.FusedQKV(16, 3)
    with pytest.raises(ValueError, match="4 heads cannot be split over 3 ranks"):
        op.FusedQKV(16, 4, 3)
    with pytest.raises(ValueError, match="takes layers from 16 to 16, not from 16 to 8"):
        op.FusedQKV.from_separate(nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 16), 4)
    with pytest.raises(ValueError, match="all have a bias, or none"):
        op.FusedQKV.from_separate(nn.Linear(16, 16), nn.Linear(16, 16, False), nn.Linear(16, 16), 4)


PADDED = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
MASKS = {"none": None, "padding": PADDED, "added": torch.zeros(2, 1, 1, 5).masked_fill(PADDED[:, None, None] == 0, -1e9)}


def bert(fused: bool, dropout: float = 0.3) -> tuple[nn.Module, nn.Module]:
    before = BertSelfAttention(
        BertConfig(hidden_size=16, num_attention_heads=4, attention_probs_dropout_prob=dropout, attn_implementation="eager")
    )
    after = op.FlashAttention(16, 4, attn_pdrop=dropout, fused_qkv=fused)
    if fused:
        after.qkv = op.FusedQKV.from_separate(before.query, before.key, before.value, 4)
    else:
        after.load_state_dict(before.state_dict())
    return before, after


@TRAINING
@pytest.mark.parametrize("fused", [False, True], ids=["three", "fused"])
@pytest.mark.parametrize("mask", MASKS)
def test_attention_is_berts(mask: str, fused: bool, training: bool) -> None:
    before, after = bert(fused)
    given = MASKS[mask]
    added = given if given is None or given.is_floating_point() else MASKS["added"]
    seen = PADDED.bool() if given is not None else torch.ones(2, 5, dtype=torch.bool)
    compare(before.train(training), after.train(training), {"attention_mask": added}, {"attention_mask": given}, seen)


@TRAINING
@pytest.mark.parametrize("mask", ["none", "padding", "added"])
def test_attention_is_gpt2s(mask: str, training: bool) -> None:
    config = GPT2Config(n_embd=16, n_head=4, attn_pdrop=0.3, resid_pdrop=0.2, attn_implementation="eager")
    before, after = GPT2Attention(config), op.FlashAttention(16, 4, is_decoder=True, attn_pdrop=0.3, resid_pdrop=0.2)
    torch.nn.init.normal_(before.c_attn.bias)
    with_weights_of_gpt2(after, before)
    given, seen = MASKS[mask], PADDED.bool() if mask != "none" else torch.ones(2, 5, dtype=torch.bool)
    causal = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -1e9)
    theirs = causal[None, None] + (0 if given is None else MASKS["added"])
    compare(before.train(training), after.train(training), {"attention_mask": theirs}, {"attention_mask": given}, seen)


def with_weights_of_gpt2(after: Any, before: Any) -> None:
    parts = zip(
        (after.query, after.key, after.value), before.c_attn.weight.split(16, 1), before.c_attn.bias.split(16), strict=True
    )
    for linear, weight, bias in parts:
        linear.load_state_dict({"weight": weight.T, "bias": bias})
    after.out_proj.load_state_dict({"weight": before.c_proj.weight.T, "bias": before.c_proj.bias})


def compare(before: nn.Module, after: nn.Module, theirs: Any, ours: Any, seen: torch.Tensor) -> None:
    """Outputs where the mask lets anything be seen, and gradients of the input, with the same dropout."""
    found = []
    for module, kwargs in ((before, theirs), (after, ours)):
        x = X.clone().requires_grad_()
        torch.manual_seed(3)
        out, _ = module(x, **kwargs)
        (out * seen[..., None]).square().sum().backward()
        found.append((out * seen[..., None], x.grad))
    for mine, other in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-4)


def test_attention_in_a_model_of_transformers() -> None:
    config = BertConfig(hidden_size=16, num_attention_heads=4, intermediate_size=32, num_hidden_layers=2, vocab_size=50)
    before, after = BertModel(config).eval(), BertModel(config).eval()
    after.load_state_dict(before.state_dict())
    sch = create_schedule(after)
    for layer in sch.select("encoder.layer.*"):
        new = op.FlashAttention(16, 4, attn_pdrop=config.attention_probs_dropout_prob)
        layer["attention.self"].replace(with_weights_of(new, layer["attention.self"].mod).eval())
    ids = torch.arange(10).view(2, 5)
    assert_equivalent(before, after, ids, attention_mask=PADDED.flip(-1))


@pytest.mark.parametrize("padded", [False, True])
def test_attention_in_a_decoder_of_transformers(padded: bool) -> None:
    config = GPT2Config(n_embd=16, n_head=4, n_layer=2, n_positions=16, vocab_size=50)
    before, after = GPT2Model(config).eval(), GPT2Model(config).eval()
    after.load_state_dict(before.state_dict())
    sch = create_schedule(after)
    for layer in sch.select("h.*"):
        new = op.FlashAttention(16, 4, is_decoder=True, attn_pdrop=0.1, resid_pdrop=0.1).eval()
        with_weights_of_gpt2(new, layer["attn"].mod)
        layer["attn"].replace(new)
    options = {"attention_mask": PADDED} if padded else {}
    ids = torch.arange(10).view(2, 5)
    found, expected = (model(ids, use_cache=False, **options).last_hidden_state for model in (after, before))
    seen = PADDED.bool() if padded else torch.ones(2, 5, dtype=torch.bool)
    torch.testing.assert_close(found[seen], expected[seen], atol=1e-6, rtol=1e-4)
    with pytest.raises(ValueError, match="FlashAttention has no past_key_values; call the model without it"):
        after(ids)


def test_what_attention_does_not_do_is_said() -> None:
    _, after = bert(False)
    with pytest.raises(ValueError, match="FlashAttention has no encoder_hidden_states; call the model without it"):
        after(X, encoder_hidden_states=X)
    with pytest.raises(ValueError, match="a width of 16 is not divisible by 3 heads"):
        op.FlashAttention(16, 3)
    with pytest.raises(ScheduleError, match="no implementation 'flsh' of kernel 'attention'; did you mean 'flash'"):
        op.FlashAttention(16, 4, attn_op_name="flsh")
    with pytest.raises(ScheduleError, match="'flash' of kernel 'attention' works on cuda, not on cpu"):
        op.FlashAttention(16, 4, attn_op_name="flash")(X)


def test_print_shows_what_passes_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(op.Print("before"), nn.Linear(16, 8), op.Print(values=True))
    x = X[0, :1, :].clone()
    out = model(x)
    assert torch.equal(out, model[1](x))
    first, second = capsys.readouterr().out.splitlines()
    assert first == "before: float32[1, 16] on cpu"
    assert second == f"float32[1, 8] on cpu {out.tolist()}"
    assert op.Print()(x, {"a": x, "b": 3})[0] is x
    assert capsys.readouterr().out == "float32[1, 16] on cpu, {'a': float32[1, 16] on cpu, 'b': 3}\n"


def test_print_is_silent_while_a_model_is_traced(capsys: pytest.CaptureFixture[str]) -> None:
    sch = create_schedule(nn.Sequential(op.Print("x"), nn.Linear(16, 8)), example_inputs=(X,))
    sch.trace(recursive=False)
    assert capsys.readouterr().out == ""
    sch.mod(X)
    assert capsys.readouterr().out == "x: float32[2, 5, 16] on cpu\n"
