"""A study that several tuners share: which configurations are taken, and what came of them."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import StorageInternalError
from optuna.pruners import BasePruner
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from slapo_core import SlapoError

from ..schedule_space.exploration import Path
from ..schedule_space.schedule_space import SymbolDefinition
from ..search_space.space import Space
from ..search_space.symbol import TuneError
from ..trial.reports import TrialReport
from .database import Database
from .ownership import end_run, is_alive, own_process, start_run
from .pruners import INTERVAL, IntervalPruner, best_throughput, pruner_name
from .trial_result import MEASURED, PRUNED, TrialResult

_OWNER, _ORDER, _RESULT, _WITHDRAWN, _LIMIT = "owner", "symbols", "result", "withdrawn", "time_limit"
_STATES = {MEASURED: TrialState.COMPLETE, PRUNED: TrialState.PRUNED}


class TuningStudy:
    """The trials of one subject and space in an Optuna storage.

    Args:
        storage: The storage.
        name: Name of the study.
        classic: A database that gets the classic record of each result too.
        time_limit: Seconds of a trial; a result that an earlier, smaller limit ended does not count.
        pruner: Decides about running trials.
    """

    def __init__(
        self,
        storage: BaseStorage,
        name: str,
        classic: Database | None = None,
        time_limit: float | None = None,
        pruner: BasePruner | None = None,
    ) -> None:
        self.name, self._storage, self._classic, self._time_limit = name, storage, classic, time_limit
        self._run = start_run()
        with _storage_errors():
            self.study = optuna.create_study(
                storage=storage,
                study_name=name,
                direction="maximize",
                load_if_exists=True,
                pruner=pruner or IntervalPruner(),
            )
            self._study_id = storage.get_study_id_from_name(name)

    def close(self) -> None:
        """End this tuner's part in the study: a trial that it has claimed and not finished may be claimed by others."""
        end_run(self._run)

    def trials(self) -> list[FrozenTrial]:
        """Return the trials that count, of all tuners: running ones and results; those of tuners that were killed do not."""
        with _storage_errors():
            return [trial for trial in self.study.get_trials(deepcopy=False) if self._counts(trial)]

    def results(self) -> list[TrialResult]:
        """Return the results so far, of all tuners, in order of number."""
        found, verdicts = [trial for trial in self.trials() if trial.state.is_finished()], self.verdicts()
        return [
            TrialResult.of_data(trial.number, values_of(trial), {**trial.user_attrs[_RESULT], **verdicts.get(trial.number, {})})
            for trial in found
        ]

    def paths(self) -> list[Path]:
        """Return the configurations that are taken, as paths of an ``Exploration``."""
        return [path_of(trial) for trial in self.trials()]

    def claim(self, path: Path, predicted: float | None) -> int | None:
        """Add a running trial and return its number; None if another tuner has taken the configuration meanwhile.

        The trial is written whole in one operation. Of two tuners that take one configuration, the lower number keeps it.
        """
        attributes = {_OWNER: own_process(self._run), _LIMIT: self._time_limit, "predicted": predicted}
        template = running_trial(path, attributes)
        with _storage_errors():
            identity = self._storage.create_new_trial(self._study_id, template_trial=template)
            number = self._storage.get_trial_number_from_id(identity)
        key = _path_key(path)
        if any(trial.number < number and _path_key(path_of(trial)) == key for trial in self.trials()):
            self._end(identity, {_WITHDRAWN: True}, TrialState.FAIL)
            return None
        return number

    def report(self, number: int, report: TrialReport) -> str:
        """Store a report of a running trial and ask the pruner; return the sentence of a trial to stop, else ``""``."""
        pruner = self.study.pruner
        with _storage_errors():
            identity = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)
            self._storage.set_trial_intermediate_value(identity, report.step, report.throughput)
            trial = copy.copy(self._storage.get_trial(identity))
            trial.user_attrs = {**trial.user_attrs, INTERVAL: report.interval}
            if not pruner.prune(self.study, trial):
                return ""
            best = best_throughput(self.study)
        compared = "" if best is None else f", and the best has {best:.5g}"
        return (
            f"stopped after step {report.step} by the {pruner_name(pruner)} pruner: {report.throughput:.5g} samples/s{compared}"
        )

    def finish(self, result: TrialResult, command: str = "") -> None:
        """Store the result of a trial that :meth:`claim` added; the classic record comes first."""
        if self._classic is not None:
            self._classic.commit(f"{self.name} {Space.cfg_dict_to_str(result.values)}", result.classic_record(command))
        with _storage_errors():
            identity = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, result.number)
            if result.throughput is not None and result.steps:
                self._storage.set_trial_intermediate_value(identity, result.steps, result.throughput)
        self._end(identity, {_RESULT: result.data()}, _STATES.get(result.state, TrialState.FAIL), result.throughput)

    def abandon(self, number: int) -> None:
        """Give up a claimed configuration, which any tuner may then take."""
        with _storage_errors():
            identity = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)
        self._end(identity, {_WITHDRAWN: True}, TrialState.FAIL)

    def set_verified(self, result: TrialResult, command: str = "") -> None:
        """Store the verdict of the verification, which comes after the trial has ended, with the study."""
        if self._classic is not None:
            self._classic.commit(f"{self.name} {Space.cfg_dict_to_str(result.values)}", result.classic_record(command))
        verdict = {"verified": result.verified, "message": result.message, "state": result.state}
        with _storage_errors():
            self.study.set_user_attr(f"verified.{result.number}", verdict)

    def verdicts(self) -> dict[int, dict[str, Any]]:
        """Return the verdicts of verifications by number of the trial."""
        with _storage_errors():
            attributes = self.study.user_attrs
        return {int(name.partition(".")[2]): value for name, value in attributes.items() if name.startswith("verified.")}

    def _end(self, identity: int, attributes: Mapping[str, Any], state: TrialState, value: float | None = None) -> None:
        with _storage_errors():
            for name, attribute in attributes.items():
                self._storage.set_trial_user_attr(identity, name, attribute)
            self._storage.set_trial_state_values(identity, state, None if value is None else [value])

    def _counts(self, trial: FrozenTrial) -> bool:
        attributes = trial.user_attrs
        if attributes.get(_WITHDRAWN) or _ORDER not in attributes:
            return False
        if not trial.state.is_finished():
            return is_alive(attributes.get(_OWNER, {}), attributes.get(_LIMIT))
        limit = attributes.get(_RESULT, {}).get("time_limit")
        more_time = limit is not None and (self._time_limit is None or self._time_limit > limit)
        return _RESULT in attributes and not more_time


def running_trial(path: Path, attributes: Mapping[str, Any]) -> FrozenTrial:
    """Return a running trial of a configuration."""
    return create_trial(
        state=TrialState.RUNNING,
        params={parameter_name(symbol): value for symbol, value in path},
        distributions={parameter_name(symbol): distribution(symbol) for symbol, _ in path},
        user_attrs={**attributes, _ORDER: [[symbol.name, parameter_name(symbol)] for symbol, _ in path]},
    )


def parameter_name(symbol: SymbolDefinition) -> str:
    """Return the name of a symbol in an Optuna study, which admits one list of choices for each name."""
    if symbol.kind == "int":
        return symbol.name
    text = f"{symbol.name}: {symbol.shown()}"
    return text if len(text) <= 80 else f"{symbol.name}: {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def distribution(symbol: SymbolDefinition) -> BaseDistribution:
    """Return Optuna's distribution of a symbol."""
    if symbol.kind == "int":
        step = symbol.candidates[1] - symbol.candidates[0] if symbol.candidates[1:] else 1
        return IntDistribution(symbol.candidates[0], symbol.candidates[-1], step=step)
    return CategoricalDistribution(symbol.candidates)


def path_of(trial: FrozenTrial) -> Path:
    """Return the symbols and values of a trial, in the order of declaration."""
    order = trial.user_attrs[_ORDER]
    return [(_symbol(name, trial.distributions[key]), trial.params[key]) for name, key in order]


def values_of(trial: FrozenTrial) -> dict[str, Any]:
    """Return the values of a trial by symbol, in the order of declaration."""
    return {name: trial.params[key] for name, key in trial.user_attrs[_ORDER]}


def _symbol(name: str, of: BaseDistribution) -> SymbolDefinition:
    if isinstance(of, IntDistribution):
        return SymbolDefinition(name, "int", tuple(range(of.low, of.high + 1, of.step)))
    assert isinstance(of, CategoricalDistribution), "only these are written"
    return SymbolDefinition(name, "choice", tuple(of.choices))


def _path_key(path: Sequence[tuple[SymbolDefinition, Any]]) -> str:
    return json.dumps([(symbol.name, value) for symbol, value in path])


@contextmanager
def _storage_errors() -> Iterator[None]:
    """Raise an error of the storage as one sentence."""
    try:
        yield
    except SlapoError:
        raise
    except (StorageInternalError, OSError) as err:
        cause = str(err.__cause__ or err).partition("\n")[0]
        raise TuneError(f"the database cannot be used: {cause}; mend it or choose another") from err
