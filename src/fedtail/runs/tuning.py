"""Search settings by how the tail of held-out training clients does."""

from __future__ import annotations

import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fedtail.data import Population
from fedtail.divergence import DivergedWarning
from fedtail.engine import Engine
from fedtail.evaluation import Evaluation, evaluate, evaluate_personal
from fedtail.evaluation.evaluate import gives_rates
from fedtail.experiment.data_sources import data_fingerprint
from fedtail.experiment.tune_section import Search
from fedtail.model_file import model_bytes
from fedtail.privacy.events import NonPrivateRelease
from fedtail.runs.files import RunError, RunRefused, hold_folder_lock, refuse_foreign_folder, write_atomically, write_json
from fedtail.runs.private_tuning import NOT_PRIVATE, PrivateSearch
from fedtail.runs.recording import Watch, redirect_warnings
from fedtail.training import Progress, Trained, train

APART = 1_000_003      # between the seeds of private trials: noise that two of them shared would cancel in their difference
HeldOut = dict[int, tuple[Population, Population]]      # by seed: clients to train on, clients to evaluate on


def tune(search: Search, seeds: tuple[int, ...], folder: Path, watch: Watch, resume: bool = False) -> dict[str, Any]:
    """Search the settings of an experiment: train trials, record them in `folder`, and write the best experiment to `best.toml`.

    Each trial is trained with each of `seeds`; a private search takes one, from which it derives another for each trial. Returns
    the content of `trials.json` (with `trials`, best first), and `best`, the best trial or None, and `file`, the path of
    `best.toml`. A trial whose statistic is not finite has failed: it counts as a trial and is never the best. A search that
    `watch` stops can be resumed. Raises RunRefused where the folder holds a search and `resume` is False, another search, or
    other files, and for a private search with several seeds or whose epsilon cannot be stated or is too large; RunError where
    optuna is not installed.
    """
    if (folder / "trials.log").exists() and not resume:
        raise RunRefused(f"{folder} holds a search. Go on with --resume, or choose another folder with --out.")
    refuse_foreign_folder(folder, {"trials.log"})
    held_out = {seed: _split_held_out(search, seed) for seed in seeds}
    private = _private_search(search, held_out)
    with hold_folder_lock(folder), redirect_warnings(watch.note):
        study = _open_study(search, held_out, folder)
        if private is None and _trials_are_private(search, held_out):
            watch.note(NOT_PRIVATE)
        wanted = _number_of_trials(search, study, private, seeds[0])
        while (number := len(_ended_trials(study)) + 1) <= wanted and not watch.stop:
            trial = study.ask()
            chosen = {name: field.suggest(trial, name) for name, field in search.space.items()}
            seed = seeds[0] + APART * len(study.get_trials(deepcopy=False))
            value = _train_trial(search, chosen, held_out, watch, number) if private is None else \
                _train_private_trial(private, chosen, seed, folder, study, watch)
            if value is not None:
                finite = math.isfinite(value)
                study.tell(trial, value if finite else None, state=None if finite else _optuna_failed_state())
        return _write_result(search, study, held_out, folder, len(_ended_trials(study)) >= wanted, private)


def _private_search(search: Search, held_out: HeldOut) -> PrivateSearch | None:
    """The `PrivateSearch` of a search with `private` in `[tune]`, checked; None for a search without.

    `held_out` has, by seed, the clients to train on and to judge by. Raises RunRefused where there are several seeds, or where
    the privacy cost of the search cannot be stated or is too high.
    """
    if search.settings.private is None:
        return None
    if len(held_out) > 1:
        raise RunRefused(f"the trials of a private search are made with one seed, got {len(held_out)}. Write --seeds 0.")
    [(population, held)] = held_out.values()
    private = PrivateSearch(search, population, held)
    private.check_epsilon()
    return private


def _trials_are_private(search: Search, held_out: HeldOut) -> bool:
    """Whether every release of a trial of `search` is noisy; `held_out` has, by seed, the clients to train on.

    `tune` then notes, for a search without `private`, that the choice among trials is not private.
    """
    population, _ = next(iter(held_out.values()))
    planned = PrivateSearch(search, population, population).trial_round_event
    return not any(isinstance(release, NonPrivateRelease) for release in planned.releases)


def _number_of_trials(search: Search, study: Any, private: PrivateSearch | None, seed: int) -> int:
    """The number of trials to make in all, those already made included.

    A fixed number is that of `[tune]`, or the number of all combinations of settings where that is smaller. A random number,
    of a private search, is drawn once (from `seed` where the budget is replayable) and stored in the study, since drawing it
    again would allow choosing among draws.
    """
    if private is None or private.stopping_rule == "composition":
        return min(search.settings.trials, len(search.combinations() or range(search.settings.trials)))
    if "trials" not in study.user_attrs:
        study.set_user_attr("trials", private.draw_number_of_trials(seed))
    return study.user_attrs["trials"]


def _train_private_trial(private: PrivateSearch, chosen: dict[str, Any], seed: int, folder: Path, study: Any,
                         watch: Watch) -> float | None:
    """Train one trial of a private search with the settings `chosen` and a seed of its own; returns its statistic.

    None where the watch stopped it. The held-out clients judge it, with noise where `[tune]` has some. Where it is better than
    all earlier trials of the `study`, its model is written to `model.safetensors` in `folder`. Raises RunRefused where the trial
    would cost more than planned, and RunError where it did.
    """
    search, wanted = private.search, private.search.experiment_with(chosen)
    private.check_trial_cost(wanted, str(chosen))
    watch.begin("a trial of a private search", seed, 0, wanted.rounds)
    task = wanted.task.make(seed)
    with wanted.fleet(task, private.population) as fleet:
        trained = train(wanted.algorithm, task, private.population, rounds=wanted.rounds, seed=seed, fleet=fleet,
                        channel=wanted.channel, privacy=private.trial_budget, progress=False,
                        on_round=partial(_report_round, watch))
    if watch.stop:
        return None
    private.check_spent_privacy(trained)
    found = private.release_held_out_histogram(trained, seed) if private.held_out_evaluation is not None else \
        evaluate(trained, private.held, engine=wanted.evaluation_engine)[search.settings.metric]
    value = found.statistic(search.statistic)
    before = [trial.value for trial in _ended_trials(study) if trial.state.name == "COMPLETE"]
    if math.isfinite(value) and all(value < other if search.better == "lower" else value > other for other in before):
        write_atomically(folder / "model.safetensors", model_bytes(trained.module))
    return value


def _write_result(search: Search, study: Any, held_out: HeldOut, folder: Path, finished: bool,
                  private: PrivateSearch | None) -> dict[str, Any]:
    """Write `trials.json`, `best.toml` and, for a private search, `privacy.json` to `folder`; returns what `tune` returns.

    That is the content of `trials.json` with `best`, the best trial or None, and `file`, the path of `best.toml`. The trials are
    those that ended in the optuna `study`. `best.toml` is written where a trial gave a finite number; of a private search only
    once it is `finished`, and `best` is None before. `held_out` has, by seed, the clients to train on and to judge by.
    """
    import tomli_w

    scale = _display_scale(search, next(iter(held_out.values()))[1])
    worth = [trial for trial in _ended_trials(study) if trial.state.name == "COMPLETE"]
    ranked = sorted(worth, key=lambda trial: trial.value if search.better == "lower" else -trial.value)
    trials = [{"settings": trial.params, "value": scale * trial.value} for trial in ranked]
    result: dict[str, Any] = {
        "statistic": search.statistic, "metric": search.settings.metric, "better": search.better,
        "unit": "%" if scale > 1 else "", "models": search.settings.models, "seeds": list(held_out), "finished": finished,
        "failed": len(_ended_trials(study)) - len(ranked), "trials": trials}
    if private is not None:
        result["privacy"] = private.privacy_statement(len(study.get_trials(deepcopy=False)))
        write_json(folder / "privacy.json", result["privacy"])
    write_json(folder / "trials.json", result)
    if private is not None and not finished:
        return {**result, "best": None, "file": str(folder / "best.toml")}
    if ranked:
        write_atomically(folder / "best.toml", tomli_w.dumps(search.experiment_with(ranked[0].params).as_table()))
    return {**result, "best": trials[0] if trials else None, "file": str(folder / "best.toml")}


def _train_trial(search: Search, chosen: dict[str, Any], held_out: HeldOut, watch: Watch, number: int) -> float | None:
    """Train a trial of `search` with the settings `chosen` for each seed; returns the mean over seeds of its held-out statistic.

    None where the watch stopped it. `held_out` has, by seed, the clients to train on and to evaluate on. `number` only names the
    trial to the watch.
    """
    wanted, values = search.experiment_with(chosen), []
    for seed, (population, held) in held_out.items():
        watch.begin(f"trial {number} of {search.settings.trials}", seed, 0, wanted.rounds)
        task = wanted.task.make(seed)
        with wanted.fleet(task, population) as fleet:
            trained = train(wanted.algorithm, task, population, rounds=wanted.rounds, seed=seed, fleet=fleet,
                            channel=wanted.channel, progress=False, on_round=partial(_report_round, watch))
        if watch.stop:
            return None
        judged = _judged_evaluation(search, trained, held, wanted.evaluation_engine)
        finite = math.isfinite(judged.loss.mean())               # the error of a model that has diverged is no number to go by
        values.append(judged[search.settings.metric].statistic(search.statistic) if finite else math.nan)
    return sum(values) / len(values)


def _judged_evaluation(search: Search, trained: Trained, held: Population, engine: Engine) -> Evaluation:
    """The evaluation by which a trial is judged: that of the shared model on `held`, or of personal models, as `[tune]` says.

    For personal models, `held` has held-out examples of the training clients.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DivergedWarning)         # such trials are counted, and shown at the end
        if search.settings.models == "personal":
            return evaluate_personal(trained, held, engine=engine).personal
        return evaluate(trained, held, engine=engine)


def _report_round(watch: Watch, progress: Progress) -> bool:
    """Report the finished round of `progress` to the watch; returns True, which stops training, where the watch asks to stop."""
    watch.round(progress.round)
    return watch.stop


def _split_held_out(search: Search, seed: int) -> tuple[Population, Population]:
    """The clients to train on and those to evaluate the trials of a search on, as two populations.

    The second is the validation split of the data; without one, the fraction `holdout` of the training clients, drawn by `seed`.
    Where personal models judge, both are the training clients, the second with the fraction `holdout` of their examples. Test
    clients are never used.
    """
    splits = search.first_experiment().data.load(seed)
    if search.settings.models == "personal":
        own, held = splits["train"].split_examples(within=search.settings.holdout, seed=seed)
        return own, held
    if "validation" in splits:
        return splits["train"], splits["validation"]
    population, held = splits["train"].split((1 - search.settings.holdout, search.settings.holdout), seed)
    return population, held


def _display_scale(search: Search, population: Population) -> float:
    """The factor by which the search's statistic is multiplied for display: 100 for error rates, 10,000 for their variance, or 1.

    `population` tells whether the errors of the task are rates.
    """
    rates = search.settings.metric == "error" and gives_rates(search.first_experiment().task.make(0), population)
    return 100.0 ** (1 + (search.statistic == "variance")) if rates else 1.0


def _open_study(search: Search, held_out: HeldOut, folder: Path) -> Any:
    """Open or create the optuna study in the file `trials.log` of `folder`, set its sampler, and return it.

    The study stores which search and data (`held_out`) it is about. Combinations not yet tried are queued where there are few
    enough to try all and the number of trials is fixed. Sets optuna's logging to warnings. Raises RunRefused where the file is
    that of another search, RunError where optuna is not installed or the file is damaged.
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
    """An optuna sampler for a private search: settings are drawn at random, independently of each other and of earlier trials.

    Drawn from `seed` where the budget is replayable, else from a fresh seed of the operating system.
    """
    import optuna

    return optuna.samplers.RandomSampler(seed=seed if search.first_experiment().privacy.replayable else None)


def _search_identity(search: Search, held_out: HeldOut) -> str:
    """A text that is equal for two searches only if one may continue the other.

    It covers the metric, statistic, searched fields, experiment, user code, seeds and data; of a private search also its noise
    and number of trials, which otherwise may change. `held_out` has, by seed, the clients to train on and to judge by.
    """
    settings = search.settings
    data = {f"{seed} {place}": population for seed, both in held_out.items() for place, population in enumerate(both)}
    private: tuple[Any, ...] = () if settings.private is None else (settings.private, settings.noise, settings.trials)
    private += () if settings.models == "shared" else (settings.models,)
    return repr((settings.metric, search.statistic, settings.holdout, search.space, search.first_experiment().as_table(),
                 search.first_experiment().own_code_digests(), list(held_out), data_fingerprint(data), *private))


def _untried_combinations(search: Search, study: Any) -> list[dict[str, Any]]:
    """The combinations of the search's settings that the optuna `study` has neither tried nor queued.

    An empty list where there are too many to try all.
    """
    waiting = [trial for trial in study.get_trials(deepcopy=False) if trial.state.name == "WAITING"]
    known = [trial.params for trial in _ended_trials(study)] + [trial.system_attrs.get("fixed_params") for trial in waiting]
    return [chosen for chosen in search.combinations() or [] if chosen not in known]


def _ended_trials(study: Any) -> list[Any]:
    """The trials of the optuna `study` that ended, with a finite number (COMPLETE) or without (FAIL), in the order they began."""
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.name in ("COMPLETE", "FAIL")]


def _optuna_failed_state() -> Any:
    """Optuna's `TrialState.FAIL`. Optuna is imported here because it is an optional dependency."""
    from optuna.trial import TrialState

    return TrialState.FAIL
