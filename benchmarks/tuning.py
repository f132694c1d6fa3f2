"""The tuner on a space that was measured exhaustively once: how many trials until it is within 3 % of the best?

``python -m benchmarks.tuning measure`` runs every configuration of the space on two gloo ranks and writes
``benchmarks/data/tuning.json``; it takes about half an hour. Without an argument the stored times are replayed: the tuner with
and without predictions, Optuna's TPE as it comes, and random search, each from many seeds.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import optuna
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from slapo_core import build, set_random_seed
from slapo_tune.measurement.job import AXES, TrialJob
from slapo_tune.sampling.plan_sampler import PlanSampler
from slapo_tune.sampling.search_plan import Predictions
from slapo_tune.schedule_space.exploration import enumerate_space
from slapo_tune.schedule_space.schedule_space import ScheduleSpace, configuration_key
from slapo_tune.search import Budget, Search, best_of, values_in
from slapo_tune.study.storage import open_storage
from slapo_tune.study.trial_result import FAILED, MEASURED, TrialResult
from slapo_tune.study.tuning_study import TuningStudy
from slapo_tune.trial.process import Interruption

DATA = Path(__file__).parent / "data" / "tuning.json"
LAYERS, HIDDEN, HEADS, VOCABULARY, ROWS, LENGTH = 6, 128, 4, 512, 16, 64
WARMUP, STEPS = 2, 10
SEEDS = 20
TOLERANCE = 0.03


def space(space: ScheduleSpace) -> None:
    """Declare two ranks: tensor, data or pipeline parallelism, each with options of its own."""
    kind = space.choice("kind", ["tensor", "data", "pipeline"])
    for axis, of in (("tp", "tensor"), ("dp", "data"), ("pp", "pipeline")):
        space.choice(axis, [2 if kind == of else 1])
    if kind == "tensor":
        space.choice("sequence_parallel", [False, True])
    if kind == "data":
        space.choice("data_parallel", ["ddp", "fsdp"])
    if kind == "pipeline":
        order = space.choice("pipeline_schedule", ["1f1b", "gpipe", "interleaved", "zbv"])
        if order in ("1f1b", "gpipe"):
            space.int("cut", 2, 4)
    space.choice("microbatches", [2, 4, 8] if kind == "pipeline" else [1, 2, 4, 8])
    space.int("checkpointed", 0, LAYERS)


def schedule(sch: Any, space: Mapping[str, Any]) -> None:
    """Take the steps of a configuration."""
    if space["kind"] == "tensor":
        sch.tensor_parallel(**({"sequence_parallel": True} if space["sequence_parallel"] else {}))
    for index in range(space["checkpointed"]):
        sch[f"transformer.h.{index}"].checkpoint()
    if space["kind"] == "pipeline":
        stages = [space["cut"]] if "cut" in space else [2, 3, 5]
        for last in stages:
            sch[f"transformer.h.{last - 1}"].cut_pipeline_stage()


def model() -> nn.Module:
    """Return a small GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": LAYERS, "n_embd": HIDDEN, "n_head": HEADS, "vocab_size": VOCABULARY, "n_positions": LENGTH}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, use_cache=False)).train()


def job() -> TrialJob:
    """Return the subject of all configurations."""
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return TrialJob(model, schedule, {"input_ids": ids, "labels": ids}, space)


def configurations() -> list[dict[str, Any]]:
    """Return every configuration of the space."""
    return [values_in(path) for path in enumerate_space(space, 10_000) or ()]


def measure() -> None:
    """Measure every configuration in one long-lived pair of processes, in random order, and store the medians."""
    order = torch.randperm(len(configurations()), generator=torch.Generator().manual_seed(0)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "lines.jsonl")
        file.touch()
        while (done := len(file.read_text().splitlines())) < len(order):
            try:
                mp.spawn(_measure_rank, (order[done:], str(file), str(Path(folder, f"meeting{done}"))), nprocs=2)
            except Exception as err:
                print(err, file=sys.stderr)
                if len(file.read_text().splitlines()) == done:
                    _note(file, {"place": order[done], "error": str(err).strip().splitlines()[-1]})
        found = {record.pop("place"): record for record in map(json.loads, file.read_text().splitlines())}
    records = [{"values": values, **found[place]} for place, values in enumerate(configurations())]
    DATA.write_text("[\n" + ",\n".join(json.dumps(record) for record in records) + "\n]\n")


def _note(file: Path, record: Mapping[str, Any]) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(record) + "\n")


def _measure_rank(rank: int, order: Sequence[int], file: str, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    subject, all_values = job(), configurations()
    for count, place in enumerate(order):
        values = all_values[place]
        start = time.perf_counter()
        try:
            record = {"seconds": _step_seconds(subject, values)}
        except Exception as err:
            record = {"error": " ".join(f"{type(err).__name__}: {err}".split())[:300]}
        if rank == 0:
            _note(Path(file), {"place": place, **record})
            print(f"{count + 1}/{len(order)} {values} {record} {time.perf_counter() - start:.1f} s", flush=True)
        if "error" in record:  # the other rank may wait in a collective
            raise RuntimeError(record["error"])
    dist.destroy_process_group()


def _step_seconds(subject: TrialJob, values: Mapping[str, Any]) -> list[float]:
    mesh = init_device_mesh("cpu", subject.sizes(values), mesh_dim_names=AXES)
    pp, dp, tp = (mesh[axis].get_local_rank() for axis in AXES)
    set_random_seed(0, dp_rank=dp, pp_rank=pp, tp_rank=tp)
    sch = subject.make_schedule(subject.trial_model(), mesh, ScheduleSpace(values), values)
    engine = build(sch, "torch", optimizer=subject.optimizer, seed=0, **subject.build_options(values))
    args, kwargs = subject.share(mesh["dp"].size(), dp)

    def step() -> float:
        start = time.perf_counter()
        engine.train_batch(*args, **kwargs)
        dist.barrier()
        return time.perf_counter() - start

    for _ in range(WARMUP):
        step()
    return [round(step(), 5) for _ in range(STEPS)]


if __name__ == "__main__" and sys.argv[1:] == ["measure"]:
    measure()
