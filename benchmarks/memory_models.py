"""Small models whose memory is estimated and measured, and their batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

ROWS, LENGTH, VOCABULARY = 2, 64, 512
SIZE = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
TEXT = {"vocab_size": VOCABULARY, "use_cache": False, "pad_token_id": 0}
MIXTURE = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}


class ConvNet(nn.Module):
    """A small U-Net with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU())
        self.up, self.head = nn.ConvTranspose2d(32, 16, 2, 2), nn.Conv2d(32, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x)
        return self.head(torch.cat([skip, self.up(self.middle(skip))], 1)).pow(2).mean()


class Perceptron(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128, bias=bias) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.pow(2).mean()


class Experts(nn.Module):
    """Each token goes to two of four experts; how many tokens each gets depends on the numbers of the router."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, 64), nn.Linear(64, VOCABULARY)
        self.routers = nn.ModuleList(nn.Linear(64, 4, bias=False) for _ in range(2))
        self.experts = nn.ModuleList(nn.ModuleList(self.expert() for _ in range(4)) for _ in range(2))

    @staticmethod
    def expert() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.tokens(input_ids).flatten(0, 1)
        layers: list[tuple[nn.Module, Any]] = [*zip(self.routers, self.experts, strict=True)]
        for router, experts in layers:
            weights, chosen = router(x).softmax(-1).topk(2, dim=-1)
            out = torch.zeros_like(x)
            for index, expert in enumerate(experts):
                rows, places = torch.where(chosen == index)
                out.index_add_(0, rows, expert(x[rows]) * weights[rows, places, None])
            x = x + out
        logits = self.head(x)
        return logits, nn.functional.cross_entropy(logits, labels.flatten())


def lora() -> nn.Module:
    import peft

    return peft.get_peft_model(MODELS["Llama"](), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def causal(name: str, **more: Any) -> Callable[[], nn.Module]:
    config, model = getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}ForCausalLM")
    return lambda: model(config(**{**TEXT, **SIZE, "num_key_value_heads": 2, **more}))


WHISPER = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "num_mel_bins": 16,
    "max_source_positions": 32,
    "max_target_positions": LENGTH,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT-2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=4, n_embd=64, n_head=4, bos_token_id=1, eos_token_id=2, **TEXT)
    ),
    "BERT": lambda: transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=VOCABULARY, **SIZE)),
    "T5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**TEXT, **T5)),
    "Llama": causal("Llama"),
    "Qwen3": causal("Qwen3", head_dim=16),
    "Gemma": causal("Gemma", head_dim=16),
    "Mistral": causal("Mistral"),
    "Mixtral": causal("Mixtral", num_local_experts=4, experts_implementation="batched_mm"),
    "Qwen2-MoE": causal("Qwen2Moe", experts_implementation="batched_mm", **MIXTURE),
    "ViT": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**SIZE, image_size=32, patch_size=8)),
    "U-Net": ConvNet,
    "Whisper": lambda: transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**TEXT, **WHISPER)),
    "routed experts": Experts,
    "plain": Perceptron,
    "plain, no bias": lambda: Perceptron(bias=False),
    "LoRA": lora,
}


def batch_of(model: str, rows: int) -> dict[str, torch.Tensor]:
    if model == "U-Net":
        return {"x": torch.randn(rows, 3, 32, 32)}
    if model.startswith("plain"):
        return {"x": torch.randn(rows, 128)}
    if model == "Whisper":
        return {"input_features": torch.randn(rows, 16, 64), "labels": torch.randint(3, VOCABULARY, (rows, LENGTH))}
    if model == "ViT":
        return {"pixel_values": torch.randn(rows, 3, 32, 32), "labels": torch.zeros(rows, dtype=torch.long)}
    ids = torch.randint(3, VOCABULARY, (rows, LENGTH))
    return {"input_ids": ids, "labels": ids.clone()}
