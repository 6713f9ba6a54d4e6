"""Search settings by how the tail of held-out training clients does."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fedtail.data import Population
from fedtail.evaluation import evaluate
from fedtail.evaluation.evaluate import gives_rates
from fedtail.experiment.data_sources import fingerprint
from fedtail.experiment.tune_section import Search
from fedtail.model_file import model_bytes
from fedtail.privacy.events import NonPrivateRelease
from fedtail.runs.files import RunError, RunRefused, only_writer, refuse_foreign_folder, write_json, write_whole
from fedtail.runs.private_tuning import NOT_PRIVATE, PrivateSearch
from fedtail.runs.recording import Watch, redirect_warnings
from fedtail.training import Progress, train

APART = 1_000_003      # between the seeds of private trials: noise that two of them shared would cancel in their difference
HeldOut = dict[int, tuple[Population, Population]]      # by seed: clients to train on, clients to evaluate on


def tune(search: Search, seeds: tuple[int, ...], folder: Path, watch: Watch, resume: bool = False) -> dict[str, Any]:
    """Search settings; every trial is kept in the folder, and the best experiment is written to `best.toml`.

    Returns the trials, best first, and what `trials.json` holds. A trial whose statistic is not a number has failed: it is
    one of the trials, and never the best. Raises RunRefused where the folder holds a search and `resume` is False, or another
    search.
    """
    if (folder / "trials.log").exists() and not resume:
        raise RunRefused(f"{folder} holds a search. Go on with --resume, or choose another folder with --out.")
    refuse_foreign_folder(folder, {"trials.log"})
    held_out = {seed: _split_held_out(search, seed) for seed in seeds}
    private = _private_search(search, held_out)
    with only_writer(folder), redirect_warnings(watch.note):
        study = _open_study(search, held_out, folder)
        if private is None and _trials_are_private(search, held_out):
            watch.note(NOT_PRIVATE)
        wanted = _number_of_trials(search, study, private, seeds[0])
        while (number := len(_tried_trials(study)) + 1) <= wanted and not watch.stop:
            trial = study.ask()
            chosen = {name: field.suggest(trial, name) for name, field in search.space.items()}
            seed = seeds[0] + APART * len(study.get_trials(deepcopy=False))
            value = _trial_value(search, chosen, held_out, watch, number) if private is None else \
                _private_trial_value(private, chosen, seed, folder, study, watch)
            if value is not None:
                finite = math.isfinite(value)
                study.tell(trial, value if finite else None, state=None if finite else _failed_state())
        return _write_result(search, study, held_out, folder, len(_tried_trials(study)) >= wanted, private)


def _private_search(search: Search, held_out: HeldOut) -> PrivateSearch | None:
    """The accounts of a private search, checked; None where the search is not private. Raises RunRefused for several seeds."""
    if search.settings.private is None:
        return None
    if len(held_out) > 1:
        raise RunRefused(f"the trials of a private search are made with one seed, got {len(held_out)}. Write --seeds 0.")
    [(population, held)] = held_out.values()
    private = PrivateSearch(search, population, held)
    private.check()
    return private


def _trials_are_private(search: Search, held_out: HeldOut) -> bool:
    """Whether every release of a trial is noisy, so that a reader may take the choice among trials for private too."""
    population, _ = next(iter(held_out.values()))
    planned = PrivateSearch(search, population, population).trial_round
    return not any(isinstance(release, NonPrivateRelease) for release in planned.releases)


def _number_of_trials(search: Search, study: Any, private: PrivateSearch | None, seed: int) -> int:
    """How many trials to make in all: as planned, or fewer where there are fewer combinations of settings.

    A random number is drawn once and kept in the study: one that is drawn again could be chosen.
    """
    if private is None or private.stopping == "composition":
        return min(search.settings.trials, len(search.combinations() or range(search.settings.trials)))
    if "trials" not in study.user_attrs:
        study.set_user_attr("trials", private.draw_number_of_trials(seed))
    return study.user_attrs["trials"]


def _private_trial_value(private: PrivateSearch, chosen: dict[str, Any], seed: int, folder: Path, study: Any,
                         watch: Watch) -> float | None:
    """Train a private trial, whose `seed` and so noise are its own; returns its statistic. None where it was stopped.

    The model is written to the folder where it is the best so far. Raises RunRefused or RunError where the trial costs more
    than planned.
    """
    search, wanted = private.search, private.search.experiment(chosen)
    private.check_trial(wanted, str(chosen))
    watch.begin("a trial of a private search", seed, 0, wanted.rounds)
    task = wanted.task.make(seed)
    with wanted.fleet(task, private.population) as fleet:
        trained = train(wanted.algorithm, task, private.population, rounds=wanted.rounds, seed=seed, fleet=fleet,
                        channel=wanted.channel, privacy=private.budget, on_round=partial(_report_round, watch))
    if watch.stop:
        return None
    private.check_spent(trained)
    found = evaluate(trained, private.held, engine=wanted.evaluating)[search.settings.metric] if private.evaluation is None else \
        private.judge_privately(trained, seed)
    value = found.statistic(search.statistic)
    before = [trial.value for trial in _tried_trials(study) if trial.state.name == "COMPLETE"]
    if math.isfinite(value) and all(value < other if search.better == "lower" else value > other for other in before):
        write_whole(folder / "model.safetensors", model_bytes(trained.module))
    return value


def _write_result(search: Search, study: Any, held_out: HeldOut, folder: Path, finished: bool,
                  private: PrivateSearch | None) -> dict[str, Any]:
    """What a search found; writes `trials.json`, and `best.toml` where a trial gave a number.

    The best of a private search is known at the end only (`finished`), and `privacy.json` says what it cost.
    """
    import tomli_w

    scale = _display_scale(search, next(iter(held_out.values()))[1])
    worth = [trial for trial in _tried_trials(study) if trial.state.name == "COMPLETE"]
    ranked = sorted(worth, key=lambda trial: trial.value if search.better == "lower" else -trial.value)
    trials = [{"settings": trial.params, "value": scale * trial.value} for trial in ranked]
    result: dict[str, Any] = {
        "statistic": search.statistic, "metric": search.settings.metric, "better": search.better,
        "unit": "%" if scale > 1 else "", "seeds": list(held_out), "finished": finished,
        "failed": len(_tried_trials(study)) - len(ranked), "trials": trials}
    if private is not None:
        result["privacy"] = private.statement(len(study.get_trials(deepcopy=False)))
        write_json(folder / "privacy.json", result["privacy"])
    write_json(folder / "trials.json", result)
    if private is not None and not finished:
        return {**result, "best": None, "file": str(folder / "best.toml")}
    if ranked:
        write_whole(folder / "best.toml", tomli_w.dumps(search.experiment(ranked[0].params).table()))
    return {**result, "best": trials[0] if trials else None, "file": str(folder / "best.toml")}


def _trial_value(search: Search, chosen: dict[str, Any], held_out: HeldOut, watch: Watch, number: int) -> float | None:
    """The mean over seeds of the statistic of a trial over held-out clients, trained here; None where the search was stopped."""
    wanted, values = search.experiment(chosen), []
    for seed, (population, held) in held_out.items():
        watch.begin(f"trial {number} of {search.settings.trials}", seed, 0, wanted.rounds)
        task = wanted.task.make(seed)
        with wanted.fleet(task, population) as fleet:
            trained = train(wanted.algorithm, task, population, rounds=wanted.rounds, seed=seed, fleet=fleet,
                            channel=wanted.channel, on_round=partial(_report_round, watch))
        if watch.stop:
            return None
        found = evaluate(trained, held, engine=wanted.evaluating)[search.settings.metric]
        values.append(found.statistic(search.statistic))
    return sum(values) / len(values)


def _report_round(watch: Watch, progress: Progress) -> bool:
    """Tell the watch of a round; True, which stops training, where the search was stopped."""
    watch.round(progress.round)
    return watch.stop


def _split_held_out(search: Search, seed: int) -> tuple[Population, Population]:
    """The clients to train on and those to evaluate on: the validation split, or a share held out by `seed`.

    Never the test clients.
    """
    splits = search.first().data.load(seed)
    if "validation" in splits:
        return splits["train"], splits["validation"]
    population, held = splits["train"].split((1 - search.settings.holdout, search.settings.holdout), seed)
    return population, held


def _display_scale(search: Search, population: Population) -> float:
    """By what a statistic is multiplied for display: 100 for error rates, in percent; 10,000 for their variance; else 1."""
    rates = search.settings.metric == "error" and gives_rates(search.first().task.make(0), population)
    return 100.0 ** (1 + (search.statistic == "variance")) if rates else 1.0


def _open_study(search: Search, held_out: HeldOut, folder: Path) -> Any:
    """The optuna study in a folder, new or gone on with; combinations not yet tried are queued where there are few.

    Raises RunRefused where it is another search's, RunError where optuna is missing or `trials.log` is damaged.
    """
    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend
    except ImportError:
        raise RunError("fedtail tune needs optuna. Install it with pip install 'fedtail[tune]'.") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    direction: Literal["minimize", "maximize"] = "minimize" if search.better == "lower" else "maximize"
    try:
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder / "trials.log")))
        study = optuna.create_study(storage=storage, study_name="fedtail", load_if_exists=True, direction=direction)
    except (ValueError, KeyError) as reason:
        raise RunError(f"{folder / 'trials.log'} is damaged ({reason}). Start again in another folder with --out.") from reason
    about = _search_identity(search, held_out)
    if study.user_attrs.get("search", about) != about or study.direction.name.lower() != direction:
        raise RunRefused(f"{folder} holds another search. Choose another folder with --out.")
    study.set_user_attr("search", about)
    again = len(study.trials)                       # a resumed search does not repeat its first draws
    study.sampler = _random_sampler(search, again) if search.settings.private else optuna.samplers.TPESampler(seed=again)
    if search.settings.private not in (None, "composition"):
        return study
    for chosen in _untried_combinations(search, study):
        study.enqueue_trial(chosen)
    return study


def _random_sampler(search: Search, seed: int) -> Any:
    """An optuna sampler that draws the settings of a private search independently of each other and of all trials.

    By `seed` where the budget is replayable, else by the operating system.
    """
    import optuna

    return optuna.samplers.RandomSampler(seed=seed if search.first().privacy.replayable else None)


def _search_identity(search: Search, held_out: HeldOut) -> str:
    """A text that two searches must share to be one: everything but the number of trials, which counts where it is private."""
    settings = search.settings
    data = {f"{seed} {place}": population for seed, both in held_out.items() for place, population in enumerate(both)}
    private = () if settings.private is None else (settings.private, settings.noise, settings.trials)
    return repr((settings.metric, search.statistic, settings.holdout, search.space, search.first().table(),
                 search.first().own_code(), list(held_out), fingerprint(data), *private))


def _untried_combinations(search: Search, study: Any) -> list[dict[str, Any]]:
    """The combinations of settings that are neither tried nor queued, where there are few enough to try each; else none."""
    waiting = [trial for trial in study.get_trials(deepcopy=False) if trial.state.name == "WAITING"]
    known = [trial.params for trial in _tried_trials(study)] + [trial.system_attrs.get("fixed_params") for trial in waiting]
    return [chosen for chosen in search.combinations() or [] if chosen not in known]


def _tried_trials(study: Any) -> list[Any]:
    """The trials that ended, with a number (COMPLETE) or without (FAIL), in order."""
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.name in ("COMPLETE", "FAIL")]


def _failed_state() -> Any:
    """Optuna's state of a trial that failed; optuna is imported here, since it is optional."""
    from optuna.trial import TrialState

    return TrialState.FAIL
