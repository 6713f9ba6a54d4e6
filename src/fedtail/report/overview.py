"""What a page is about, the table of its methods, and its families of models with the clients' picks."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedtail.directions import better_statistic_values
from fedtail.report.client_errors import PageClients, client_column, column_by_seed
from fedtail.report.methods import SYMBOLS, TAIL_FRACTION, Method, MethodFamily, is_finished, tick_label
from fedtail.report.settings import end_dates, model_size_line
from fedtail.report.statistics import (
    STATISTICS,
    json_numbers,
    mean_and_std_over_seeds,
    paired_difference,
    quantile_classes,
    summary_statistics,
)
from fedtail.runs import RunFolder
from fedtail.runs.comparison import number_of_tested_clients
from fedtail.runs.diverged import constant_statistics
from fedtail.runs.evaluated_models import EvaluatedModel, metric_column, personal_sentences


def default_title(runs: Sequence[RunFolder]) -> str:
    """What a page about `runs` is called unless somebody says otherwise: "FedAvg and Delta-FL on digits".

    More than three methods are counted, not named; data that differ or have no name are left out.
    """
    names, data = list(dict.fromkeys(run.name for run in runs)), {str(run.about.get("data", "")) for run in runs}
    named = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    who = named if len(names) <= 3 else f"{len(names)} methods"
    where = data.pop() if len(data) == 1 else ""
    return f"{who} on {where}" if where else who


def header_facts(runs: Sequence[RunFolder]) -> dict[str, str]:
    """The facts in the page's header, by title: Experiment, Data, Clients, Model, Rounds and others, each as text.

    The experiment is the name of its file or, of runs of earlier versions that do not say it, that of the folder of all. Where
    runs differ, their texts are joined by semicolons; seeds are sorted and joined by commas. Privacy is left out where no
    run has a guarantee.
    """
    sizes = _join_distinct_texts(map(_split_sizes, runs))
    versions = _join_distinct_texts(", ".join(f"{k} {v}" for k, v in run.about.get("versions", {}).items()) for run in runs)
    return {"Experiment": _join_distinct_texts(str(run.about.get("file", "")) for run in runs) or _common_folder(runs),
            "Data": _join_distinct_texts(str(run.about.get("data", "")) for run in runs), "Clients": sizes,
            "Model": model_size_line(runs), "Rounds": _join_distinct_texts(map(_rounds_line, runs)),
            "Seeds": ", ".join(map(str, sorted({run.seed for run in runs}))),
            **({"Privacy": promised} if (promised := _join_distinct_texts(_privacy_line(run) for run in runs)) else {}),
            "Date": end_dates(runs), "Device": _join_distinct_texts(str(run.about.get("device", "")) for run in runs),
            "Versions": versions}


def _rounds_line(run: RunFolder) -> str:
    """How many rounds a run had, and of how many that were planned, where it ended early; those planned while it goes on."""
    planned = run.about["rounds"]
    done = run.result["round"] if run.is_finished else planned
    return str(done) if done >= planned else f"{done} of {planned}, ended early"


def _common_folder(runs: Sequence[RunFolder]) -> str:
    """The name of the folder that all runs are in, which is that of the experiment; "" where it holds them more than two deep."""
    common = Path(os.path.commonpath([run.path.resolve() for run in runs]))
    near = all(len(run.path.resolve().relative_to(common).parts) <= 2 for run in runs)
    return common.name if near else ""


def _split_sizes(run: RunFolder) -> str:
    """How many clients each split of the run has, as text: "40 train, 40 test"; under an attack also how many are benign."""
    benign = {split: f" ({count} benign)" for split, count in run.about.get("benign", {}).items()}
    return ", ".join(f"{count} {split.replace('_', '-')}{benign.get(split, '')}" for split, count in run.about["splits"].items())


def _privacy_line(run: RunFolder) -> str:
    """The run's name and its privacy guarantee in one line; "" where it has no guarantee."""
    return f"{run.name}: {run.privacy_line}" if run.privacy_line else ""


def caveats(runs: Sequence[RunFolder], clients: PageClients | None) -> list[str]:
    """Sentences that limit what the page shows: unfinished, attacked or deployed runs, personal models, differing clients.

    `clients` is None where no run has a table over clients.
    """
    found = [_unfinished_note(run) for run in runs if not is_finished(run)]
    found += [text for run in runs if run.is_deployed and (text := _deployed_note(run))]
    if clients is None and not any(run.is_deployed for run in runs):
        found.append("No run has a table over clients yet: only what is recorded round by round is shown.")
    if any("benign" in run.about for run in runs):
        found.append("Some clients were corrupted by a simulated attack: every statistic is over the benign ones.")
    found += personal_sentences(runs)
    if clients is not None and not clients.are_same_in_all_seeds:
        found.append("The seeds have different clients, or different examples of them, so a client is not averaged over seeds: "
                    "each is shown on its own, with its seed.")
    return found


def methods_table(methods: Sequence[Method], baseline: int, metric: str = "error", better: str = "lower") -> list[dict[str, Any]]:
    """One row for each method: the statistics of a metric over tested clients, over seeds and against the baseline.

    A row is a dict of `statistics`, `finished` (whether a run is), `round`, the last evaluated one, `diverged`, the seeds whose
    model is not finite, so that the row has no numbers, and `defined`, for how many clients the metric is defined ("" for all).
    `statistics` has, by name, a dict of `mean`, `std`, `seeds` (their number), `difference` to the baseline (paired by seed, or
    None) and `best`, which marks the best mean among two or more finished methods. `baseline` is a position in `methods`, and
    `better` values of the metric are "lower" or "higher" ones.
    """
    by_seed = [{run.seed: last_summary(run, m.model, metric, better) for run in m.averaged_runs} for m in methods]
    rows = [_method_row(m, by_seed[k], {} if k == baseline else by_seed[baseline], metric) for k, m in enumerate(methods)]
    for name in STATISTICS:
        whole = [row["statistics"][name]["mean"] for row in rows if row["finished"]]
        pick = min if better_statistic_values(name, better) == "lower" else max
        best = pick((value for value in whole if value is not None), default=None)
        for row in rows:
            mean = row["statistics"][name]["mean"]
            row["statistics"][name]["best"] = bool(row["finished"] and len(whole) > 1 and mean is not None and mean == best)
    return rows


def constant_cells(runs: Sequence[RunFolder], metric: str) -> dict[str, Any] | None:
    """The statistics of the constant prediction, by name a dict of `mean`, `std` and `seeds`, over the seeds of the runs.

    None where no run knows it.
    """
    known = {run.seed: found[metric] for run in runs if metric in (found := constant_statistics(run))}
    if not known:
        return None
    return {name: mean_and_std_over_seeds([one.get(name) for one in known.values()]) for name in STATISTICS}


def last_summary(run: RunFolder, model: EvaluatedModel, metric: str = "error", better: str = "lower") -> dict[str, float]:
    """The statistics of a metric over the tested clients at a run's last evaluated round, for one of its models.

    They are read from `metrics.jsonl`; those that it lacks are computed from the table over clients. NaN where there is neither.
    """
    line = (model.statistics(run.metrics[-1]).get(run.tested_split, {}) if run.metrics else {}).get(metric, {})
    found = {name: math.nan if line[name] is None else line[name] for name in STATISTICS if name in line}
    if len(found) < len(STATISTICS) and run.has_client_table:
        values = client_column(run, run.tested_split, model.member, model.column(metric))
        found = {**summary_statistics(values[np.isfinite(values)] if "defined" in line else values, better), **found}
    return {name: found.get(name, math.nan) for name in STATISTICS}


def _method_row(method: Method, mine: dict[int, dict[str, float]], baseline: dict[int, dict[str, float]],
                metric: str) -> dict[str, Any]:
    """The table row of a method, from its statistics by seed and the baseline's: a dict as `methods_table` says.

    `mine` and `baseline` have, by seed, a dict of statistics by name. `statistics` has, by name, `mean`, `std` and `seeds` over
    seeds, and the `difference` to the baseline over common seeds, None for fewer than two. For the baseline's own row pass {}.
    """
    diverged = method.diverged_seeds
    mine = {seed: dict.fromkeys(STATISTICS, math.nan) for seed in mine} if diverged else mine
    common = [seed for seed in mine if seed in baseline]
    statistics = {name: mean_and_std_over_seeds([numbers[name] for numbers in mine.values()]) for name in STATISTICS}
    for name, cell in statistics.items():
        cell["difference"] = paired_difference([mine[s][name] for s in common], [baseline[s][name] for s in common])
    last = max((run.metrics[-1]["round"] for run in method.averaged_runs if run.metrics), default=None)
    return {"statistics": statistics, "finished": bool(method.finished_runs), "round": last, "diverged": diverged,
            "defined": _defined_text(method, metric)}


def _defined_text(method: Method, metric: str) -> str:
    """ "defined for 19 of 20" where a metric is not defined for all tested clients of a method's runs, else "".

    Over several seeds it is the least number.
    """
    lines = [(run, method.model.statistics(run.metrics[-1]).get(run.tested_split, {}).get(metric, {}))
             for run in method.averaged_runs if run.metrics]
    few = [(int(line["defined"]), number_of_tested_clients(run)) for run, line in lines if line.get("defined") is not None]
    return "defined for {} of {}".format(*min(few)) if few else ""


def _unfinished_note(run: RunFolder) -> str:
    """A sentence that the run is not finished, which names the last evaluated round, or says that nothing was evaluated yet."""
    done = f"round {run.metrics[-1]['round']} of {run.about['rounds']}" if run.metrics else "before its first evaluation"
    return f"{run.name}, seed {run.seed}, is not finished ({done}); it joins no average of finished runs."


def _deployed_note(run: RunFolder) -> str:
    """A sentence that the errors of a deployed run are known as a histogram only, with its bin width, noise and cohort.

    "" where it has evaluated nothing yet.
    """
    about = next((line["members"][0][run.tested_split].get("error") for line in reversed(run.metrics) if line["members"]), None)
    if not about:
        return ""
    noise = f", and noise of standard deviation {about['noise']:.3g} in each count" if about.get("noise") else ""
    return (f"{run.name}, seed {run.seed}, ran on nodes that keep their data: of the errors of its clients a histogram is known, "
            f"with bins of width {about['resolution']:.3g}{noise}. Percentiles and tails are exact to a bin. Each evaluation is "
            f"over one cohort, the last over {about['clients']:.0f} of {run.about['splits'][run.tested_split]} clients.")


def _join_distinct_texts(texts: Iterable[str]) -> str:
    """The distinct non-empty texts, in the order they first occur, joined by semicolons; "" where there is none."""
    return "; ".join(dict.fromkeys(text for text in texts if text))


def family_slider(family: MethodFamily, methods: Sequence[Method]) -> dict[str, Any]:
    """The data of the page's slider over the models of a family, as a dict.

    `name` is the family's; `methods` are the positions of its models in `methods`, `ticks` their labels; `symbol` is that of the
    field they differ in ("" for none), and `tail` whether that is the tail fraction.
    """
    return {"name": family.name, "methods": list(family.order), "ticks": [tick_label(methods[k].value) for k in family.order],
            "symbol": SYMBOLS.get(family.field, family.field) if family.field else "", "tail": family.field == TAIL_FRACTION}


def model_choice(members: Sequence[Method], clients: PageClients, percent: bool, metric: str = "error",
                 better: str = "lower") -> dict[str, Any] | None:
    """How many clients picked each model of a family, its `members`, by one half of their examples, and how it did on the other.

    A dict: `counts` by model; the numbers of `clients` and `seeds`; `judged`, the statistics of the metric for each model, and
    `own`, those where each client uses the model it picked; `by_error` and `by_size`, the picks by class of clients (by the
    metric under the last model, and by size). Clients without a finite value under every model are left out. None where no client
    picked by this metric. With `percent`, classes are labelled in percent.
    """
    picks = [column_by_seed(m, clients, metric_column("picks", metric)) for m in members]   # of each member: seed -> (clients,)
    judged = [column_by_seed(m, clients, metric_column("judged", metric)) for m in members]
    seeds = [seed for seed in picks[0] if np.isfinite(picks[0][seed]).any()]
    if not seeds:
        return None
    chosen = {seed: np.stack([p[seed] for p in picks]) for seed in seeds}            # (members, clients)
    errors = {seed: np.stack([j[seed] for j in judged]) for seed in seeds}
    own = {seed: np.nansum(np.where(chosen[seed] == 1, errors[seed], 0), 0) for seed in seeds}
    clean = {seed: np.isfinite(errors[seed]).all(0) & (np.nansum(chosen[seed], 0) == 1) for seed in seeds}
    which = np.concatenate([chosen[s][:, clean[s]].argmax(0) for s in seeds])
    widest = np.concatenate([errors[s][-1, clean[s]] for s in seeds])
    sizes = np.concatenate([clients.sizes[clean[s]] for s in seeds])
    return {
        "counts": np.bincount(which, minlength=len(members)).tolist(), "clients": len(which), "seeds": len(seeds),
        "judged": [_summary_over_seeds([errors[s][k, clean[s]] for s in seeds], better) for k in range(len(members))],
        "own": _summary_over_seeds([own[s][clean[s]] for s in seeds], better),
        "by_error": _shares_by_class(which, widest, 5, len(members), "{:.0f}%" if percent else "{:.3g}", 100 if percent else 1),
        "by_size": _shares_by_class(which, sizes, 4, len(members), "{:,.0f}", 1),
    }


def _summary_over_seeds(values: Sequence[np.ndarray], better: str) -> dict[str, Any]:
    """The statistics of a metric over clients, by name, each as a dict of `mean`, `std` and `seeds` over seeds.

    `values` has one array, (clients,), per seed; `seeds` is the number of finite values.
    """
    each = [summary_statistics(v, better) for v in values]
    return {name: mean_and_std_over_seeds([numbers[name] for numbers in each]) for name in STATISTICS}


def _shares_by_class(which: np.ndarray, by: np.ndarray, parts: int, members: int, show: str, scale: float) -> dict[str, Any]:
    """The share of clients that picked each model, in each of at most `parts` classes of clients, cut at quantiles of `by`.

    A dict: `labels` and `clients` (the number) of the classes, and `shares`, a list over classes for each of `members`
    models. `which` is the model each client picked; `show` and `scale` format the labels.
    """
    labels, of_class = quantile_classes(by, parts, show, scale)
    counts = np.zeros((len(labels), members))
    np.add.at(counts, (of_class, which), 1)
    return {"labels": labels, "clients": counts.sum(1).astype(int).tolist(),
            "shares": [json_numbers(column) for column in (counts / counts.sum(1, keepdims=True)).T]}
