"""What a search leaves behind: every trial with its spread, which one is chosen and why, and what to be warned of."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedtail.data import Population
from fedtail.directions import FEW_CLIENTS, few_clients_text
from fedtail.evaluation.evaluate import gives_rates
from fedtail.experiment.tune_section import Search
from fedtail.runs.answer_words import shown_statistic, statistic_words
from fedtail.runs.files import write_atomically, write_json
from fedtail.runs.private_tuning import PrivateSearch
from fedtail.runs.search_warnings import search_warnings
from fedtail.runs.simpler_choice import Candidate, Chosen, Difference, choose_simpler
from fedtail.runs.trial_values import read_trial_values, rows_of_held_out

STABLE = " of the trials whose loss does not diverge"
UNSTABLE = "the loss of the chosen setting is far above that of the untrained model: it diverges."


def write_search_result(search: Search, ended: Sequence[Any], held_out: Mapping[int, Population], folder: Path, finished: bool,
                        private: PrivateSearch | None, begun: int) -> dict[str, Any]:
    """Write `trials.json`, `best.toml` and, for a private search, `privacy.json` to `folder`; returns what `tune` returns.

    That is the content of `trials.json` with `best`, the chosen trial or None, and `file`, the path of `best.toml`. `ended` are
    the optuna trials that ended, `held_out` the clients they were judged by, for each seed. `trials` has those that gave a
    number, best first and then those whose loss is far above that of the untrained model, each with its settings, value,
    `by_seed` and `std` over seeds; `differences`, in the same order, what each is worse than the best, with a 95% interval for
    new clients, none for those with such a loss unless all have it; `diverged` the others. `clients` is the number of held-out
    clients, the fewest of a seed, and `left_out` how many trials are not chosen from because of their loss. The chosen trial is
    the best or a simpler one within one standard error of it; `reason` says which, and `warnings` what to be careful of.
    `by_client` has each of fewer than 20 held-out clients, else it is None: see `rows_of_held_out`. Of a private search
    nothing but the value of a trial is known: the best is chosen, once the search is `finished`, and `best` is None before; its
    guarantee is that of `begun` trials, those that were interrupted too.
    """
    import tomli_w

    seeds, sign = tuple(held_out), 1.0 if search.better == "lower" else -1.0
    scale = _display_scale(search, next(iter(held_out.values())))
    ranked = sorted((trial for trial in ended if trial.state.name == "COMPLETE"),
                    key=lambda trial: (_is_unstable(trial), sign * trial.value))
    sound = [trial for trial in ranked if not _is_unstable(trial)] or ranked
    trials = [_trial_entry(trial, scale) for trial in ranked]
    failed = [trial for trial in ended if trial.state.name != "COMPLETE"]
    result: dict[str, Any] = {
        "statistic": search.statistic, "metric": search.settings.metric, "better": search.better,
        "unit": "%" if scale > 1 else "", "models": search.settings.models, "seeds": list(seeds), "finished": finished,
        "clients": min(map(len, held_out.values())), "by_client": None, "left_out": len(ranked) - len(sound),
        "failed": len(failed), "trials": trials, "diverged": [_trial_entry(trial, scale) for trial in failed]}
    chosen: Chosen | None = None
    if private is None and ranked:
        candidates = _candidates(search, sound, seeds, sign, folder)
        chosen = choose_simpler(candidates, _of_badness(search), _words(search), scale, STABLE if result["left_out"] else "")
        result["differences"] = [_difference_entry(one, sign, scale) for one in chosen.differences]
        result["reason"] = chosen.reason
        if result["clients"] < FEW_CLIENTS:
            both = candidates[chosen.chosen].values, candidates[chosen.best].values
            result["by_client"] = rows_of_held_out(held_out, *both, search.metrics[search.settings.metric], result["unit"])
    place = chosen.chosen if chosen is not None else 0
    result["warnings"] = [] if private is not None or not ranked else _warnings(search, ranked, failed, place, result["clients"])
    if private is not None:
        result["privacy"] = private.privacy_statement(begun)
        write_json(folder / "privacy.json", result["privacy"])
    write_json(folder / "trials.json", result)
    if private is not None and not finished:
        return {**result, "best": None, "file": str(folder / "best.toml")}
    if ranked:
        write_atomically(folder / "best.toml", tomli_w.dumps(search.experiment_with(ranked[place].params).as_table()))
    return {**result, "best": trials[place] if trials else None, "file": str(folder / "best.toml")}


def _trial_entry(trial: Any, scale: float) -> dict[str, Any]:
    """An optuna trial as a dict: settings, value, values by seed and their standard deviation (None for one seed).

    `unstable` is whether its loss ended far above that of the untrained model. `by_seed` is None for one of an earlier version.
    """
    by_seed = trial.user_attrs.get("by_seed")
    known = [one for one in by_seed or () if one is not None]
    return {"settings": trial.params, "value": None if trial.value is None else scale * trial.value,
            "by_seed": None if by_seed is None else [None if one is None else scale * one for one in by_seed],
            "std": scale * statistics.stdev(known) if len(known) > 1 and len(known) == len(by_seed) else None,
            "unstable": _is_unstable(trial)}


def _is_unstable(trial: Any) -> bool:
    """Whether the loss of an optuna trial ended far above that of the untrained model for one of its seeds."""
    return bool(trial.user_attrs.get("unstable", False))


def _warnings(search: Search, ranked: Sequence[Any], failed: Sequence[Any], place: int, clients: int) -> list[str]:
    """What to be careful of about the trial at position `place` of `ranked`: its own loss, edges, and neighbours that diverge.

    And, first, of a statistic that so few held-out `clients` do not have.
    """
    shaky = [trial for trial in ranked if _is_unstable(trial)]
    few = few_clients_text(search.statistic, clients, search.metrics[search.settings.metric])
    own = [*filter(None, [few]), *([UNSTABLE] if ranked[place] in shaky else [])]
    sound = [trial.params for trial in ranked if trial not in shaky]
    return own + search_warnings(search.space, ranked[place].params, sound, [trial.params for trial in (*shaky, *failed)])


def _candidates(search: Search, ranked: Sequence[Any], seeds: tuple[int, ...], sign: float, folder: Path) -> list[Candidate]:
    """The trials as candidates for the choice, in order: values of which larger are worse, those of single clients where kept."""
    shared = not search.first_experiment().data.follows & {"seed", "client.seed"}
    flipped = -1.0 if search.metrics[search.settings.metric] == "higher" else 1.0
    found = []
    for trial in ranked:
        by_seed = trial.user_attrs.get("by_seed") or [trial.value]
        found.append(Candidate(settings_words(trial.params), trial.params, tuple(sign * one for one in by_seed),
                               read_trial_values(folder, trial.number, seeds, flipped, shared)))
    return found if len({len(one.by_seed) for one in found}) == 1 else [_with_mean_only(one) for one in found]


def _with_mean_only(one: Candidate) -> Candidate:
    """A candidate without its values by seed, where some of the others lack theirs."""
    return Candidate(one.name, one.settings, (one.value,))


def settings_words(settings: Mapping[str, Any]) -> str:
    """Settings in words: "learning_rate = 0.1, tail_fraction = 0.5", by the last part of each field."""
    return ", ".join(f"{name.rpartition('.')[2]} = {f'{value:.4g}' if isinstance(value, float) else value}"
                     for name, value in settings.items())


def _words(search: Search) -> str:
    """What the search chooses by, in words: "p90 of the error"."""
    return statistic_words(search.statistic, search.settings.metric)


def _of_badness(search: Search) -> str:
    """The search's statistic as one of values of which larger are worse: p90 for p10 of a metric where higher is better."""
    return shown_statistic(search.statistic, search.metrics[search.settings.metric])


def _difference_entry(found: Difference, sign: float, scale: float) -> dict[str, Any]:
    """A difference to the best in the metric's own direction and unit; None for what is not known."""
    low, high = (found.low, found.high) if sign > 0 else (-found.high, -found.low)
    numbers = {"estimate": sign * found.estimate, "error": found.error, "low": low, "high": high}
    return {**{name: scale * value if math.isfinite(value) else None for name, value in numbers.items()}, "note": found.note}


def _display_scale(search: Search, population: Population) -> float:
    """The factor by which the search's statistic is multiplied for display: 100 for error rates, 10,000 for their variance, or 1.

    `population` tells whether the errors of the task are rates.
    """
    rates = search.settings.metric == "error" and gives_rates(search.first_experiment().task.make(0), population)
    return 100.0 ** (1 + (search.statistic == "variance")) if rates else 1.0
