"""Search settings by how the tail of held-out training clients does."""

from __future__ import annotations

import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fedtail.data import Population
from fedtail.divergence import DivergedWarning, has_exploded
from fedtail.engine import Engine
from fedtail.evaluation import Evaluation, evaluate, evaluate_personal
from fedtail.experiment.data_sources import data_fingerprint
from fedtail.experiment.tune_section import Search
from fedtail.model_file import model_bytes
from fedtail.privacy.events import NonPrivateRelease
from fedtail.runs.files import RunError, RunRefused, hold_folder_lock, refuse_foreign_folder, write_atomically
from fedtail.runs.private_tuning import NOT_PRIVATE, PrivateSearch
from fedtail.runs.recording import Watch, redirect_warnings
from fedtail.runs.search_results import write_search_result
from fedtail.runs.trial_values import save_trial_values
from fedtail.training import Progress, Trained, train

APART = 1_000_003      # between the seeds of private trials: noise that two of them shared would cancel in their difference
UNSTABLE = 2.0         # times the loss of the untrained model: training that ends above it is about to diverge
HeldOut = dict[int, tuple[Population, Population]]      # by seed: clients to train on, clients to evaluate on


def tune(search: Search, seeds: tuple[int, ...], folder: Path, watch: Watch, resume: bool = False) -> dict[str, Any]:
    """Search the settings of an experiment: train trials, record them in `folder`, and write the best experiment to `best.toml`.

    Each trial is trained with each of `seeds`, all on one split of the data; a private search takes one, from which it
    derives another for each trial. Returns the content of `trials.json` (with `trials`, best first), and `best`, the chosen
    trial or None, and `file`, the path of `best.toml`: see `write_search_result`. A trial whose statistic, or whose loss for
    a held-out client, is not finite, or whose mean loss is over 1000 times that of models without training, has diverged: it
    counts as a trial and is never the best. A search that `watch` stops can
    be resumed. Raises RunRefused where the folder holds a search and `resume` is False, another search, or other files, and
    for a private search with several seeds or whose epsilon cannot be stated or is too large; RunError where optuna is not
    installed.
    """
    if (folder / "trials.log").exists() and not resume:
        raise RunRefused(f"{folder} holds a search. Go on with --resume, or choose another folder with --out.")
    refuse_foreign_folder(folder, {"trials.log"})
    search = search.with_one_split(seeds[0])
    held_out = {seed: _split_held_out(search, seed) for seed in seeds}
    search = search.for_held_out(min(len(held) for _, held in held_out.values()))
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
            judged = _train_trial(search, chosen, held_out, watch, number) if private is None else \
                _train_private_trial(private, chosen, seed, folder, study, watch)
            if judged is not None:
                _record_trial(study, trial, judged, folder)
        held = {seed: both[1] for seed, both in held_out.items()}
        ended, begun = _ended_trials(study), len(study.get_trials(deepcopy=False))
        return write_search_result(search, ended, held, folder, len(ended) >= wanted, private, begun)


class JudgedTrial(NamedTuple):
    """The statistic of a trial for each seed, NaN where the model diverged, and by seed the keys and values of held-out clients.

    `values` is None for a private trial. `unstable` is whether for a seed the mean loss is far above that of the untrained model.
    """

    by_seed: tuple[float, ...]
    values: dict[int, tuple[np.ndarray, np.ndarray]] | None = None
    unstable: bool = False

    @property
    def value(self) -> float:
        """The mean over seeds."""
        return sum(self.by_seed) / len(self.by_seed)


def _record_trial(study: Any, trial: Any, judged: JudgedTrial, folder: Path) -> None:
    """Tell the optuna `study` how a trial ended, with its statistic by seed, and write the values of its clients to `folder`."""
    trial.set_user_attr("by_seed", [one if math.isfinite(one) else None for one in judged.by_seed])
    trial.set_user_attr("unstable", judged.unstable)
    if judged.values is not None:
        save_trial_values(folder, trial.number, judged.values)
    finite = math.isfinite(judged.value)
    study.tell(trial, judged.value if finite else None, state=None if finite else _optuna_failed_state())


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
                         watch: Watch) -> JudgedTrial | None:
    """Train one trial of a private search with the settings `chosen` and a seed of its own, and have it judged.

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
    return JudgedTrial((value,))


def _train_trial(search: Search, chosen: dict[str, Any], held_out: HeldOut, watch: Watch, number: int) -> JudgedTrial | None:
    """Train a trial of `search` with the settings `chosen` for each seed, and evaluate held-out clients; None where stopped.

    `held_out` has, by seed, the clients to train on and to evaluate on. `number` only names the trial to the watch.
    """
    wanted, by_seed, values, unstable = search.experiment_with(chosen), [], {}, False
    for seed, (population, held) in held_out.items():
        watch.begin(f"trial {number} of {search.settings.trials}", seed, 0, wanted.rounds)
        task = wanted.task.make(seed)
        with wanted.fleet(task, population) as fleet:
            trained = train(wanted.algorithm, task, population, rounds=wanted.rounds, seed=seed, fleet=fleet,
                            channel=wanted.channel, progress=False, on_round=partial(_report_round, watch))
        if watch.stop:
            return None
        judged = _judged_evaluation(search, trained, held, wanted.evaluation_engine)
        found = judged[search.settings.metric]
        loss, constant = judged.loss.mean(), None if judged.constant is None else judged.constant.loss.mean()
        untrained = evaluate(wanted.task.make(seed).module, held, task, engine=wanted.evaluation_engine).loss.mean()
        gone = not math.isfinite(loss) or has_exploded(loss, untrained, constant)
        by_seed.append(math.nan if gone else found.statistic(search.statistic))      # its error is no number to go by
        values[seed] = (held.key.numpy(), found.values.numpy())
        unstable |= not loss <= UNSTABLE * untrained
    return JudgedTrial(tuple(by_seed), values, unstable)


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
