"""Results as people look at them: one line, a table in a notebook, a data frame, and what is special about the worst clients."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedtail
import fedtail.metrics
from fedtail.evaluation import client_profiles
from fedtail.inference import noise_floor
from fedtail.models import LeastSquares, SoftmaxRegression


def labelled(shares: list[float], sizes: list[int], shift: float = 0.0) -> fedtail.Population:
    """Clients of two classes with these shares of class 1; the inputs of the last are moved in column 2."""
    made = np.random.default_rng(0)
    x = made.normal(size=(sum(sizes), 4)).astype("float32")
    client = np.repeat([f"site {k}" for k in range(len(sizes))], sizes)
    x[client == f"site {len(sizes) - 1}", 2] += shift
    y = np.concatenate([(np.arange(size) < share * size).astype(int) for share, size in zip(shares, sizes, strict=True)])
    return fedtail.Population.from_arrays(x, y, client)


def evaluated(population: fedtail.Population) -> fedtail.Evaluation:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = SoftmaxRegression(4, 2)
        torch.nn.init.normal_(next(module.parameters()))
    return fedtail.evaluate(module, population)


def test_reprs_are_one_short_line():
    population = labelled([0.5] * 9, [20] * 9)
    found = evaluated(population)
    assert re.fullmatch(r"Evaluation\(9 clients; loss [\d.]+ \(worst client: [\d.]+\), error [\d.]+ \(worst client: [\d.]+\)\)", repr(found))
    assert re.fullmatch(r"Evaluation\(20 clients; .* error [\d.]+ \(worst 10%: [\d.]+\)\)", repr(evaluated(labelled([0.5] * 20, [9] * 20))))
    trained = fedtail.train(fedtail.fedavg(4), fedtail.Task(SoftmaxRegression(4, 2)), population, rounds=2, progress=False)
    assert repr(trained) == "Trained(model SoftmaxRegression of 10 parameters, rounds 2, seed 0)"
    assert repr(found.error).startswith("Distribution(9 clients; mean ")
    assert f"worst client {float(found.error.values.max()):.4g}" in repr(found.error)      # a tenth of nine is no client
    both = fedtail.train(fedtail.Family((fedtail.fedavg(4), fedtail.delta_fl(0.5, 4))), fedtail.Task(SoftmaxRegression(4, 2)), population, rounds=2, progress=False)
    family = fedtail.evaluate_family(both, population, names=("all", "<tail>"))
    assert repr(family).startswith("FamilyEvaluation(2 models, error of each client's own pick: Distribution(9 clients;")
    assert f"<td>each client&#x27;s own pick</td><td>{family.chosen.mean():.4g}</td>" in family._repr_html_()
    assert repr(trained.history).startswith("History(2 rounds; last: round 2, cohort_size 4")


def test_a_repr_says_for_how_many_clients_a_metric_is_defined():
    population = labelled([0.0, 0.0, *[0.5] * 7], [20] * 9)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = fedtail.evaluate(SoftmaxRegression(4, 2), population, fedtail.Task(SoftmaxRegression(4, 2), metrics=[fedtail.metrics.roc_auc()]))
    assert re.search(r"error [\d.]+ \(worst client: [\d.]+\), roc_auc [\d.]+ \(worst client: [\d.]+, defined for 7 of 9\)\)$", repr(found))


def test_notebooks_get_tables():
    population = labelled([0.5] * 9, [20] * 9)
    found = evaluated(population)
    assert f"<td>error</td><td>{found.error.mean():.4g}</td>" in found._repr_html_()
    trained = fedtail.train(fedtail.fedavg(4), fedtail.Task(SoftmaxRegression(4, 2)), population, rounds=30, progress=False)
    text = trained._repr_html_()
    assert "<td>SoftmaxRegression of 10 parameters</td>" in text
    assert text.count("<tr>") == 3 + 1 + 11      # facts; the head, five first, a gap, five last rounds
    assert "<table>" in found.worst_clients(2)._repr_html_()


@pytest.mark.parametrize(("clients", "headings"), [(8, ("worst client",)), (30, ("p90", "worst10"))])
def test_tables_of_error_rates_have_their_noise_floor(clients, headings):
    """What noise_floor finds for the same clients, below the error and nothing else."""
    population = labelled([0.5] * clients, [20] * clients)
    found = evaluated(population)
    floors = {name: noise_floor(found.error.values, population.size, "p100" if name == "worst client" else name).floor for name in headings}
    head, *rows = found.table().split("\n\n")[0].splitlines()
    below = rows[[row.split("  ")[0] for row in rows].index("error") + 1]
    assert below.startswith("error, if all were alike  ")
    for name, floor in floors.items():
        end = re.search(rf"{name}\b", head).end()
        assert float(below[:end].split()[-1]) == pytest.approx(floor, abs=1e-4)
    assert [row.split("  ")[0] for row in rows].count("error, if all were alike") == len(rows) - 2 == 1
    html = found._repr_html_()
    cells = re.findall(r"<td>([^<]*)</td>", re.search("<tr><td>error, if all were alike</td>.*?</tr>", html)[0])
    assert [cell for cell in cells[1:] if cell] == [f"{floor:.4g}" for floor in floors.values()]


def test_tables_say_nothing_of_a_floor_that_is_not_known():
    population = labelled([0.5] * 30, [20] * 30)
    error = evaluated(population).error
    for other in (replace(error, mass=population.mass), replace(error, sizes=None), replace(error, rates=False),
                  replace(error, sizes=torch.ones(30)), replace(error, values=error.values + 0.01),
                  replace(error, values=error.values.clone().index_fill_(0, torch.tensor([3]), torch.nan))):
        assert "alike" not in fedtail.Evaluation({"error": other}).table() + fedtail.Evaluation({"error": other})._repr_html_()


def test_the_floor_of_a_table_takes_no_longer_for_many_clients():
    sizes = torch.randint(5, 60, (100_000,), generator=torch.Generator().manual_seed(0))
    error = fedtail.Distribution((sizes * 0.3).floor() / sizes, None, "lower", True, sizes)
    start = time.perf_counter()
    assert "if all were alike" in fedtail.Evaluation({"error": error}).table()
    assert time.perf_counter() - start < 5


def test_a_data_frame_has_a_row_for_each_client():
    pytest.importorskip("pandas")
    population = labelled([0.5] * 9, [20, 3] + [20] * 7)
    found = evaluated(population)
    frame = found.to_pandas()
    assert frame["client"].tolist() == population.names.tolist()
    assert frame["size"].tolist() == population.size.tolist()
    assert frame["error"].tolist() == found.error.values.tolist()
    some = found.of_clients(torch.tensor([3, 1])).to_pandas()
    assert (some["client"].tolist(), some["size"].tolist()) == (["site 3", "site 1"], [20, 3])


def test_without_pandas_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        evaluated(labelled([0.5] * 9, [20] * 9)).to_pandas()


def test_the_worst_clients_are_those_with_the_largest_errors_in_order():
    population = labelled([0.5] * 20, [20] * 20)
    found = evaluated(population)
    worst = found.worst_clients(5)
    order = np.argsort(-found.error.values.numpy(), kind="stable")[:5]
    assert [row["name"] for row in worst] == [f"{population.names[k]}" for k in order]
    assert [row["error"] for row in worst] == found.error.values[order].tolist()
    loss = found.worst_clients(3, "loss")
    assert [row["loss"] for row in loss] == sorted(found.loss.values.tolist(), reverse=True)[:3]
    assert loss.to_pandas()["loss"].tolist() == [row["loss"] for row in loss]
    with pytest.raises(KeyError, match="no metric 'auc'"):
        found.worst_clients(3, "auc")


def test_worst_is_lowest_where_higher_is_better_and_undefined_is_nobody():
    def auc(outputs, targets):
        scores, here = (outputs[:, 1] - outputs[:, 0]).numpy(), targets.numpy() == 1
        if here.all() or not here.any():
            return float("nan")
        return float((scores[here][:, None] > scores[~here][None]).mean())

    population = labelled([0.5] * 6 + [0.0], [20] * 7)
    module = SoftmaxRegression(4, 2)
    torch.nn.init.normal_(next(module.parameters()))
    found = fedtail.evaluate(module, population, fedtail.Task(module, metrics=(fedtail.Metric("auc", auc, "higher", "client"),)))
    worst = found.worst_clients(7, "auc")
    assert len(worst) == 6
    assert [row["auc"] for row in worst] == sorted(row["auc"] for row in worst)


def test_what_is_special_is_named_and_what_is_chance_is_not():
    population = labelled([0.5] * 7 + [0.95, 0.5], [40] * 7 + [40, 400], shift=1.5)
    profile = client_profiles(population, torch.arange(9), {})
    counts = Counter(population.targets.tolist())
    share = counts[1] / sum(counts.values())
    assert profile[7]["labels"] in (f"class 1: 95% (all {share:.0%})", f"class 0: 5% (all {1 - share:.0%})")
    assert [row["labels"] for k, row in enumerate(profile) if k != 7] == [""] * 8
    column = population.inputs[:, 2].double()
    gap = float((column[-400:].mean() - column.mean()) / column.std(correction=0))
    assert profile[8]["features"] == f"column 2: mean {gap:+.1f} sd from all"
    assert profile[8]["size"] == "400 (median 40)"


def test_clients_that_are_alike_are_rarely_called_special():
    """400 clients of one distribution: at a chance of 1 in 100 each, more than 12 is an event of probability below 0.001."""
    made = np.random.default_rng(5)
    x, y = made.normal(size=(400 * 50, 6)).astype("float32"), made.integers(0, 5, 400 * 50)
    population = fedtail.Population.from_arrays(x, y, np.repeat(np.arange(400), 50))
    profile = client_profiles(population, torch.arange(400), {})
    assert sum(bool(row["labels"]) for row in profile) <= 12
    assert sum(bool(row["features"]) for row in profile) <= 12


def test_numbers_dicts_and_constant_columns_are_taken():
    made = np.random.default_rng(2)
    x = {"a": made.normal(size=(60, 2)).astype("float32"), "still": np.ones((60, 1), "float32"), "token": np.ones((60, 3), "int64")}
    y = made.normal(size=60).astype("float32")
    y[:10] += 9
    x["a"][:10, 1] -= 9
    population = fedtail.Population.from_arrays(x, y, np.arange(60) // 10)
    profile = client_profiles(population, torch.arange(6), {})
    gap = (y[:10].mean(dtype="float64") - y.mean(dtype="float64")) / y.std(dtype="float64")
    assert profile[0]["labels"] == f"mean {gap:+.1f} sd from all"
    assert profile[0]["features"].startswith("column a 1: mean -")
    assert profile[3]["features"] == ""


def test_a_population_that_was_selected_is_described_by_its_own_clients():
    whole = labelled([0.1] * 5 + [0.9] * 5, [60] * 10)
    half = whole.select(range(5, 10))
    assert [row["labels"] for row in client_profiles(half, torch.arange(5), {})] == [""] * 5      # alike among themselves
    assert any(row["labels"] for row in client_profiles(whole, torch.arange(10), {}))


def test_an_evaluation_of_sums_knows_no_clients():
    population = fedtail.Population.from_arrays(np.random.default_rng(0).normal(size=(40, 3)).astype("float32"), np.zeros(40, "float32"), np.arange(40) // 4)
    trained = fedtail.train(fedtail.fedavg(5), fedtail.Task(LeastSquares(3)), population, rounds=1, progress=False,
                            evaluation=fedtail.FederatedEvaluation(loss_bound=8.0, error_bound=8.0, split="train"))
    [found] = trained.evaluation
    with pytest.raises(ValueError, match="knows statistics over clients only"):
        found.worst_clients(3)
    assert repr(found).startswith("Evaluation(")
    assert "<table>" in found._repr_html_()


def test_few_clients_are_shown_by_name_and_not_by_a_share_of_one():
    population = labelled([0.2, 0.5, 0.8], [20, 30, 40])
    population = replace(population, names=np.array(["north", "Zürich", "<b>"]))
    found = evaluated(population)
    head, clients = (part.splitlines() for part in found.table().split("\n\n"))
    assert not re.search("worst10|worst5|p90", found.table() + found._repr_html_())
    errors = dict(zip(["north", "Zürich", "<b>"], found.error.values.tolist(), strict=True))
    worst_first = sorted(errors, key=errors.get, reverse=True)
    assert [line.split()[0] for line in clients] == ["client", *worst_first]
    assert [line.split()[-1] for line in clients[1:]] == [f"{errors[name]:.4f}" for name in worst_first]
    assert head[2].split()[4:6] == [f"{max(errors.values()):.4f}", f"{min(errors.values()):.4f}"]
    assert "&lt;b&gt;" in found._repr_html_()
    assert "worst10" in evaluated(labelled([0.5] * 20, [9] * 20)).table()
    assert "\n\n" not in evaluated(labelled([0.5] * 20, [9] * 20)).table()
