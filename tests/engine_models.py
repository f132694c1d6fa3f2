"""Models, batches and optimizers of the tests of engines, equal on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

STEPS = 5
ROWS = 4
"""Rows of a batch per data-parallel rank."""
SIZES = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def small(name: str) -> nn.Module:
    """A model with tied embeddings."""
    import transformers

    torch.manual_seed(0)
    if name == "gpt2":
        config: Any = transformers.GPT2Config(
            **SIZES, n_positions=16, n_embd=32, n_head=2, n_layer=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False
        )
        return transformers.GPT2LMHeadModel(config)
    if name == "llama":
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(
            **SIZES,
            **heads,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            use_cache=False,
            tie_word_embeddings=True,
        )
        return transformers.LlamaForCausalLM(config)
    widths = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2, "num_layers": 4, "num_decoder_layers": 4}
    config = transformers.T5Config(**SIZES, **widths, dropout_rate=0, decoder_start_token_id=0, use_cache=False)
    return transformers.T5ForConditionalGeneration(config)


def batches(dp: int) -> list[dict[str, torch.Tensor]]:
    """Batches of all data-parallel ranks together."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 64, (ROWS * dp, 16), generator=generator) for _ in range(STEPS)]
    return [{"input_ids": each, "labels": each} for each in ids]


def my_part(batch: dict[str, torch.Tensor], mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """This data-parallel rank's rows."""
    return {name: value.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()] for name, value in batch.items()}


def twice(kind: type[nn.Module]) -> tuple[Any, Any]:
    """Two models of the same numbers."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(kind())
    return models[0], models[1]


def plain(parameters: Any) -> torch.optim.Optimizer:
    """Without weight decay: gradients of zeros change nothing."""
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    """Without weight decay for norms and biases, as is usual."""
    parameters = list(parameters)
    decayed = [parameter for parameter in parameters if parameter.dim() > 1]
    others = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0, "lr": 2e-2}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)


def halved(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (step // 2))


class Rated(nn.Module):
    """The parameters of one of its stages are all in one group; its BatchNorm keeps its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 8)])
        self.layers[1].eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Gated(nn.Module):
    """Has a number for all hidden values, whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(4, 8), nn.Linear(8, 4), nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu() * self.gate)


class Skips(nn.Module):
    """Truth values, positions and a skip cross every boundary; the batch is read in the middle, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[0](x)  # the fixed numbers cross as integers of their bits, complex ones with a gradient
        keep, fixed, first = hidden > 0, hidden.detach().cumsum(-1), self.layers[1](hidden)
        turned = torch.complex(first, hidden)
        x = self.layers[2](first * keep) * mask
        return self.layers[3](torch.where(keep, x, fixed) + (turned * turned).real)


class Unused(nn.Module):
    """The last stage reads what crosses without a gradient back to it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(_Blocked.apply(self.first(x)))


class _Blocked(torch.autograd.Function):
    """Gives no gradient for what it reads, though it could."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


class Turned(nn.Module):
    """Has a complex buffer, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("turn", torch.polar(torch.ones(4), torch.arange(4) + 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(self.up(x).float().reshape(-1, 4, 2))
        return self.down(torch.view_as_real(pairs * self.turn).reshape(-1, 8).to(x.dtype))


class Halves(nn.Module):
    """Model with sharded parameters in its first half only."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm, self.last = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.down(self.up(x).relu())))
