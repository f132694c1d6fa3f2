"""Every primitive of ours passes the conformance kit that authors of plugins are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import Registry, Schedule, make, set_random_seed
from slapo_pipeline.tracing import pipe_split
from slapo_testing.conformance import Check, Example, Refused, primitive_checks

X = torch.linspace(-1, 1, 24).view(3, 8)


class Block(nn.Module):
    """A residual block with a dropout, an operation that is not a module, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down, self.drop = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x) + self.drop(self.norm(self.down(self.act(self.up(x)))))


class Net(nn.Module):
    """Two blocks between an embedding and a head that are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(6, 8), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


IDS = torch.tensor([0, 3, 5, 1])


class Mlp(nn.Module):
    """Without random numbers, in widths that two ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


class Gated(nn.Module):
    """Gated MLP that the SwiGLU kernel can replace."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Marked(nn.Module):
    """Says itself where a stage ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        pipe_split()
        return self.last(x)


def new_gelu(_: nn.Module) -> nn.Module:
    return nn.GELU()


def no_module(_: nn.Module) -> Any:
    return None


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def traced(sch: Schedule) -> None:
    sch["layers.0"].trace(recursive=False)


def activation(sch: Schedule) -> tuple[Any, ...]:
    return (sch["layers.0"].find("act"),)


def silu_for_the_function(sch: Schedule) -> tuple[Any, ...]:
    return silu, sch["layers.0"].find(lambda x: F.silu(x))


def seeded(sch: Schedule) -> None:
    set_random_seed(0, tp_rank=sch.rank)


def column(sch: Schedule) -> None:
    sch["up"].shard(["weight", "bias"], axis=0)
    sch["up"].sync("bwd_post", "all_reduce")


def row(sch: Schedule) -> None:
    sch["down"].shard("weight", axis=1)
    sch["down"].sync("fwd_post", "all_reduce")


def column_behind(sch: Schedule) -> None:
    sch["up"].sync("bwd_post", "all_reduce")
    row(sch)


def both_cut(sch: Schedule) -> None:
    column(sch)
    sch["down"].shard("weight", axis=1)


def both_cut_alone(sch: Schedule) -> None:
    sch["up"].shard(["weight", "bias"], axis=0)
    sch["down"].shard("weight", axis=1)


def summed(sch: Schedule) -> None:
    sch["down"].sync("fwd_post", "all_reduce")


def gathered_column(sch: Schedule) -> None:
    sch["up"].shard(["weight", "bias"], axis=0, gathered=True)
    sch["up"].sync("bwd_post", "all_reduce")


def vocabulary(sch: Schedule) -> None:
    sch["embed"].sync("fwd_post", "all_reduce")
    sch["head"].sync("bwd_post", "all_reduce")
    sch["head"].sync("fwd_post", "all_gather", axis=-1)


def drop_outside(sch: Schedule) -> None:
    sch["layers.0.drop"].fork_rng(outside=True)


def all_traced(sch: Schedule) -> None:
    sch.trace()


def behind_the_layer(sch: Schedule) -> tuple[Any, ...]:
    return (sch["layers.0"].find(lambda x, y: F.silu(x) + y),)


def side_by_side(sch: Schedule) -> tuple[Any, ...]:
    return ([*sch.find("^gate$"), *sch.find("^up$")],)


def unchanged(module: nn.Module, args: Any, output: Any) -> Any:
    return output


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_head": 2, "n_layer": 2, "use_cache": False}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, bos_token_id=1, eos_token_id=1))


def gpt2_inputs() -> dict[str, Any]:
    ids = torch.arange(16).view(2, 8)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


HERE = ("tests.contracts.test_conformance",)
PRIMITIVES: dict[str, list[Example]] = {
    "annotate": [
        Example(
            Net,
            (IDS,),
            "layers.0.up",
            ("weight", "kind", "wide"),
            refused=[
                Refused("no parameter or buffer 'wieght'", ("wieght", "kind", 1)),
                Refused("not a free attribute name", ("bias", "grad", 1)),
            ],
        ),
        Example(Net, (IDS,), "layers.0.norm", ("running_mean", "kind", 1), name="a buffer"),
    ],
    "checkpoint": [
        Example(
            Net,
            (IDS,),
            "layers.0",
            refused=[
                Refused("ratio is 2.0", kwargs={"ratio": 2.0}, path="layers"),
                Refused("policy", kwargs={"policy": "everything"}),
            ],
        ),
        Example(Net, (IDS,), "layers", kwargs={"ratio": 0.5}, name="a share of a list"),
        Example(Net, (IDS,), "layers.0", activation, before=traced, name="a subgraph"),
        Example(Net, (IDS,), "layers.0", kwargs={"policy": "matmuls"}, name="what a policy keeps"),
        Example(Net, (IDS,), "layers", kwargs={"budget": 0.5}, name="what a budget keeps"),
        Example(Net, (IDS,), name="the whole model"),
    ],
    "compile": [
        Example(Mlp, (X,), "up", kwargs={"backend": "eager"}, refused=[Refused("dynamic is 'no'", kwargs={"dynamic": "no"})]),
        Example(Net, (IDS,), "layers.0", atol=1e-4, name="by inductor"),
        Example(Net, (IDS,), "layers", kwargs={"backend": "aot_eager"}, name="a list"),
    ],
    "cut_at_marks": [
        Example(Marked, (X,), refused=[Refused("is not a mark", (-1,))]),
        Example(Marked, (X,), args=(0,), name="one of them"),
    ],
    "cut_pipeline_stage": [
        Example(Net, (IDS,), "layers.0", refused=[Refused("where is 'behind'", ("behind",))]),
        Example(Net, (IDS,), "layers.1", ("before",), name="before a module"),
        Example(Net, (IDS,), "layers.1.act", name="inside of a block"),
    ],
    "decompose": [
        Example(
            Net,
            (IDS,),
            "layers.0.up",
            refused=[Refused("a GELU has no bias", path="layers.0.act"), Refused("parts", kwargs={"parts": 5})],
        ),
        Example(Net, (IDS,), "layers.0.up", kwargs={"parts": 2}, atol=1e-4, name="in parts"),
    ],
    "fork_rng": [
        Example(
            Net,
            (IDS,),
            "layers.0.drop",
            before=seeded,
            numerics="distribution",
            because="each rank has masks of its own",
            refused=[Refused("too many positional", (True,))],
        ),
        Example(
            Net,
            (IDS,),
            "layers.0",
            before=seeded,
            after=drop_outside,
            numerics="distribution",
            because="each rank has masks of its own",
            ranks=2,
        ),
    ],
    "freeze": [
        Example(Net, (IDS,), "layers.0", changes=["requires_grad"]),
        Example(Net, (IDS,), changes=["requires_grad"], name="the whole model"),
    ],
    "fuse": [
        Example(
            Net,
            (IDS,),
            "layers.0",
            activation,
            {"compiler": None},
            before=traced,
            refused=[Refused("compiler", activation, {"compiler": "gcc"}), Refused("", ([],))],
        ),
        Example(Net, (IDS,), "layers.0", behind_the_layer, before=traced, name="by inductor"),
        Example(Gated, (X,), args=side_by_side, kwargs={"compiler": "one_matmul"}, before=all_traced, name="side by side"),
    ],
    "offload": [
        Example(Net, (IDS,), "layers.0", kwargs={"min_bytes": 0}, refused=[Refused("min_bytes", kwargs={"min_bytes": -1})]),
        Example(Net, (IDS,), "layers", kwargs={"min_bytes": 1}, name="a list"),
    ],
    "pipeline": [
        Example(Net, (IDS,), args=(2,), refused=[Refused("stages is 0", (0,)), Refused("balance", (2,), {"balance": "x"})]),
        Example(Net, (IDS,), kwargs={"boundaries": ["layers.*"], "balance": "flops"}, name="at boundaries"),
        Example(Net, (IDS,), args=(3,), kwargs={"balance": "memory"}, name="by memory"),
    ],
    "replace": [
        Example(Net, (IDS,), "layers.0.act", lambda sch: (make(nn.GELU),), refused=[Refused("not a module", (3,))]),
        Example(
            Net,
            (IDS,),
            "layers.0.up",
            lambda sch: (make(nn.Linear, 8, 16),),
            changes=["values"],
            numerics="none",
            because="the new layer has weights of its own",
            name="a layer by a new one",
        ),
        Example(Net, (IDS,), "layers.0", silu_for_the_function, before=traced, trust=HERE, name="a subgraph"),
        Example(
            Net,
            (IDS,),
            "layers.0",
            lambda sch: (make(nn.GELU), sch["layers.0"].find("act")),
            before=traced,
            name="a subgraph by a module",
        ),
        Example(
            Net,
            (IDS,),
            "head",
            lambda sch: (make(nn.Linear, 8, 6, bias=False),),
            changes=["values", "ties"],
            numerics="none",
            because="the new layer has weights of its own",
            name="the holder of a tie",
        ),
    ],
    "replace_all": [
        Example(
            Net,
            (IDS,),
            args=(nn.GELU, new_gelu),
            trust=HERE,
            refused=[Refused("nothing below", (nn.Tanh, new_gelu)), Refused("not a module", (nn.GELU, no_module))],
        )
    ],
    "shard": [
        Example(
            Mlp,
            (X,),
            "up",
            (["weight", "bias"], 0),
            after=column_behind,
            ranks=2,
            refused=[Refused("no parameter", ("wieght", 0)), Refused("axis", ("weight", 5))],
        ),
        Example(Mlp, (X,), "up", (["weight", "bias"], 0), after=column_behind, name="on one rank"),
        Example(Mlp, (X,), "down", ("weight", 1), before=column, after=summed, ranks=2, name="a row"),
        Example(Net, (IDS,), "embed", ("weight", 0), after=vocabulary, ranks=2, name="a tied vocabulary"),
    ],
    "sync": [
        Example(
            Mlp,
            (X,),
            "down",
            ("fwd_post", "all_reduce"),
            before=both_cut,
            ranks=2,
            refused=[Refused("no mode", ("fwd", "all_reduce")), Refused("no operation", ("fwd_post", "sum"))],
        ),
        Example(Mlp, (X,), "down", ("fwd_post", "all_reduce"), before=both_cut, name="on one rank"),
        Example(Mlp, (X,), "up", ("bwd_post", "all_reduce"), before=both_cut_alone, after=summed, ranks=2, name="backward"),
        Example(Mlp, (X,), "up", ("fwd_post", "RS->RR"), before=gathered_column, ranks=2, name="a scheme"),
        Example(Mlp, (X,), "up", ("fwd_post", unchanged), trust=HERE, name="a function"),
    ],
    "sync_batch_norm": [
        Example(Net, (IDS,), refused=[Refused("no BatchNorm here or below", path="layers.0.up"), Refused("", (1,))]),
        Example(Net, (IDS,), "layers.1.norm", ranks=2, name="a layer"),
    ],
    "tensor_parallel": [
        Example(
            Mlp,
            (X,),
            args=({"up": "colwise", "down": "rowwise"},),
            ranks=2,
            refused=[Refused("", ({"upp": "colwise"},)), Refused("", ({"up": "diagonal"},))],
        ),
        Example(Mlp, (X,), ranks=2, name="a derived plan"),
        Example(Mlp, (X,), name="on one rank"),
        Example(gpt2, gpt2_inputs, before=seeded, ranks=2, name="GPT-2"),
    ],
    "trace": [
        Example(
            Net, (IDS,), refused=[Refused("tracer", kwargs={"tracer": "eyes"}), Refused("", kwargs={"leaf_modules": ["no"]})]
        ),
        Example(Net, (IDS,), "layers.0", kwargs={"flatten": True}, name="one module, flat"),
        Example(Net, (IDS,), kwargs={"leaf_modules": ["layers.1"]}, name="but for a leaf"),
        Example(Mlp, (X,), kwargs={"tracer": "fx"}, name="by fx"),
        Example(Mlp, (X,), kwargs={"tracer": "export", "flatten": True}, name="by export"),
        Example(gpt2, gpt2_inputs, name="GPT-2"),
    ],
    "trace_until": [
        Example(Net, (IDS,), args=("layers.*",), refused=[Refused("no module at 'layer'", ("layer",))]),
        Example(gpt2, gpt2_inputs, args=("transformer.h.*",), name="GPT-2"),
    ],
    "use_kernels": [
        Example(
            Gated,
            (X,),
            args=(["swiglu"], {"*": "eager"}),
            refused=[Refused("no kernel", ("swigly",)), Refused("nothing from here down", ("geglu",))],
        ),
        Example(
            gpt2,
            gpt2_inputs,
            kwargs={"force": {"*": "eager"}},
            tries=True,
            because="what a forward does is seen as it runs, and one that fails is none that is known",
            name="GPT-2",
        ),
    ],
}

SLOW = {"use_kernels", "tensor_parallel"}
"""They take parts of a second, several times in each check: of these only numbers and refusals are for always."""
ALWAYS = ("sync", "numerics")
"""The one check on several processes that is for always."""


def parameters() -> list[Any]:
    """Checks of all primitives; examples other than the first, and those with several processes, are mostly marked slow."""
    found = []
    for name, examples in PRIMITIVES.items():
        for check in primitive_checks(name, examples):
            several = isinstance(check.example, Example) and check.example.ranks > 1
            slow = (several and (name, check.name) != ALWAYS) or check.example not in (None, examples[0])
            slow |= check.example is not None and name in SLOW and check.name not in ("numerics", "refusals")
            marks = [pytest.mark.multiproc] * several + [pytest.mark.slow] * slow
            found.append(pytest.param(check, marks=marks, id=str(check)))
    return found


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler asks, of inputs that are not leaves
@pytest.mark.parametrize("check", parameters())
def test_our_primitives_conform(check: Check) -> None:
    check()


def test_no_primitive_is_missing() -> None:
    assert sorted(PRIMITIVES) == Registry().names("primitive")
