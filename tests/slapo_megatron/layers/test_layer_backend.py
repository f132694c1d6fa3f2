"""``tensor_parallel(backend="megatron")``: Megatron-Core's own layers compute what the unmodified model does."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from slapo_core import ScheduleError, build, build_program, create_schedule, init_empty_weights
from slapo_sharding.communication.cross_entropy import parallel_cross_entropy
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent
from tests.engine_models import batches, small
from tests.engines import PLUGINS, in_one_process
from tests.slapo_sharding.logged_warnings import warnings_told
from tests.slapo_torch.layouts import adamw, mesh_of
from tests.zoo.families import FAMILIES

pytestmark = pytest.mark.multiproc

MLP = {"0": "colwise", "2": "rowwise", "3": "colwise_gather_output"}
T5 = {
    "**.DenseReluDense.wi": "colwise",
    "**.DenseReluDense.wo": "rowwise",
    "shared": "embedding_rowwise",
    "encoder.embed_tokens": "embedding_rowwise",
    "decoder.embed_tokens": "embedding_rowwise",
    "lm_head": "colwise_gather_output",
}


class Collectives(TorchDispatchMode):
    """Counts the collectives of torch.distributed that start inside of it, by either of torch's two ways."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace.removeprefix("_") in ("c10d", "c10d_functional") and "wait" not in str(func)
        return func(*args, **(kwargs or {}))


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Linear(8, 4))


def _model(name: str, **config: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A model and its batch; the MLP's is called as everybody calls it."""
    if name == "mlp":
        return _mlp(), {"input": torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(1))}
    family = FAMILIES[name]
    family = dataclasses.replace(family, config={**family.config, **config})
    return family.model(depth=config.get("num_hidden_layers", 1)), {**family.batch(), "use_cache": False}


def _layers(model: nn.Module) -> dict[str, int]:
    """How many modules there are of each class of Megatron's."""
    bases = (type(module).__mro__ for module in model.modules())
    found = [cls.__name__ for mro in bases for cls in mro if cls.__module__.startswith("megatron.core")]
    return dict(Counter(found))


def _loss(output: Any) -> torch.Tensor:
    return output.square().mean() if isinstance(output, torch.Tensor) else output.loss


def _counted(model: nn.Module, batch: dict[str, Any]) -> int:
    """The collectives of a forward and a backward."""
    with Collectives() as counted:
        _loss(model(**batch)).backward()
    model.zero_grad()
    return counted.count


def _train(model: nn.Module, batch: dict[str, Any]) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4), []
    for _ in range(3):
        loss = _loss(model(**batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _same(
    rank: int, name: str, plan: dict[str, str] | None, derived: bool, config: dict[str, Any]
) -> tuple[dict[str, int], list[str]]:
    """Outputs, loss, gradients, three steps and the state of the whole; what was replaced, and what was said."""
    model, batch = _model(name, **config)
    before, ours = copy.deepcopy(model), copy.deepcopy(model)
    given = {"example_inputs": batch} if derived else {}
    sch, own = create_schedule(model, **given), create_schedule(ours, **given)
    with warnings_told() as told:
        sch.tensor_parallel(plan, backend="megatron")
    own.tensor_parallel(plan)
    for each in (sch, own):
        build(each)
        assert_equivalent(before, each.mod, **batch)  # the first run is looked at
    assert 0 < _counted(model, batch) <= _counted(ours, batch)
    assert list(model.state_dict()) == list(ours.state_dict())
    assert _train(model, batch) == pytest.approx(_train(before, batch), abs=1e-5)
    state, expected = sch.full_state(), dict(before.named_parameters(remove_duplicate=False))
    assert state.keys() == expected.keys()
    for key, parameter in expected.items():
        torch.testing.assert_close(state[key], parameter.detach(), atol=1e-5, rtol=1e-5)
    said = [line.partition(": not replaced by layers of 'megatron': ")[2] for line in told]
    return _layers(model), [text for text in said if text]  # others name what every backend leaves whole


CONV1D = (
    "transformer.h.0.attn.c_attn, transformer.h.0.attn.c_proj, transformer.h.0.mlp.c_fc, transformer.h.0.mlp.c_proj: "
    "Megatron-Core has no layer for a Conv1D"
)
UNEVEN = "model.embed_tokens, lm_head: its parts are not equal on all ranks, or some are copies"
COLUMN, ROW, TABLE = "ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"
TIED = {"tie_word_embeddings": True, "pad_token_id": 0, "attention_bias": True, "mlp_bias": True}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "plan", "derived", "config", "layers", "told"),
    [
        ("mlp", MLP, False, {}, {COLUMN: 2, ROW: 1}, []),
        ("llama", None, False, {}, {TABLE: 1, COLUMN: 6, ROW: 2}, []),
        ("llama", None, False, TIED, {TABLE: 1, COLUMN: 6, ROW: 2}, []),
        ("t5", T5, False, {}, {TABLE: 3, COLUMN: 3, ROW: 2}, []),
        ("gpt2", None, False, {}, {TABLE: 1, COLUMN: 1}, [CONV1D]),
        ("llama", None, False, {"vocab_size": 65}, {COLUMN: 5, ROW: 2}, [UNEVEN]),
        pytest.param("t5", None, True, {}, {TABLE: 3, COLUMN: 12, ROW: 5}, None, id="t5 derived", marks=pytest.mark.slow),
        pytest.param("bert", None, True, {}, {COLUMN: 4, ROW: 2}, [], id="bert derived", marks=pytest.mark.slow),
    ],
)
def test_it_is_the_unmodified_model(name, plan, derived, config, layers, told):
    for found, said in run_distributed(_same, 2, name, plan, derived, config, timeout=100):
        assert found == layers
        assert told is None or said == told


def _undone(rank: int) -> None:
    model, batch = _model("llama", **TIED)
    before, modules, parameters = copy.deepcopy(model), dict(model.named_modules()), dict(model.named_parameters())
    sch = create_schedule(model)
    attributes = [[*vars(parameter)] for parameter in parameters.values()]
    sch.tensor_parallel(backend="megatron")
    assert not any(module is modules[path] for path, module in model.named_modules() if path.endswith("_proj"))
    sch.undo()
    assert dict(model.named_modules()) == modules
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert [[*vars(parameter)] for parameter in parameters.values()] == attributes
    assert_equivalent(before, model, **batch)
    sch.tensor_parallel()
    build(sch)
    assert_equivalent(before, model, **batch)
    assert _layers(model) == {}


def test_undo_brings_the_layers_back():
    run_distributed(_undone, 2)


def _copied(rank: int) -> None:
    """Check that a deep copy of a sharded model is independent, that pickling is refused, and that a state loads."""
    model, batch = _model("llama", tie_word_embeddings=True)
    sch = create_schedule(model)
    sch.tensor_parallel(backend="megatron")
    build(sch)
    expected = model(**batch)
    copied = copy.deepcopy(model)
    assert copied.lm_head.weight is copied.model.embed_tokens.weight is not model.lm_head.weight
    assert [*map(type, copied.modules())] == [*map(type, model.modules())]
    assert_equivalent(model, copied, **batch)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    torch.testing.assert_close(model(**batch).loss, expected.loss)
    with pytest.raises(TypeError, match=r"cannot be pickled with its process group; save state_dict\(\) or full_state\(\)"):
        pickle.dumps(model)
    with pytest.raises(TypeError, match="cannot be pickled with its process group"):
        pickle.dumps(model.lm_head)
    other = _model("llama", tie_word_embeddings=True)[0]
    again = create_schedule(other)
    again.tensor_parallel(backend="megatron")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(model.state_dict())
    assert_equivalent(model, other, **batch)


def test_copies_share_the_group_and_nothing_else():
    run_distributed(_copied, 2)


def _frozen(rank: int) -> None:
    """A bias that is trained beside a frozen weight, an input with a gradient, and one without."""
    for frozen in (("0.weight", "3.weight"), ("0.bias", "2.weight"), ("2.bias", "3.weight", "3.bias"), ("0.weight", "0.bias")):
        model = _mlp()
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        before, x = copy.deepcopy(model), torch.randn(3, 8, requires_grad=len(frozen) > 2)
        torch.distributed.broadcast(x.detach(), 0)
        sch = create_schedule(model)
        sch.tensor_parallel(MLP, backend="megatron")
        build(sch)
        assert_equivalent(before, model, x)
        assert_equivalent(before, model, x[0].detach())
        assert_equivalent(before, model, x[:0].detach())


def test_what_is_frozen_stays_so_and_the_rest_is_trained():
    run_distributed(_frozen, 2)


class InPlace(nn.Module):
    """Changes what its layers return, and calls them by keyword."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.up, self.down = nn.Embedding(8, 4, padding_idx=5), nn.Linear(4, 8), nn.Linear(8, 4, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(input=ids)
        x *= 2
        y = self.up(input=x)
        y.relu_()
        y = self.down(input=y)
        y += x
        return y


def _in_place(rank: int) -> None:
    for ids in (torch.arange(8).view(2, 4), torch.tensor(3), torch.arange(8)[:0]):
        model = InPlace()
        before = copy.deepcopy(model)
        sch = create_schedule(model)
        sch.tensor_parallel({"table": "embedding_rowwise", "up": "colwise", "down": "rowwise"}, backend="megatron")
        build(sch)
        assert len(_layers(model)) == 3
        assert_equivalent(before, model, ids)
        assert_equivalent(before, model, ids)


def test_code_may_change_what_layers_return():
    run_distributed(_in_place, 2)


def _marks(rank: int) -> dict[str, Any]:
    sch = create_schedule(_mlp())
    sch.tensor_parallel(MLP, backend="megatron")
    names = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel", "allreduce")
    return {name: tuple(getattr(parameter, key, None) for key in names) for name, parameter in sch.mod.named_parameters()}


def test_parameters_have_the_attributes_megatron_looks_for():
    column, row, whole = (True, 0, 1, False, True), (True, 1, 1, False, True), (False, None, None, False, True)
    expected = dict(
        zip(["0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"], [column] * 2 + [row, whole], strict=False)
    )
    assert run_distributed(_marks, 2) == [{**expected, "3.weight": column, "3.bias": column}] * 2


def _refused(rank: int) -> list[str]:
    """Messages for cases that Megatron's layers would compute wrongly without an error."""
    said = []
    model, batch = _model("llama")
    sch = create_schedule(model)
    sch.tensor_parallel(backend="megatron")
    build(sch)
    model(**batch)
    with pytest.raises(IndexError, match="index out of range"):
        model(input_ids=batch["input_ids"] + 64)
    inputs = model.model.embed_tokens(batch["input_ids"])
    with pytest.raises(ScheduleError) as caught:
        torch.autograd.grad(model(inputs_embeds=inputs).logits.square().mean(), inputs, create_graph=True)
    said.append(str(caught.value))
    with pytest.raises(ScheduleError) as caught, torch.autocast("cpu", torch.bfloat16):
        model(**batch)
    said.append(str(caught.value))
    model, batch = _model("gpt2", vocab_size=65)
    before = dict(model.named_modules())
    for given in ({}, {"sequence_parallel": True}):
        with pytest.raises(ScheduleError) as caught:
            create_schedule(model).tensor_parallel(backend="megatron", **given)
        said.append(str(caught.value))
    assert dict(model.named_modules()) == before
    return said


def test_what_cannot_be_right_is_an_error():
    first, second = run_distributed(_refused, 2)
    assert first == second
    uneven = "transformer.wte, lm_head: its parts are not equal on all ranks, or some are copies"
    assert first == [
        "what Megatron-Core computes has no gradient of its gradient, as create_graph=True asks for; leave out backend",
        "layers of Megatron-Core do not run under autocast on a CPU; give the model the dtype itself, or leave out backend",
        f"tensor_parallel(''): backend 'megatron' has no layer for any that is split: {uneven}; {CONV1D}; leave out backend",
        "tensor_parallel(''): layers of an engine split values along its own dimension for the sequence, not along "
        "dimension 1; leave out sequence_parallel, or backend",
    ]


def _staged(rank: int) -> None:
    """Layers that are checkpointed, in two stages one after the other."""
    model, batch = _model("llama", num_hidden_layers=2)
    before = copy.deepcopy(model)
    sch = create_schedule(model, example_inputs=batch)
    sch.tensor_parallel(backend="megatron")
    for layer in sch.select("model.layers.*"):
        layer.checkpoint()
    sch["model.layers.0"].cut_pipeline_stage()
    program = build_program(sch)
    loss, expected = program(**batch).loss, before(**batch).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for name, grad in sch.full_state("grad").items():
        torch.testing.assert_close(grad, before.get_parameter(name).grad)


def test_stages_and_checkpoints():
    run_distributed(_staged, 2)


def _without_weights(rank: int) -> None:
    with init_empty_weights():
        model, batch = _model("llama", tie_word_embeddings=True)
    sch = create_schedule(model)
    sch.tensor_parallel(backend="megatron")
    build(sch, seed=1)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    before = _model("llama", tie_word_embeddings=True)[0]
    before.load_state_dict(sch.full_state())
    assert_equivalent(before, model, **batch)


def test_a_model_without_weights_is_split_and_then_gets_them():
    run_distributed(_without_weights, 2)


def _alone(rank: int) -> None:
    model, batch = _model("llama")
    before = copy.deepcopy(model)
    create_schedule(model).tensor_parallel(backend="megatron")
    assert _layers(model) == {}
    assert_equivalent(before, model, **batch)


def test_one_rank_replaces_nothing():
    run_distributed(_alone, 1)


def _trained(rank: int, layout: dict[str, int], precision: str) -> dict[str, float]:
    """Largest differences of losses and norms over five steps of the dialect, with either optimizer."""
    mesh, reference, data, worst = mesh_of(**layout), small("llama"), batches(1), {"loss": 0.0, "norm": 0.0}
    expected = [*in_one_process(reference, data, 0.1)]
    for shared in (False, True):
        schedule = create_schedule(small("llama"), mesh=mesh, example_inputs=data[0], plugins=PLUGINS)
        schedule.tensor_parallel(backend="megatron", parallel_loss=True)
        if layout.get("pp", 1) > 1:
            schedule.pipeline(layout["pp"])
        options: dict[str, Any] = {"clip": 0.1, "precision": precision, "distributed_optimizer": shared}
        engine: Any = build(schedule, "megatron", optimizer=adamw, microbatches=2, **options)
        for batch, (loss, norm) in zip(data, expected, strict=True):
            worst["loss"] = max(worst["loss"], abs(engine.train_batch(**batch).item() - loss))
            worst["norm"] = max(worst["norm"], abs(engine.grad_norm - norm))
        engine.close()
    return worst


@pytest.mark.parametrize(
    ("layout", "precision", "tolerance"),
    [
        ({"tp": 2}, "fp32", 2e-5),
        pytest.param({"tp": 2}, "bf16", 2e-2, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "tp": 2}, "fp32", 2e-5, marks=pytest.mark.slow),
    ],
)
def test_it_trains_on_the_dialect(layout, precision, tolerance):
    for found in run_distributed(_trained, 2 * layout.get("pp", 1), layout, precision, timeout=100):
        assert max(found.values()) < tolerance


def _resumed(rank: int, folder: str) -> list[list[float]]:
    """Losses after a checkpoint: of the engine that wrote it, of one without Megatron's layers, and of one with them."""
    mesh, data, found = mesh_of(tp=2), batches(1), []
    for backend in ("megatron", None, "megatron"):
        schedule = create_schedule(small("llama"), mesh=mesh, example_inputs=data[0], plugins=PLUGINS)
        schedule.tensor_parallel(backend=backend)
        engine: Any = build(schedule, "megatron", optimizer=adamw, microbatches=2, clip=0.1)
        if found:
            engine.load(folder)
        else:
            for batch in data[:2]:
                engine.train_batch(**batch)
            engine.save(folder)
        found.append([engine.train_batch(**batch).item() for batch in data[2:]])
        engine.close()
    return found


@pytest.mark.slow
def test_checkpoints_know_no_difference(tmp_path):
    for first, *others in run_distributed(_resumed, 2, str(tmp_path / "saved"), timeout=100):
        assert others == [pytest.approx(first, abs=1e-6)] * 2


def _losses(rank: int) -> None:
    """Megatron's own loss takes no group and writes over its input, so the sharded one is used for float32; they are equal."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    logits, target = torch.randn(5, 8, generator=torch.Generator().manual_seed(rank)), torch.tensor([0, 15, 7, 8, 3])
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    parallel_state.initialize_model_parallel(2, 1, create_gloo_process_groups=False, distributed_timeout_minutes=1)
    try:
        found = parallel_cross_entropy(ours, target, torch.distributed.group.WORLD, reduction="none")
        expected = vocab_parallel_cross_entropy(theirs * 1, target)
        torch.testing.assert_close(found, expected)
        (found * target).sum().backward()
        (expected * target).sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad)
    finally:
        parallel_state.destroy_model_parallel()


def test_the_loss_from_parts_of_the_logits_is_that_of_megatron():
    run_distributed(_losses, 2)
