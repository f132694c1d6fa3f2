"""Small random models of today's families, with the batches that they train on."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from slapo_models.families import TESTED_FAMILIES
from tests.slapo import image_models
from tests.zoo.families import _LLAMA, _MOE, FAMILIES, Family

Batch = dict[str, torch.Tensor]

_OWN = {
    "llama4_text": {
        **_MOE,
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 48,
        "head_dim": 8,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 8,
        "no_rope_layers": [1, 1, 1, 0],
    },
    "phimoe": _MOE,
    "llama": {**_LLAMA, "num_hidden_layers": 4},
}
_IMAGES = {"llava": "llava", "gemma3": "gemma"}
NAMES = (*TESTED_FAMILIES, "nanogpt")


class Attention(nn.Module):
    """Causal attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_head, self.n_embd = heads, width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.size()
        parts = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (part.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """A GPT as people write it by hand: no config of Transformers, a tied head, its own loss."""

    def __init__(self, vocabulary: int = 64, width: int = 32, heads: int = 4, layers: int = 4, length: int = 16) -> None:
        super().__init__()
        parts = {"wte": nn.Embedding(vocabulary, width), "wpe": nn.Embedding(length, width), "ln_f": nn.LayerNorm(width)}
        self.transformer = nn.ModuleDict({**parts, "h": nn.ModuleList(Block(width, heads) for _ in range(layers))})
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.transformer["wte"](idx) + self.transformer["wpe"](torch.arange(idx.shape[1]))
        for block in self.transformer["h"]:
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def family_model(name: str) -> tuple[nn.Module, Batch]:
    """Return a model without a cache, and a batch."""
    torch.manual_seed(0)
    if name == "nanogpt":
        ids = torch.randint(64, (2, 12))
        return NanoGPT(), {"idx": ids, "targets": ids}
    if name in _IMAGES:
        kind = _IMAGES[name]
        return image_models.MODELS[kind](), image_models.batch_of(kind, [1, 2], 0)
    family = Family(name, "AutoModelForCausalLM", "text", _OWN[name]) if name in _OWN else FAMILIES[name]
    model, batch = family.model(), family.batch()
    for module in model.modules():
        if hasattr(config := getattr(module, "config", None), "use_cache"):
            config.use_cache = False
    return model, batch
