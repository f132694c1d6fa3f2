"""Memory and collectives of a step on real gloo ranks of an engine, and its estimate without them."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from slapo_core import Schedule, build, create_schedule
from slapo_plan import estimate, fake_ranks
from slapo_plan.estimation.process_groups import MeshGroups
from slapo_plan.measurement.engine_run import measure_step
from slapo_training import CollectiveRecord

ROWS, LENGTH, VOCABULARY = 2, 32, 200
SMALL = {"reduce_bucket_size": 20_000}
"""DeepSpeed allocates a whole bucket, by default of half a billion elements."""


class RankStep(NamedTuple):
    """One step of a rank: bytes between steps and at the peak, and the number of collectives by kind, axis and bytes."""

    held: int
    peak: int
    collectives: Counter[tuple[str, str, int]]


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"n_layer": 4, "n_embd": 32, "n_head": 4, "n_positions": LENGTH, "vocab_size": VOCABULARY}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, use_cache=False, bos_token_id=1, eos_token_id=2))
    sizes = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=VOCABULARY, use_cache=False))


def schedule(model: nn.Module, mesh: Any, layout: dict[str, int]) -> Schedule:
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    sch = create_schedule(model, mesh=mesh, example_inputs={"input_ids": ids, "labels": ids})
    if layout.get("tp", 1) > 1:
        sch.tensor_parallel()
    if layout.get("checkpoints"):
        for block in sch.select("transformer.h.*" if hasattr(model, "transformer") else "model.layers.*"):
            block.checkpoint()
    if (stages := layout.get("stages", layout.get("pp", 1))) > 1:
        sch.pipeline(stages)
    return sch


def batch(options: dict[str, Any]) -> dict[str, torch.Tensor]:
    ids = torch.arange(options.get("microbatches", 1) * ROWS * LENGTH).view(-1, LENGTH) % VOCABULARY
    return {"input_ids": ids, "labels": ids}


def measured(rank: int, kind: str, target: str, cases: list[tuple[dict[str, int], dict[str, Any]]]) -> list[RankStep]:
    """Return the third step of each case."""
    found = []
    for layout, options in cases:
        mesh = init_device_mesh(
            "cpu", tuple(layout.get(axis, 1) for axis in ("pp", "dp", "tp")), mesh_dim_names=("pp", "dp", "tp")
        )
        names = MeshGroups(mesh)
        gc.collect()
        before = _storages()
        sch = schedule(make(kind), mesh, layout)
        engine = build(sch, target=target, optimizer=torch.optim.AdamW, check=False, **options)
        for _ in range(3):  # stage 3 of ZeRO records the order of modules in the second one, and compares it in the third
            engine.train_batch(**batch(options))
        gc.collect()
        left = sum(kept.nbytes() for each in before if (kept := each()) is not None)  # of the engine before
        run: Any = lambda engine=engine, options=options: engine.train_batch(**batch(options))  # noqa: E731
        step = min((measure_step(run) for _ in range(2)), key=lambda each: each.peak)  # gloo's threads may keep a tensor longer
        work = [each for each in step.work if isinstance(each, CollectiveRecord) and len(each.ranks) > 1]
        sent = Counter((each.kind, names.name(each.ranks), each.nbytes) for each in work)
        found.append(RankStep(step.held - left, step.peak - left, sent))
        engine.close()
        del engine, sch, run
    return found


def _storages() -> list[weakref.ref[torch.UntypedStorage]]:
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    real = [each for each in tensors if not (each.is_meta or isinstance(each, FakeTensor)) and each.layout is torch.strided]
    return [weakref.ref(each) for each in {each.untyped_storage()._cdata: each.untyped_storage() for each in real}.values()]


def estimated(kind: str, target: str, layout: dict[str, int], options: dict[str, Any]) -> list[RankStep]:
    """Return the estimate of the same for each rank along ``pp``, with weights on meta."""
    sizes = {axis: layout.get(axis, 1) for axis in ("pp", "dp", "tp")}
    with fake_ranks(**sizes) as mesh:
        with torch.device("meta"):
            model = make(kind)
        found = estimate(schedule(model, mesh, layout), batch(options), target=target, **options)
    assert not found.problems
    sent: list[Counter[tuple[str, str, int]]] = [Counter() for _ in found.ranks]
    for each in found.collectives:
        sent[each.rank][each.kind, each.axis, each.nbytes] += each.count
    return [RankStep(each.memory.held, each.memory.peak, sent[each.rank]) for each in found.ranks]


def largest_error(truth: list[RankStep], found: list[RankStep]) -> float:
    """Return the largest relative error over ranks along ``pp``; of replicas the one with most bytes counts."""
    number = len(truth) // len(found)
    errors = []
    for index, pair in enumerate(found):
        replicas = truth[index * number : (index + 1) * number]
        errors += [
            abs(ours / max(theirs) - 1) for ours, theirs in zip(pair[:2], [*zip(*replicas, strict=True)][:2], strict=True)
        ]
    return max(errors)


def check_collectives(truth: list[RankStep], found: list[RankStep]) -> None:
    """Assert that the collectives of each rank along ``pp`` are those of its first real rank."""
    number = len(truth) // len(found)
    for index, step in enumerate(found):
        real = truth[index * number].collectives
        missing, surplus = real - step.collectives, step.collectives - real
        assert not missing, f"not in the estimate of pp rank {index}: {missing}; only there: {surplus}"
        assert not surplus, f"only in the estimate of pp rank {index}: {surplus}"
