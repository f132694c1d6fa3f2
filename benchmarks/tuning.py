"""The tuner on a space that was measured exhaustively once: how many trials until it is within 3 % of the best?

``python -m benchmarks.tuning measure`` runs every configuration of the space on two gloo ranks and writes
``benchmarks/data/tuning.json``, then calibrates the machine; it takes 15 minutes on two cores without other work. Without an
argument the stored times are replayed: the tuner with and without predictions of the planner, Optuna's TPE as it comes, and
random search, each from many seeds.
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
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.spawn import spawn

from slapo_core import build, set_random_seed
from slapo_plan import Hardware, calibrate, estimate, fake_ranks
from slapo_tune.measurement.job import AXES, TrialJob
from slapo_tune.sampling.search_plan import Predictions
from slapo_tune.schedule_space.exploration import enumerate_space
from slapo_tune.schedule_space.schedule_space import ScheduleSpace, configuration_key
from slapo_tune.search import Budget, Search, values_in
from slapo_tune.study.storage import open_storage
from slapo_tune.study.trial_result import FAILED, MEASURED, TrialResult
from slapo_tune.study.tuning_study import TuningStudy
from slapo_tune.trial.process import Interruption

DATA = Path(__file__).parent / "data" / "tuning.json"
MACHINE = DATA.with_suffix(".toml")
"""Calibration of the machine that measured."""
LAYERS, HIDDEN, HEADS, VOCABULARY, ROWS, LENGTH = 6, 128, 4, 512, 16, 64
WARMUP, STEPS = 2, 6
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
    """Measure every configuration in one long-lived pair of processes, in random order.

    Seconds of another run are added to those that are stored.
    """
    order = torch.randperm(len(configurations()), generator=torch.Generator().manual_seed(0)).tolist()
    DATA.parent.mkdir(exist_ok=True)
    file = DATA.with_suffix(".jsonl")  # of a run that was ended; the next one goes on there
    file.touch()
    with tempfile.TemporaryDirectory() as folder:
        while (done := len(file.read_text().splitlines())) < len(order):
            try:
                spawn(_measure_rank, (order[done:], str(file), str(Path(folder, f"meeting{done}"))), nprocs=2)
            except Exception as err:
                print(err, file=sys.stderr)
                if len(file.read_text().splitlines()) == done:
                    _note(file, {"place": order[done], "error": str(err).strip().splitlines()[-1]})
    found = {record.pop("place"): record for record in map(json.loads, file.read_text().splitlines())}
    earlier = json.loads(DATA.read_text()) if DATA.exists() else [{}] * len(found)
    records = []
    for place, values in enumerate(configurations()):
        steps = [*earlier[place].get("seconds", []), *found[place].get("seconds", [])]
        records.append({"values": values, **({"seconds": steps} if steps else found[place])})
    DATA.write_text("[\n" + ",\n".join(json.dumps(record) for record in records) + "\n]\n")
    file.unlink()
    calibrate((1, 2)).save(MACHINE)


def _note(file: Path, record: Mapping[str, Any]) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(record) + "\n")


def _measure_rank(rank: int, order: Sequence[int], file: str, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    subject, all_values = job(), configurations()
    meshes: dict[tuple[int, ...], DeviceMesh] = {}  # new groups for each configuration would leave ever more threads
    for count, place in enumerate(order):
        values = all_values[place]
        start = time.perf_counter()
        try:
            sizes = subject.sizes(values)
            if sizes not in meshes:
                meshes[sizes] = init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
            record: dict[str, Any] = {"seconds": _step_seconds(subject, values, meshes[sizes])}
        except Exception as err:
            record = {"error": " ".join(f"{type(err).__name__}: {err}".split())[:300]}
        if rank == 0:
            _note(Path(file), {"place": place, **record})
            print(f"{count + 1}/{len(order)} {values} {record} {time.perf_counter() - start:.1f} s", flush=True)
        if "error" in record:  # the other rank may wait in a collective
            raise RuntimeError(record["error"])
    dist.destroy_process_group()


def _step_seconds(subject: TrialJob, values: Mapping[str, Any], mesh: DeviceMesh) -> list[float]:
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
    found = [round(step(), 5) for _ in range(STEPS)]
    engine.close()
    return found


class Prediction(NamedTuple):
    """Predicted seconds of one configuration."""

    settings: dict[str, Any]
    step_seconds: float


class EstimatedPlan:
    """Predictions of ``slapo.estimate`` for every configuration, fastest first."""

    def __init__(self) -> None:
        hardware = Hardware.load(MACHINE)
        found = [Prediction(each, predicted_seconds(each, hardware) or math.inf) for each in configurations()]
        self.candidates = sorted(found, key=lambda each: each.step_seconds)


def predicted_seconds(values: Mapping[str, Any], hardware: Hardware) -> float | None:
    """Return the predicted seconds of a configuration; None if its schedule cannot run."""
    subject = job()
    sizes = dict(zip(AXES, subject.sizes(values), strict=True))
    with fake_ranks(**sizes):
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=AXES)
        sch = subject.make_schedule(subject.empty_model(), mesh, ScheduleSpace(values), values)
        _, batch = subject.share(sizes["dp"], 0)
        options = {"optimizer": subject.optimizer, **subject.build_options(values)}
        return estimate(sch, batch, hardware=hardware, **options).step_seconds


class ReplayedSubject:
    """The space as a subject whose trials were run before."""

    name = command = "replay"
    space_function = staticmethod(space)

    def __init__(self, seconds: Mapping[str, float | None]) -> None:
        self._seconds = seconds

    def declare(self, own: ScheduleSpace) -> str:
        """Declare the symbols; nothing is refused."""
        space(own)
        return ""

    def measure(
        self, number: int, values: Mapping[str, Any], best_seconds: float | None, interruption: Interruption
    ) -> TrialResult:
        """Return the stored result."""
        seconds = self._seconds[configuration_key(values)]
        if seconds is None:
            return TrialResult(number, dict(values), FAILED, message="failed when it was measured")
        return TrialResult(number, dict(values), MEASURED, throughput=ROWS / seconds, seconds=seconds)

    def verify(self, values: Mapping[str, Any], interruption: Interruption) -> str | None:
        """Return None: a replay has no model."""
        return None


def stored_seconds() -> dict[str, float | None]:
    """Return the seconds of every configuration: the fastest of its steps, since other work shared the machine."""
    records = json.loads(DATA.read_text())
    return {configuration_key(each["values"]): min(each["seconds"]) if "seconds" in each else None for each in records}


def gaps(
    seconds: Mapping[str, float | None], trials: int, make: Callable[[int], Any], plan: Any = None
) -> Iterator[list[float]]:
    """Yield for each seed how far the best of the first 1, 2, ... trials is above the best of all, as a share."""
    best = min(each for each in seconds.values() if each is not None)
    for seed in range(SEEDS):
        storage, _ = open_storage(None)
        study = TuningStudy(storage, "replay")
        search = Search(
            ReplayedSubject(seconds),
            study,
            make(seed),
            Predictions(plan),
            Budget(trials),
            Interruption(),
            lambda line: None,
            seed,
        )
        search.run()
        found = [each.seconds or math.inf for each in study.results()]
        yield [min(found[: count + 1]) / best - 1 for count in range(len(found))]


def optuna_gaps(seconds: Mapping[str, float | None], trials: int) -> Iterator[list[float]]:
    """Yield the same for Optuna's TPE as it comes, which repeats configurations and knows none by default."""
    best = min(each for each in seconds.values() if each is not None)
    for seed in range(SEEDS):
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
        study.optimize(partial(stored_objective, seconds), n_trials=trials)
        found = [each.value if each.value is not None else math.inf for each in study.trials]
        yield [min(found[: count + 1]) / best - 1 for count in range(len(found))]


def stored_objective(seconds: Mapping[str, float | None], trial: optuna.Trial) -> float:
    """Return the stored seconds of the configuration that Optuna suggests."""
    own = OptunaSpace(trial)
    space(own)
    found = seconds[configuration_key(own)]
    if found is None:
        raise optuna.TrialPruned
    return found


class OptunaSpace(ScheduleSpace):
    """A space whose values are suggested by Optuna itself."""

    def __init__(self, trial: optuna.Trial) -> None:
        super().__init__()
        self._trial = trial

    def _decide(self, symbol: Any, default: Any) -> Any:
        return self._trial.suggest_categorical(f"{symbol.name} {symbol.shown()}", symbol.candidates)


def random_order(seed: int) -> str:
    """Return the sampler of random search, without repetition."""
    return "random"


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Return Spearman's correlation."""

    def ranks(values: Sequence[float]) -> list[float]:
        ordered = sorted(values)
        return [ordered.index(each) + (ordered.count(each) - 1) / 2 for each in values]

    return statistics.correlation(ranks(left), ranks(right))


def main() -> None:
    """Print the table."""
    if not DATA.exists():
        print("## Tuning\n\nNothing is stored; run `python -m benchmarks.tuning measure` on a machine without other work.")
        return
    seconds = stored_seconds()
    known = [each for each in seconds.values() if each is not None]
    plan, budget = EstimatedPlan(), len(seconds) // 10
    within = sum(each <= (1 + TOLERANCE) * min(known) for each in known)
    rows = {
        "slapo.tune, the planner's predictions": gaps(seconds, budget, lambda seed: "plan", plan),
        "slapo.tune": gaps(seconds, budget, lambda seed: "plan"),
        "Optuna's TPE in slapo.tune, no repetitions": gaps(seconds, budget, lambda seed: "tpe"),
        "Optuna's TPE as it comes": optuna_gaps(seconds, budget),
        "random search": gaps(seconds, budget, random_order),
        "the planner's order alone": iter([planner_order(seconds, plan, budget)]),
    }
    print(f"## Tuning: {len(seconds)} configurations of a GPT-2 on 2 gloo ranks, at most {budget} trials, {SEEDS} seeds\n")
    head = f"within {TOLERANCE:.0%} of the best after, median (worst) | seeds within it | gap after 5, 10, {budget} trials"
    print(f"| search | {head} |")
    print("|---|---|---|---|")
    for name, found in rows.items():
        print(f"| {name} | {summary([*found], budget)} |", flush=True)
    print(
        f"\nThe fastest configuration takes {1e3 * min(known):.0f} ms, the median one {1e3 * statistics.median(known):.0f} ms; "
        f"{within} of {len(seconds)} are within {TOLERANCE:.0%} of it, and {len(seconds) - len(known)} fail."
    )


def planner_order(seconds: Mapping[str, float | None], plan: EstimatedPlan, trials: int) -> list[float]:
    """Return the gaps of trying the candidates in the order of the predictions."""
    best = min(each for each in seconds.values() if each is not None)
    found = [seconds[configuration_key(each.settings)] or math.inf for each in plan.candidates[:trials]]
    return [min(found[: count + 1]) / best - 1 for count in range(trials)]


def summary(runs: Sequence[Sequence[float]], budget: int) -> str:
    """Return the cells of a row."""
    first = sorted(next((count for count, gap in enumerate(run, 1) if gap <= TOLERANCE), budget + 1) for run in runs)
    reached = sum(count <= budget for count in first)
    median, worst = (f"{count}" if count <= budget else f"over {budget}" for count in (first[len(first) // 2], first[-1]))
    later = ", ".join(f"{statistics.median(run[count - 1] for run in runs):.1%}" for count in (5, 10, budget))
    return f"{median} ({worst}) | {reached} of {len(runs)} | {later}"


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        measure()
    else:
        main()
