"""Descriptions of populations against brute force, client by client."""

import json
import re
from io import StringIO

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytest import approx
from rich.console import Console

from fedtail.cli.data import render_description
from fedtail.data import Population
from fedtail.data import describe as describe_module
from fedtail.data.describe import describe

owners = st.lists(st.integers(0, 5), min_size=1, max_size=40)


def of(client, y, x=None, **more) -> Population:
    x = np.zeros((len(client), 2), np.float32) if x is None else x
    return Population.from_arrays(x, y, client, **more)


def printed(population: Population, name: str = "") -> str:
    page = StringIO()
    Console(width=100, file=page).print(render_description(describe(population, name)))
    return page.getvalue()


# counts and sizes

@given(owners)
def test_sizes_and_their_histogram_are_those_of_the_clients(client):
    about = describe(of(client, np.zeros(len(client), np.int64)))
    sizes = np.array([client.count(name) for name in sorted(set(client))])
    assert (about["clients"], about["examples"]) == (len(sizes), len(client))
    assert about["sizes"]["min"] == sizes.min()
    assert about["sizes"]["max"] == sizes.max()
    for key, share in (("p10", 10), ("median", 50), ("p90", 90)):
        assert about["sizes"][key] == approx(np.percentile(sizes, share))
    assert about["sizes"]["mean"] == approx(len(client) / len(sizes))
    for part in about["sizes"]["histogram"]:
        assert part["clients"] == sum(part["from"] <= size <= part["to"] for size in sizes)
    assert sum(part["clients"] for part in about["sizes"]["histogram"]) == len(sizes)
    assert about["largest"]["examples"] == client.count(about["largest"]["name"]) == sizes.max()
    assert about["largest"]["share"] == approx(sizes.max() / len(client))


def test_selected_clients_only_are_described():
    p = of([0, 0, 1, 1, 1, 2], [0, 1, 5, 6, 7, 1], np.arange(6.0)[:, None], group=[0, 3, 1])
    about = describe(p.select([2, 0]), "few")
    assert (about["name"], about["clients"], about["examples"], about["largest"]["name"]) == ("few", 2, 3, 0)
    assert about["targets"]["counts"] == {"0": 1, "1": 2}
    assert (about["inputs"]["x"]["min"], about["inputs"]["x"]["max"]) == (0.0, 5.0)
    assert about["groups"] == [1, 1]


def test_a_description_fits_in_json_and_prints():
    random = np.random.default_rng(0)
    client = random.integers(0, 30, 500)
    names = np.array([f"[bold]{k:02d}" for k in range(30)])[client]       # not to be taken for markup
    cases = [of(names, random.integers(0, 3, 500), random.normal(size=(500, 2)), group=np.arange(30) % 2),
             of(client, random.normal(size=500)), of(client, random.normal(size=(500, 3))),
             of(client, np.full(500, 2.5)), of([0], [1.0]),
             of(client, random.integers(0, 200, 500), {"a": random.normal(size=(500, 2)), "b": client}),
             Population.from_arrays([[1, 2], [3]], [[1, 2], [3]], [0, 1])]
    for population in cases:
        assert json.loads(json.dumps(describe(population), allow_nan=False)) == describe(population)
        assert "start from" in printed(population)
    text = printed(cases[0], "people [2024].npz")
    for part in ("people [2024].npz", "[bold]", "500", "3 classes (0 to 2)", "groups", "2, of 15, 15 clients",
                 "SoftmaxRegression(features=2, classes=3)", "in total variation", "█"):
        assert part in text
    assert "3 numbers for each example" in printed(cases[2])
    assert "all targets are equal" in printed(cases[3])
    assert "sequences of 1.5 positions on average, 3 classes (1 to 3), 1, 1, 1 of each" in " ".join(printed(cases[6]).split())


def test_every_client_is_in_a_bar():
    p = of(np.repeat(np.arange(1001), [1] * 1000 + [500]), np.zeros(1500, np.int64))
    lines = [line for line in printed(p).splitlines() if "█" in line]
    assert [int(line.split()[-1].replace(",", "")) for line in lines] == [1000, 1]
    assert [line.count("█") for line in lines] == [40, 1]


# how different clients are

@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-2, 4)), min_size=1, max_size=40))
def test_total_variation_and_single_labels_are_those_of_the_clients(pairs):
    client, label = (np.array(column) for column in zip(*pairs, strict=True))
    labels = sorted(set(label.tolist()))
    overall = np.array([(label == c).mean() for c in labels])
    own = [np.array([(label[client == k] == c).mean() for c in labels]) for k in sorted(set(client.tolist()))]
    about = describe(of(client, label))
    assert about["difference"]["total_variation"] == approx(np.mean([abs(p - overall).sum() / 2 for p in own]), abs=1e-12)
    assert about["difference"]["single_label"] == approx(np.mean([p.max() == 1 for p in own]))
    assert about["targets"]["counts"] == {str(c): int((label == c).sum()) for c in labels}
    assert (about["targets"]["kind"], about["targets"]["count"]) == ("classes", len(labels))


def test_shuffled_labels_differ_by_chance_only():
    random = np.random.default_rng(1)
    client = np.repeat(np.arange(200), 50)
    alike = describe(of(client, random.integers(0, 4, len(client))))["difference"]
    assert alike["total_variation"] == approx(alike["if_shuffled"], abs=0.02)
    apart = describe(of(client, client % 4))["difference"]
    assert apart == {"total_variation": 0.75, "if_shuffled": approx(alike["if_shuffled"], abs=0.02), "single_label": 1.0,
                     "labels_of_one": 0}


def test_positions_that_do_not_count_are_left_out():
    p = Population.from_arrays([[1.0]] * 4, [[5, 5], [5], [7, 7], []], [0, 0, 1, 2])
    about = describe(p)
    assert about["targets"] == {"kind": "sequences", "count": 2, "min": 5, "max": 7, "counts": {"5": 3, "7": 2},
                                "rarest": {"class": 7, "examples": 2, "share": 0.4}, "rare": 2,
                                "commonest": {"class": 5, "examples": 3, "share": 0.6}, "length": {"mean": 1.25, "max": 2}}
    assert about["difference"]["total_variation"] == approx((0.4 + 0.6) / 2)      # client 2 has no label to compare
    assert about["difference"]["single_label"] == 1.0
    with pytest.raises(ValueError, match="every target is -100, which losses ignore"):
        describe(of([0, 1], np.full((2, 3), -100)))


def variance_shares(client, y):
    """Between clients / total, and the intraclass correlation, from sums over clients one by one."""
    own = [y[client == k] for k in sorted(set(client.tolist()))]
    between = sum(len(part) * (part.mean() - y.mean()) ** 2 for part in own)
    within = sum(((part - part.mean()) ** 2).sum() for part in own)
    outer, inner = between / (len(own) - 1), within / (len(y) - len(own))
    typical = (len(y) - sum(len(part) ** 2 for part in own) / len(y)) / (len(own) - 1)
    return between / (between + within), (outer - inner) / (outer + (typical - 1) * inner)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-50, 50)), min_size=1, max_size=40))
def test_variance_between_clients_is_the_analysis_of_variance(pairs):
    client, y = (np.array(column) for column in zip(*pairs, strict=True))
    y = y + 1000.0
    about = describe(of(client, y))
    assert about["targets"] == {"kind": "numbers", "outputs": 1, "mean": approx(y.mean()), "std": approx(y.std()),
                                "min": y.min(), "max": y.max()}
    clients = len(set(client.tolist()))
    if len(set(y.tolist())) == 1:
        assert about["difference"] == {"variance_between": None, "intraclass_correlation": None}
    elif 1 < clients < len(y):
        shares = variance_shares(client, y)
        assert list(about["difference"].values()) == [approx(shares[0], abs=1e-9), approx(shares[1], abs=1e-9)]
    else:
        assert about["difference"]["intraclass_correlation"] is None


def test_the_intraclass_correlation_is_that_of_the_model():
    random = np.random.default_rng(2)
    client = np.repeat(np.arange(4000), random.integers(2, 6, 4000))
    y = random.normal(size=4000)[client] + 2 * random.normal(size=len(client))      # 1 / (1 + 4)
    assert describe(of(client, y))["difference"]["intraclass_correlation"] == approx(0.2, abs=0.05)
    two = describe(of(client, np.stack([y, random.normal(size=len(client))], axis=1)))
    assert two["targets"]["outputs"] == 2
    assert two["difference"]["intraclass_correlation"] == approx(0.1, abs=0.05)


# inputs, warnings, suggestions

def test_inputs_are_described_by_name(monkeypatch):
    monkeypatch.setattr(describe_module, "_BLOCK", 7)          # blocks of one to seven examples
    x = {"scan": np.arange(60.0, dtype=np.float32).reshape(5, 3, 4), "age": np.array([30, 20, 50, 40, 60]), "flag": [True] * 5,
         "nothing": np.zeros((5, 0))}
    about = describe(of([0, 1, 1, 2, 2], [0, 1, 0, 1, 0], x))
    assert about["inputs"] == {
        "scan": {"shape": [3, 4], "dtype": "float32", "min": 0.0, "max": 59.0},
        "age": {"shape": [], "dtype": "int64", "min": 20, "max": 60}, "flag": {"shape": [], "dtype": "bool", "min": 1, "max": 1},
        "nothing": {"shape": [0], "dtype": "float64", "min": 0.0, "max": 0.0}}
    assert about["suggested"] is None


@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 99))
def test_deviations_are_numpys(examples, block, seed):
    x = np.random.default_rng(seed).normal(5, [1e-3, 1, 1e4], (examples, 3))
    rows, step = torch.arange(examples), [slice(a, a + block) for a in range(0, examples, block)]
    assert describe_module._feature_deviations(torch.from_numpy(x), rows, step) == approx(x.std(0), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("population", "text"), [
    (lambda: of([0, 1, 1, 2], [0, 1, 0, 1]), "2 of 3 clients hold one example, which cannot be split within the client. Use population.at_least(2)"),
    (lambda: of(["a", "a", "a", "b", "b"], [0, 1, 0, 1, 0]), "client 'a' holds 60% of the examples, so an average over examples"),
    (lambda: of([0, 0, 1, 1], [-1, 1, 1, -1]), "labels are not 0 to 1: there are 2, from -1 to 1. In a file write classes = [-1, 1] below [data] (`fedtail init` does); in Python fedtail.data.with_classes."),
    (lambda: of([0, 0, 1, 1], [0, 3, 0, 1]), "labels are not 0 to 2: there are 3, from 0 to 3."),
    (lambda: of([0, 0, 1, 1], [4, 4, 4, 4]), "every label is 4: there is nothing to learn."),
    (lambda: of([0, 0, 1, 1], [0, 1, 0, 1], np.array([[0, 0, 7], [2000, 1, 7], [0, 0, 7], [2000, 1, 7]], np.float32)),
     "x is not scaled: feature 0 has standard deviation 1e+03, feature 1 has 0.5. Standardise the features"),
    (lambda: of([0, 0, 1, 1], [0, 1, 0, 1], {"pixels": np.full((4, 2), 200, np.uint8)}),
     "pixels holds bytes, 200 to 200, and weights are floats. Write pixels.astype('float32')."),
])
def test_warnings_say_what_to_do(population, text):
    found = describe(population())["warnings"]
    assert len(found) == 1
    assert found[0].startswith(text)
    assert text[:30] in " ".join(printed(population()).split())


def many(y, x=None, clients: int = 20):
    """So many targets, dealt out to the clients in turn, each with the same labels."""
    return of(np.arange(len(y)) // (len(y) // clients), np.asarray(y), x)


@pytest.mark.parametrize(("population", "text"), [
    (lambda: many(([0] * 9 + [1]) * 20), "class 0 has 90.0% of the targets: to always answer it is wrong in 10.0% only"),
    (lambda: many(([0, 1] * 30 + [2]) * 4, clients=4), "1 of 3 classes have fewer than 10 examples (class 2 has 4): hardly anything"),
    (lambda: many(np.eye(3, dtype=np.int64)[np.arange(60) % 3]), "y holds labels in one-hot form, 3 numbers for each example"),
    (lambda: many(np.arange(60) % 3.0), "y holds floats that are the whole numbers 0, 1, 2, and floats are learned as numbers"),
    (lambda: many([0, 1] * 30, np.arange(120).reshape(60, 2)), "x holds int64, which linear and convolutional layers refuse. If these"),
    (lambda: many([0, 1] * 30, np.zeros((60, 2), bool)), "x holds bool, which linear and convolutional layers refuse."),
    (lambda: of(np.arange(400) // 20, np.where(np.arange(400) < 15, 2, np.arange(400) % 2)), "1 of 3 classes are one client's alone"),
])
def test_warnings_of_imbalance_and_of_what_run_refuses(population, text):
    found = describe(population())["warnings"]
    assert [one[: len(text)] for one in found] == [text]


def test_whole_numbers_to_predict_are_described_as_the_floats_they_are():
    """Not as 400 classes of one example each, for which softmax regression was suggested."""
    prices = np.random.default_rng(0).permutation(np.arange(100_000, 500_000, 1000))
    about, floats = describe(many(prices)), describe(many(prices.astype(float)))
    assert {name: value for name, value in about.items() if name != "warnings"} == {name: value for name, value in floats.items() if name != "warnings"}
    assert about["suggested"] == {"part": "LeastSquares", "features": 2}
    assert [one[:48] for one in about["warnings"]] == ["y holds 400 different whole numbers in 400 examp"]


def test_many_whole_numbers_without_names_may_be_numbers():
    ages = np.minimum(np.random.default_rng(0).geometric(0.1, 4000), 40)
    [told] = [one for one in describe(many(ages))["warnings"] if "hardly anything is learned" in one]
    assert told.endswith("as ages and counts are, write targets = \"numbers\" below [data] of a file, y.astype('float32') in Python.")
    few = [one for one in describe(many(np.minimum(ages, 15) * (ages < 18)))["warnings"] if "hardly anything is learned" in one]
    assert not any("numbers to predict" in one for one in few)


def test_what_is_warned_of_is_refused_by_a_task():
    from fedtail import Task
    from fedtail.models import SoftmaxRegression
    for population in (many([0, 1] * 30, np.arange(120).reshape(60, 2)), many([0, 1] * 30, np.full((60, 2), 7, np.uint8)),
                       many(np.eye(2, dtype=np.int64)[np.arange(60) % 2], np.zeros((60, 2), np.float32))):
        with pytest.raises(ValueError, match=r"holds integers|one-hot"):
            Task(SoftmaxRegression(2, 2)).check(population)


# differences in features, and what data of this size can show

@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), min_size=12, max_size=60))
def test_feature_differences_are_total_variations_over_bins(pairs):
    client, feature = (np.array(column) for column in zip(*pairs, strict=True))
    found = describe(of(client, np.zeros(len(client)), feature[:, None].astype(np.float32)))["features"]["x"]
    edges = np.unique([np.sort(feature)[int(np.ceil(len(feature) * k / 10)) - 1] for k in range(1, 10)])
    bins = np.array([(value > edges).sum() for value in feature])
    def shares(values):
        return np.array([(values == b).mean() for b in range(len(edges) + 1)])
    wanted = np.mean([abs(shares(bins[client == k]) - shares(bins)).sum() / 2 for k in set(client.tolist())])
    assert found["total_variation"] == approx(wanted, abs=1e-12)
    assert (found["features"], found["compared"]) == (1, 1)


def test_features_that_differ_are_named_and_chance_is_not():
    random = np.random.default_rng(0)
    client = np.repeat(np.arange(100), 40)
    x = random.normal(size=(4000, 200)).astype("float32")
    alike = describe(of(client, np.zeros(4000), x))["features"]["x"]
    # 100 clients of 40 examples, 64 features: the mean of 6400 distances, each with a deviation below 0.05, to five deviations
    assert alike["total_variation"] == approx(alike["if_shuffled"], abs=5 * 0.05 / 80)
    assert (alike["features"], alike["compared"]) == (200, 64)
    x[:, 0] += client                                     # another mean at each client
    x[:, 199] *= 10.0 ** (client % 3)[:]                  # another spread, with the same mean
    apart = describe(of(client, np.zeros(4000), x))["features"]["x"]
    assert {one["feature"] for one in apart["most"][:2]} == {0, 199}
    assert apart["most"][0]["total_variation"] > 0.8
    assert "most in feature 0 (0." in " ".join(printed(of(client, np.zeros(4000), x)).split())


def test_conclusions_are_those_of_their_formulas():
    from scipy.stats import binom
    size = np.repeat(np.arange(150), 120)
    needs = describe(of(size, np.zeros(len(size), np.int64)))["needs"]
    assert needs["test_clients"] == 30
    assert 0.9 ** needs["for_promise"] <= 0.05 < 0.9 ** (needs["for_promise"] - 1)
    assert 1.96 * np.sqrt(0.25 / needs["examples"]) <= 0.1 < 1.96 * np.sqrt(0.25 / (needs["examples"] - 1))
    assert needs["clients_with_examples"] == 150
    for count in (needs["for_mean"], needs["for_worst"] / 10):
        assert count == approx(((1.96 + 0.84) * 0.1 / 0.05) ** 2, rel=0.05)
    draws = np.sort(binom.rvs(120, 0.2, size=200_000, random_state=0) / 120)[::-1]
    assert needs["floor"] == approx(draws[:20_000].mean(), abs=5 * draws[:20_000].std() / np.sqrt(20_000))
    assert "a fifth of these clients is 30" in " ".join(needs["sentences"])
    few = describe(of(size, np.zeros(len(size))).select(range(12)))["needs"]
    assert few["floor"] is None
    assert few["sentences"][0] == "12 clients are few for training on a tail, which should be 10 clients of a round. Look at each by name."
    some = describe(of(size, np.zeros(len(size))).select(range(22)))["needs"]
    assert some["sentences"][0].startswith("22 clients are few for training on a tail: the worst half of 18 training clients")


def test_few_clients_are_listed_by_name_and_nothing_is_a_share_of_them():
    from scipy.stats import binom
    client = np.repeat(["north", "south", "east", "west"], [20, 30, 40, 50])
    y = np.concatenate([np.zeros(20, np.int64), np.arange(120) % 3])
    about = describe(of(client, y))
    assert about["by_client"] == [{"name": str(name), "examples": int((client == name).sum()), "classes": len(set(y[client == name].tolist())),
                                   "counts": {str(c): int((y[client == name] == c).sum()) for c in range(3)}} for name in np.unique(client)]
    text = " ".join(printed(of(client, y)).split())
    for gone in ("percentile 2", "% of clients", "worst half", "a fifth of", "worst tenth of clients", "how many clients hold"):
        assert gone not in text
    assert "every client client examples class 0 class 1 class 2 east 40 14 13 13 north 20 20 0 0" in text
    assert "north has one label only" in text
    draws = binom.rvs(35, 0.2, size=(200_000, 4), random_state=0).max(1) / 35
    assert about["needs"]["floor"] == approx(draws.mean(), abs=5 * draws.std() / np.sqrt(200_000))
    assert f"the worst of 4 with 35 examples would show {about['needs']['floor']:.0%}" in text
    many = describe(of(np.arange(60) % 20, np.arange(60) % 3))
    assert many["by_client"] is None
    assert "10th and 90th percentile 3 and 3" in " ".join(printed(of(np.arange(60) % 20, np.arange(60) % 3)).split())


def test_few_clients_with_numbers_are_listed_with_their_means():
    client, y = np.repeat(["a", "b"], [3, 2]), np.array([1e5, 2e5, 3e5, 4e5, 6e5])
    assert [row["mean"] for row in describe(of(client, y))["by_client"]] == [2e5, 5e5]
    assert "a 3 200,000 b 2 500,000" in " ".join(printed(of(client, y)).split())
    assert [row["mean"] for row in describe(of(client, np.stack([y, y / 2], 1)))["by_client"]] == [[2e5, 1e5], [5e5, 2.5e5]]
    classes = describe(of(client, np.arange(5) * 7))["by_client"]
    assert [row["classes"] for row in classes] == [3, 2]
    wide = printed(of(np.arange(120) // 30, np.arange(120) % 12))
    assert "0 30 12 of 12" in " ".join(wide.split())


def test_the_features_that_differ_most_are_shown_by_what_they_differ_beyond_chance():
    """A feature of two values is closer to everybody's than one of many by chance alone: in order of what is shown, it comes first."""
    random = np.random.default_rng(0)
    client = np.repeat(np.arange(30), 20)
    x = np.stack([(random.random(600) < 0.25 + 0.5 * (client % 2)) * 1.0, random.normal(size=600) + 0.5 * random.normal(size=30)[client]], 1)
    found = describe(of(client, np.zeros(600), x))["features"]["x"]["most"]
    beyond = [one["total_variation"] - one["if_shuffled"] for one in found]
    assert beyond == sorted(beyond, reverse=True)
    assert [one["feature"] for one in found] == [0, 1]
    assert found[0]["total_variation"] < found[1]["total_variation"]
    shown = ", ".join(f"{one['feature']} ({more:.3f})" for one, more in zip(found, beyond, strict=True))
    assert f"beyond that most in feature {shown}" in " ".join(printed(of(client, np.zeros(600), x)).split())


def test_numbers_that_are_all_equal_teach_nothing():
    assert describe(of([0, 0, 1, 1], np.full(4, 2.5)))["warnings"] == ["every target is 2.5: there is nothing to learn."]


def test_many_classes_are_described():
    random = np.random.default_rng(0)
    y = np.minimum(random.geometric(0.002, 30_000), 5000)
    about = describe(of(np.arange(30_000) % 300, y))
    assert about["targets"]["commonest"]["examples"] == np.bincount(y).max()
    assert about["targets"]["rare"] == (np.bincount(y)[np.bincount(y) > 0] < 10).sum()
    assert "counts" not in about["targets"]
    assert f"1 to {np.bincount(y).max():,} of each" in " ".join(printed(of(np.arange(30_000) % 300, y)).split())
    owners = {label: len(set((np.flatnonzero(y == label) % 300).tolist())) for label in set(y.tolist())}
    assert about["difference"]["labels_of_one"] == sum(count == 1 for count in owners.values())


def test_sound_data_have_no_warnings():
    x = np.array([[0, 0, 7], [1000, 1, 7], [0, 0, 7], [1000, 1, 7]], np.float32)      # 1000 to 1 is still scaled
    assert describe(of([0, 0, 1, 1], [0, 1, 0, 1], x))["warnings"] == []


@pytest.mark.parametrize(("x", "y", "suggested"), [
    (np.zeros((6, 64), np.float32), [0, 1, 2, 0, 1, 2], {"part": "SoftmaxRegression", "features": 64, "classes": 3}),
    (np.zeros((6, 8, 8)), [0, 1, 0, 1, 0, 1], {"part": "LogisticRegression", "features": 64}),
    (np.zeros((6, 5)), [0.0, 1, 0, 1, 0, 1], {"part": "LeastSquares", "features": 5}),
    (np.zeros((6, 5)), np.zeros((6, 2)), {"part": "LeastSquares", "features": 5, "outputs": 2}),
    (np.zeros((6, 28, 28)), [0, 1, 2, 3, 4, 6], {"part": "ConvNet", "classes": 7, "channels": 1}),
    (np.zeros((6, 3, 28, 28), np.uint8), [0, 1] * 3, {"part": "ConvNet", "classes": 2, "channels": 3}),
    (np.zeros((6, 5)), [-1, 1] * 3, {"part": "LogisticRegression", "features": 5}),
    (np.zeros((6, 5)), [1, 2, 3] * 2, {"part": "SoftmaxRegression", "features": 5, "classes": 4}),
    (np.zeros((6, 5), np.int64), [0, 1] * 3, None),                    # tokens, perhaps
    (np.zeros(6), [0, 1] * 3, None),
    (np.zeros((6, 5)), [3] * 6, None),
    (np.zeros((6, 5)), np.zeros((6, 4), np.int64), None),
])
def test_a_suggested_model_takes_the_data(x, y, suggested):
    population = of([0, 0, 0, 1, 1, 1], np.asarray(y), x)
    about = describe(population)
    assert about["suggested"] == suggested
    if suggested and about["targets"].get("min", 0) >= 0:
        from fedtail import Task, models
        settings = {name: value for name, value in suggested.items() if name != "part"}
        inputs = torch.as_tensor(x).float()
        Task(getattr(models, suggested["part"])(**settings)).check(of([0, 0, 0, 1, 1, 1], np.asarray(y), inputs))


def test_nobody_cannot_be_described():
    with pytest.raises(ValueError, match=re.escape("this population has no clients, so there is nothing to describe")):
        describe(of([0], [0]).select([]))


def test_many_clients_cost_no_loop():
    clients = 300_000
    client = np.repeat(np.arange(clients), 2)
    about = describe(of(client, np.arange(2 * clients) % 7))
    assert about["clients"] == clients
    assert about["difference"]["single_label"] == 0.0
