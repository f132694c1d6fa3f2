"""PEFT adapters beside LoRA, and LoRA on other modules: steps equal the unmodified model, and PEFT loads the exports."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from slapo_core import build, create_schedule, is_sharded
from slapo_testing import run_distributed
from tests.slapo_sharding.models.test_adapters import QV, llama
from tests.slapo_torch.layouts import mesh_of

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
]

ALL: dict[str, Any] = {"target_modules": "all-linear"}
LORA: dict[str, Any] = {"r": 4, "init_lora_weights": False}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("LoraConfig", {**LORA, **QV, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    "vera": ("VeraConfig", {**ALL, "r": 8, "init_weights": False, "save_projection": False}),
    "raw weights": ("LoraConfig", {**LORA, "target_modules": [], "target_parameters": ["q_proj.weight", "down_proj.weight"]}),
    "dora": ("LoraConfig", {**LORA, **ALL, "use_dora": True}),
    "dora and a table": ("LoraConfig", {**LORA, "target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
    "table and head": ("LoraConfig", {**LORA, "target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "saved table and head": ("LoraConfig", {**LORA, **QV, "modules_to_save": ["lm_head", "embed_tokens"]}),
    "some tokens": ("LoraConfig", {**LORA, **QV, "trainable_token_indices": [1, 2, 3]}),
    "ranks by name": ("LoraConfig", {**LORA, **ALL, "rank_pattern": {"q_proj": 8, "down_proj": 2}}),
    "biases": ("LoraConfig", {**LORA, **QV, "bias": "all"}),
    "pissa": ("LoraConfig", {**ALL, "r": 4, "init_lora_weights": "pissa"}),
    "ia3": ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "oft": ("OFTConfig", {**QV, "oft_block_size": 8, "init_weights": False, "use_cayley_neumann": False}),
    "boft": ("BOFTConfig", {**QV, "boft_block_size": 4, "init_weights": False}),
    "loha": ("LoHaConfig", {**ALL, "r": 4, "init_weights": False}),
    "lokr": ("LoKrConfig", {**ALL, "r": 4, "init_weights": False}),
    "norms": ("LNTuningConfig", {"target_modules": ["input_layernorm", "norm"]}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 4}),
    "prompt encoder": ("PromptEncoderConfig", {"num_virtual_tokens": 4, "encoder_hidden_size": 16}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 4}),
    "adalora": ("AdaLoraConfig", {**ALL, "r": 4, "init_r": 6, "target_r": 4, "total_step": 100}),
}
FAST = ("vera", "experts")
ON_ENGINES = ("raw weights", "dora", "saved table and head", "ranks by name", "biases")


def base(kind: str) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    if kind != "experts":
        return llama()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads))


def adapted_model(kind: str) -> Any:
    import peft

    name, settings = KINDS[kind]
    model = base(kind)
    torch.manual_seed(1)
    return peft.get_peft_model(model, getattr(peft, name)(task_type="CAUSAL_LM", **settings))


def compare(
    rank: int,
    kinds: tuple[str, ...],
    layout: dict[str, int],
    sequence_parallel: bool,
    folder: str,
    target: str = "torch",
    options: dict[str, Any] | None = None,
) -> dict[str, str]:
    """Take two steps beside the unmodified model, save and load; return the errors by kind."""
    from peft import PeftModel

    mesh, wrong = mesh_of(**layout), {}
    batches = [torch.randint(0, 64, (4, size), generator=torch.Generator().manual_seed(size)) for size in (12, 8)]
    for kind in kinds:
        reference = adapted_model(kind)
        model = copy.deepcopy(reference)
        schedule = create_schedule(model, mesh=mesh, example_inputs={"input_ids": batches[0], "labels": batches[0]})
        if mesh["tp"].size() > 1:
            schedule.tensor_parallel(sequence_parallel=sequence_parallel)
            assert any(map(is_sharded, model.parameters()))
        if mesh["pp"].size() > 1:
            schedule.pipeline(2)
        engine: Any = build(schedule, target, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **(options or {}))
        sgd = torch.optim.SGD([each for each in reference.parameters() if each.requires_grad], lr=0.1)
        for ids in batches:
            own = ids.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
            loss, expected = engine.train_batch(input_ids=own, labels=own), reference(input_ids=ids, labels=ids).loss
            expected.backward()
            sgd.step()
            sgd.zero_grad()
            if abs(loss.item() - expected.item()) > 1e-5:
                wrong[kind] = f"a loss of {loss.item()} and not {expected.item()}"
        state = schedule.full_state()
        apart = max(float((state[name] - each).abs().max()) for name, each in reference.named_parameters())
        if apart > 1e-5:
            wrong[kind] = f"weights are {apart} apart"
        if rank == 0 or mesh["tp"].size() > 1:  # PEFT runs the prompt encoder, which is split or on the first stage only
            model.save_pretrained(f"{folder}/{kind}", state_dict=state, is_main_process=rank == 0)
        engine.close()
        if rank == 0:
            loaded = PeftModel.from_pretrained(base(kind), f"{folder}/{kind}").eval()
            with torch.no_grad():
                logits = [each.eval()(input_ids=batches[1]).logits for each in (loaded, reference)]
            torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4, msg=lambda text, kind=kind: f"{kind}: {text}")
    return wrong


LAYOUTS: dict[str, tuple[dict[str, int], bool, set[str]]] = {
    "tp": ({"tp": 2}, False, set()),
    "tp along the sequence": ({"tp": 2}, True, {"vera", "adalora"}),  # two layers use their matrices
    "pp": ({"pp": 2}, False, set()),
    # saving prompts runs a module whose weights the model gathers
    "fsdp": ({"dp": 2}, False, {"prompt", "prompt encoder", "prefix"}),
}
OPTIONS = {"pp": {"microbatches": 2}, "fsdp": {"data_parallel": "fsdp"}}
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"zero {stage}": ("deepspeed", {"config": {"zero_optimization": {"stage": stage}}}) for stage in range(4)},
    "megatron": ("megatron", {}),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("layout", "kinds"),
    [("tp", FAST), *(pytest.param(name, tuple(KINDS), marks=pytest.mark.slow) for name in LAYOUTS)],
)
def test_steps_equal_the_unmodified_model_and_peft_loads_exports(layout: str, kinds: tuple[str, ...], tmp_path: Path) -> None:
    shape, sequence_parallel, refused = LAYOUTS[layout]
    kinds = tuple(kind for kind in kinds if kind not in refused)
    options = OPTIONS.get(layout)
    for wrong in run_distributed(compare, 2, kinds, shape, sequence_parallel, str(tmp_path), "torch", options, timeout=280):
        assert wrong == {}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("engine", "kinds"),
    [
        ("zero 1", ("raw weights", "saved table and head")),
        *(pytest.param(name, ON_ENGINES, marks=pytest.mark.slow) for name in ENGINES),
    ],
)
def test_other_engines_train_and_save_adapters(engine: str, kinds: tuple[str, ...], tmp_path: Path) -> None:
    for wrong in run_distributed(compare, 2, kinds, {"tp": 2}, False, str(tmp_path), *ENGINES[engine], timeout=280):
        assert wrong == {}
