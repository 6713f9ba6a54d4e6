"""What a population holds and how different its clients are, as numbers that fit in a json file."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedtail.data.class_names import FEW_CLASSES, are_whole_numbers_to_predict, classes_to_list
from fedtail.data.conclusions import data_needs
from fedtail.data.feature_differences import feature_difference
from fedtail.data.few_clients import list_few_clients
from fedtail.data.population import Population
from fedtail.draws import named_generator
from fedtail.losses import IGNORED

MOST_CLASSES = 100        # with more classes than this, their counts are left out
FEW_EXAMPLES = 10            # below which a class is hardly learned
MOSTLY = 0.8                 # the share of a class from which on an error rate says little
UNSCALED = 1e3               # a ratio of standard deviations that one step size cannot serve
_BLOCK = 1 << 22             # numbers read at once
_SIDE = 28                   # what ConvNet takes


class Spread(NamedTuple):
    """The range of some values, and for vectors the standard deviation of each feature."""

    low: float
    high: float
    deviation: np.ndarray | None        # (features,)


def describe(population: Population, name: str = "") -> dict[str, Any]:
    """A report on a population, a dict of values that fit in a json file: how large it is, and how different its clients are.

    Its entries: `name`, `clients` and `examples` (counts), `sizes` (a summary of the clients' numbers of examples), `largest`
    (the client with the most), `by_client` (each of fewer than 20 clients, see `list_few_clients`, else None), `inputs` (shape,
    dtype and range of each), `targets` (kind and range), `difference` (in targets), `features` (differences in each input, see
    `feature_difference`), `needs` (how many clients and examples conclusions need, see `data_needs`), `groups` (the number of
    clients in each group, or None), `warnings` (sentences) and `suggested` (a model to start from, or None). Under
    `difference`, for classes: `total_variation`, the mean over clients of the distance between a client's label proportions and
    those of all clients, in [0, 1), `if_shuffled`, this distance with labels dealt out at random (small clients differ by
    chance), `single_label`, the share of clients with one label only, and `labels_of_one`, how many labels one client alone
    has. For numbers: `variance_between`, the share of the variance that lies between clients, and `intraclass_correlation`, its
    estimate free of the clients' sizes (one-way analysis of variance). Raises ValueError without clients.

    >>> population = Population.from_arrays([[0.], [1.], [2.], [3.]], [0, 0, 1, 1], client=["a", "a", "b", "b"])
    >>> describe(population)["difference"]["total_variation"], describe(population)["suggested"]
    (0.5, {'part': 'LogisticRegression', 'features': 1})
    """
    if not len(population):
        raise ValueError("this population has no clients, so there is nothing to describe. Were all filtered out?")
    owner, rows = population.example_clients_and_rows()
    parts = population.inputs if isinstance(population.inputs, dict) else {"x": population.inputs}
    alone = not isinstance(population.inputs, dict)
    spreads = {key: _value_spread(values, rows) for key, values in parts.items()}
    inputs = {key: {"shape": list(values.shape[1:]), "dtype": str(values.dtype).removeprefix("torch."),
                    "min": spreads[key].low, "max": spreads[key].high} for key, values in parts.items()}
    wanted = population.targets[rows]
    warned = _target_form_warnings(population, wanted)
    if wanted.is_floating_point() or are_whole_numbers_to_predict(wanted):
        wanted = wanted.double()
    flat, real = _flat_targets(wanted.numpy())
    targets, difference = _describe_targets(owner.numpy(), flat, real, wanted.ndim, len(population))
    targets |= {} if population.classes is None else {"names": list(population.classes)}
    names = population.columns if alone else None
    features = {key: feature_difference(values, rows, owner, len(population), names) for key, values in parts.items()}
    about = {
        "name": name, "clients": len(population), "examples": population.num_examples,
        "sizes": _size_summary(population.size.numpy()), "largest": _largest_client(population),
        "by_client": list_few_clients(population, owner.numpy(), flat, real), "inputs": inputs,
        "targets": targets, "difference": difference, "features": features,
        "needs": data_needs(population.size.numpy(), targets["kind"] != "numbers"),
        "groups": None if population.group is None else np.bincount(population.group.numpy()).tolist(),
    }
    warnings = [*_client_warnings(population, about), *_input_warnings(inputs, spreads, alone, population.columns),
                *_counter_warnings(population, rows), *_target_warnings(targets), *warned, *_imbalance_warnings(targets)]
    return {**about, "warnings": warnings,
            "suggested": _suggest_model(inputs["x"], targets) if alone else None}


def _size_summary(size: np.ndarray) -> dict[str, Any]:
    """A dict on the clients' sizes: `min`, `p10`, `median`, `p90` and `max`, `mean`, and a `histogram`.

    The histogram is a list of at most ten bins of growing width, each a dict of `from`, `to` (inclusive) and `clients`.
    """
    low, tenth, median, ninetieth, high = np.quantile(size, [0, 0.1, 0.5, 0.9, 1]).tolist()
    most_bins = min(10, math.ceil(2 * math.sqrt(len(size))))
    edges = np.unique(np.rint(np.geomspace(low, high + 1, most_bins + 1)).astype(np.int64))
    counts = np.histogram(size, edges)[0]
    bins = [{"from": int(a), "to": int(b) - 1, "clients": int(n)} for a, b, n in zip(edges, edges[1:], counts, strict=False)]
    return {"min": int(low), "p10": tenth, "median": median, "p90": ninetieth, "max": int(high), "mean": float(size.mean()),
            "histogram": bins}


def _largest_client(population: Population) -> dict[str, Any]:
    """A dict on the population's client with the most examples: `name`, `examples` (their number), and its `share` of all.

    The name is the client's position where there are no names.
    """
    client = int(population.size.argmax())
    examples = int(population.size[client])
    name = client if population.names is None else np.asarray(population.names[client]).item()
    return {"name": name, "examples": examples, "share": examples / population.num_examples}


def _value_spread(values: Tensor, rows: Tensor) -> Spread:
    """The smallest and largest value of `values` in the given `rows`, row numbers (rows,), as a `Spread`.

    Where rows are float vectors its `deviation` is the standard deviation of each feature, else None. Values are read in blocks,
    so that mapped data stay on disk. Both ends are 0 where rows have no entries.
    """
    if not values[0].numel():
        return Spread(0.0, 0.0, None)
    step = max(1, _BLOCK // values[0].numel())
    blocks = [slice(begin, begin + step) for begin in range(0, len(rows), step)]
    ranges = [values[rows[block]].aminmax() for block in blocks]
    features = values.is_floating_point() and values.ndim == 2
    return Spread(min(low.item() for low, _ in ranges), max(high.item() for _, high in ranges),
                  _feature_deviations(values, rows, blocks) if features else None)


def _feature_deviations(values: Tensor, rows: Tensor, blocks: list[slice]) -> np.ndarray:
    """The standard deviation of each feature over the given rows of `values`, (features,) float64.

    `blocks` are slices of `rows` to read at once. It is exactly zero where a feature never changes, since the first row is
    subtracted from all.
    """
    origin = values[rows[0]].double()
    total, square = torch.zeros_like(origin), torch.zeros_like(origin)
    for block in blocks:
        moved = values[rows[block]].double() - origin
        total, square = total + moved.sum(0), square + moved.square().sum(0)
    return (square / len(rows) - (total / len(rows)).square()).clamp(min=0).sqrt().numpy()


def _flat_targets(targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`targets` as (examples, outputs), and which of them are real: not padding, -100 among classes or NaN among numbers.

    Raises ValueError where there is nothing but padding.
    """
    flat = targets.reshape(len(targets), -1)
    padding = np.isnan(flat) if targets.dtype.kind == "f" else flat == IGNORED
    real = ~padding | (targets.ndim == 1)                      # (examples, outputs)
    if not real.any():
        raise ValueError(f"every target is {flat[0, 0]}, which losses ignore, so there is nothing to learn. Check how y was "
                         "padded.")
    return flat, real


def _describe_targets(owner: np.ndarray, flat: np.ndarray, real: np.ndarray, dimensions: int,
                      clients: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entries `targets` and `difference` of `describe`, two dicts: what is to be predicted, and how clients differ in it.

    `owner` is the client of each example, out of `clients`; `flat` are the targets and `real` those that are no padding, both
    (examples, outputs). `dimensions` is that of the targets as they came.
    """
    if flat.dtype.kind == "f":
        kept = flat[real]
        about = {"kind": "numbers", "outputs": flat.shape[1], "mean": float(kept.mean()), "std": float(kept.std()),
                 "min": float(kept.min()), "max": float(kept.max())}
        return about, _number_difference(owner, flat, real, clients)
    labels, which = np.unique(flat[real], return_inverse=True)
    owner = np.broadcast_to(owner[:, None], flat.shape)[real]
    return _label_summary(labels, which, dimensions, real), _label_difference(owner, which, clients)


def _label_summary(labels: np.ndarray, which: np.ndarray, dimensions: int, real: np.ndarray) -> dict[str, Any]:
    """The entry `targets` of `describe` for classes, a dict: `kind`, the number of classes `count`, `min` and `max`.

    Also `counts` by class where there are at most 100 classes; `rarest` and `commonest`, a class with the fewest and one with
    the most examples, each with their number; `rare`, how many classes have fewer than ten. `dimensions` is that of the
    targets: with more than one they are sequences, and the mean and maximal `length` are added. `labels` are the sorted
    classes, `which` the position in them of each target, `real` says which targets are no padding, (examples, outputs).
    """
    about: dict[str, Any] = {"kind": "classes" if dimensions == 1 else "sequences", "count": len(labels),
                             "min": int(labels[0]), "max": int(labels[-1])}
    counts = np.bincount(which)
    if len(labels) <= MOST_CLASSES:
        about["counts"] = {str(label): int(n) for label, n in zip(labels.tolist(), counts, strict=True)}
    for name, place in (("rarest", counts.argmin()), ("commonest", counts.argmax())):
        about[name] = {"class": int(labels[place]), "examples": int(counts[place]), "share": float(counts[place] / counts.sum())}
    about["rare"] = int((counts < FEW_EXAMPLES).sum())
    if dimensions > 1:
        about["length"] = {"mean": float(real.sum(1).mean()), "max": int(real.sum(1).max())}
    return about


def _label_difference(owner: np.ndarray, label: np.ndarray, clients: int) -> dict[str, float]:
    """The entry `difference` of `describe` for classes: how far clients' label proportions are from those of all clients.

    `total_variation` is the mean distance, `if_shuffled` that after shuffling the labels (always in the same way),
    `single_label` the share of clients with one label only, and `labels_of_one` the number of labels that one client alone has.
    `owner` and `label` are the client and the class of each target.
    """
    distance, distinct = _label_distances_and_counts(owner, label, clients)
    shuffled, _ = _label_distances_and_counts(owner, named_generator(0, "describe").permutation(label), clients)
    pairs = np.unique(owner * (label.max() + 1) + label)
    return {"total_variation": float(distance.mean()), "if_shuffled": float(shuffled.mean()),
            "single_label": float((distinct == 1).mean()),
            "labels_of_one": int((np.bincount(pairs % (label.max() + 1)) == 1).sum()) if clients > 1 else 0}


def _label_distances_and_counts(owner: np.ndarray, label: np.ndarray, clients: int) -> tuple[np.ndarray, np.ndarray]:
    """Each client's distance (total variation) to the label proportions of all clients, and its number of distinct labels.

    Two arrays, without the clients that have no labels. `owner` and `label` are the client and the class of each target. Only
    the pairs (client, label) that occur take memory: sum_c |p_kc - p_c| is one plus the sum over them of |p_kc - p_c| - p_c.
    """
    held = np.bincount(owner, minlength=clients)
    overall = np.bincount(label) / len(label)
    pair, count = np.unique(owner * len(overall) + label, return_counts=True)
    who, what = np.divmod(pair, len(overall))
    gap = np.abs(count / held[who] - overall[what]) - overall[what]
    distance = (1 + np.bincount(who, gap, clients)) / 2
    return distance[held > 0].clip(min=0), np.bincount(who, minlength=clients)[held > 0]


def _number_difference(owner: np.ndarray, values: np.ndarray, real: np.ndarray, clients: int) -> dict[str, float | None]:
    """The entry `difference` of `describe` for numbers: `variance_between` and `intraclass_correlation`, means over the outputs.

    Each is None where it is undefined for every output: nothing varies or, for the second, no client has two examples. `owner` is
    the client of each example, out of `clients`, and `real` says which entries of `values`, (examples, outputs), are no padding.
    """
    shares = [_variance_between_clients(owner[real[:, k]], values[real[:, k], k], clients)
              for k in range(values.shape[1]) if real[:, k].any()]
    names = ("variance_between", "intraclass_correlation")
    known = {name: [value for share in shares if (value := share[k]) is not None] for k, name in enumerate(names)}
    return {name: float(np.mean(found)) if found else None for name, found in known.items()}


def _variance_between_clients(owner: np.ndarray, values: np.ndarray, clients: int) -> tuple[float | None, float | None]:
    """The share of the variance of `values` that lies between clients, in [0, 1], and the intraclass correlation.

    `owner` is the client of each value. Both are None where nothing varies; the second also where there is one client, or
    every client has one value.
    """
    held = np.bincount(owner, minlength=clients)
    centred = values - values.mean()
    mean = np.bincount(owner, centred, clients) / held.clip(min=1)
    between, within = held @ mean**2, ((centred - mean[owner]) ** 2).sum()
    present, count = (held > 0).sum(), len(values)
    if between + within == 0:
        return None, None
    if present < 2 or present == count:
        return float(between / (between + within)), None
    typical = (count - (held @ held) / count) / (present - 1)        # the size that equal clients would have
    outer, inner = between / (present - 1), within / (count - present)
    return float(between / (between + within)), float((outer - inner) / (outer + (typical - 1) * inner))


def _client_warnings(population: Population, about: dict[str, Any]) -> list[str]:
    """Warnings as sentences: that clients with one example cannot be split, and that one client holds more than half of all.

    `population` gives the sizes of the clients; `about` is the report on it, of which `largest` is read.
    """
    found, single, largest = [], int((population.size == 1).sum()), about["largest"]
    alone = about["difference"].get("labels_of_one", 0)
    if len(population) >= FEW_EXAMPLES and alone:
        found.append(f"{alone} of {about['targets']['count']} classes are one client's alone: where it is a test client, nobody "
                     "learns them. Split the examples of each client, within = 0.2, or leave these classes out.")
    if single:
        found.append(f"{single} of {len(population)} clients hold one example, which cannot be split within the client. Use "
                     "population.at_least(2), or split by client.")
    if largest["share"] > 0.5:
        found.append(f"client {largest['name']!r} holds {largest['share']:.0%} of the examples, so an average over examples is "
                     "mostly about it. Pass mass= to weight clients equally, or divide it.")
    return found


def _input_warnings(inputs: dict[str, Any], spreads: dict[str, Spread], alone: bool,
                    columns: tuple[str, ...] | None = None) -> list[str]:
    """Warnings as sentences: that inputs are no floats, and that features have deviations which differ more than 1000-fold.

    Both tables are by name of the input: `inputs` the report's entries, of which shape and dtype are read, `spreads` the range of
    its values and the deviations of its features. `alone` says that there is one input, whose features may have names, `columns`.
    """
    found = []
    for name, spread in spreads.items():
        kind = inputs[name]["dtype"]
        if kind == "uint8":
            pixels = len(inputs[name]["shape"]) > 1 or spread.high == 255
            scale = "{ scale = 255.0 }" if pixels else '"columns"'
            found.append(f"{name} holds bytes, {spread.low:g} to {spread.high:g}, and weights are floats. Write "
                         f"{name}.astype('float32'){', and / 255 for pixels' if pixels else ''}."
                         + (f" A file does it with scale = {scale} below [data]." if alone else ""))
        elif alone and inputs[name]["shape"] and not kind.startswith(("float", "bfloat")):
            found.append(f"{name} holds {kind}, which linear and convolutional layers refuse. If these are features and not "
                         f"tokens, write {name}.astype('float32'); in a file, scale = \"columns\" makes them floats.")
        if spread.deviation is None or not (spread.deviation > 0).any():
            continue
        varying = np.flatnonzero(spread.deviation > 0)
        small, large = (varying[pick(spread.deviation[varying])] for pick in (np.argmin, np.argmax))
        called = columns or range(len(spread.deviation))
        if spread.deviation[large] > UNSCALED * spread.deviation[small]:
            found.append(f"{name} is not scaled: feature {called[large]} has standard deviation {spread.deviation[large]:.3g}, "
                         f"feature {called[small]} has {spread.deviation[small]:.3g}. Standardise the features: "
                         "Scaling.fit(train), in a file scale = \"columns\" below [data].")
    return found


def _counter_warnings(population: Population, rows: Tensor) -> list[str]:
    """Warnings as sentences: that a named column numbers the examples, as an id does; `rows` are those of all examples."""
    if population.columns is None or isinstance(population.inputs, dict) or len(rows) < FEW_EXAMPLES:
        return []
    values, found = population.inputs[rows], []
    low, high = values.aminmax(dim=0)
    for k in (high - low == len(rows) - 1).nonzero().flatten().tolist():
        if torch.equal(values[:, k].sort().values.double(), low[k].double() + torch.arange(len(rows), dtype=torch.float64)):
            found.append(f"column {population.columns[k]} numbers the examples from {low[k]:g} to {high[k]:g}, as an id does, "
                         "and says nothing of new ones. Leave it out of x.")
    return found


def all_equal_text(targets: dict[str, Any]) -> str:
    """That there is nothing to learn, where all labels, or all numbers, are equal; else "". `targets` is the report's entry."""
    numbers = targets["kind"] == "numbers"
    if (targets["min"] != targets["max"]) if numbers else targets["count"] > 1:
        return ""
    value = targets["min"] if numbers else _class_name(targets, targets["min"])
    return f"every {'target' if numbers else 'label'} is {value}: there is nothing to learn."


def one_hot_text(targets: np.ndarray) -> str:
    """That `targets`, (examples, ...), are labels in one-hot form, and what to write; "" for others.

    >>> one_hot_text(np.eye(2)), one_hot_text(np.ones((2, 2)))
    ('y holds labels in one-hot form, 2 numbers for each example with a single 1. Write y.argmax(1).', '')
    """
    if targets.ndim == 2 and targets.shape[1] > 1 and np.isin(targets, (0, 1)).all() and (targets.sum(1) == 1).all():
        return f"y holds labels in one-hot form, {targets.shape[1]} numbers for each example with a single 1. Write y.argmax(1)."
    return ""


def _target_warnings(targets: dict[str, Any]) -> list[str]:
    """Warnings as sentences: that all labels or numbers are equal, or that labels are not 0, 1, ... without gaps.

    `targets` is the report's entry on the targets.
    """
    if nothing := all_equal_text(targets):
        return [nothing]
    if targets["kind"] == "numbers":
        return []
    count, low, high = targets["count"], targets["min"], targets["max"]
    if (low, high) != (0, count - 1):
        return [f"labels are not 0 to {count - 1}: there are {count}, from {low} to {high}. In a file write "
                f"{_classes_line(targets)} below [data] (`fedtail init` does); in Python fedtail.data.with_classes."]
    return []


def _classes_line(targets: dict[str, Any]) -> str:
    """The line of a file that lists classes, as far as there are few: "classes = [-1, 1]"."""
    labels = list(targets.get("counts", ()))
    return f"classes = [{', '.join(labels)}]" if 0 < len(labels) <= FEW_CLASSES else "classes = [...], a list of all labels,"


def _target_form_warnings(population: Population, targets: np.ndarray | Tensor) -> list[str]:
    """Warnings as sentences: that labels are in one-hot form, are floats and so would be learned as numbers, or are numbers.

    `targets` are (examples, ...) as the population holds them.
    """
    values = np.asarray(targets)
    if are_whole_numbers_to_predict(torch.as_tensor(values)):
        return [f"y holds {len(np.unique(values))} different whole numbers in {len(values)} examples: they are described as "
                "numbers to predict, but whole numbers are learned as classes. Write targets = \"numbers\" below [data] of a "
                "file (`fedtail init` does), y.astype('float32') in Python."]
    if one_hot := one_hot_text(values):
        return [one_hot]
    listed = classes_to_list(population) if values.dtype.kind == "f" else None
    if listed is not None:
        some = ", ".join(map(str, listed[:3])) + (" ..." if len(listed) > 3 else "")
        return [f"y holds floats that are the whole numbers {some}, and floats are learned as numbers, by squared "
                "error. If they are classes, write y.astype('int64'); in a file "
                f"classes = {listed} (`fedtail init` does)."]
    return []


def _imbalance_warnings(targets: dict[str, Any]) -> list[str]:
    """Warnings as sentences: that one class has most of the examples, or that many classes have few; none for numbers."""
    if targets["kind"] == "numbers" or targets["count"] == 1:
        return []
    found, most = [], targets["commonest"]
    called = {targets[end]["class"]: _class_name(targets, targets[end]["class"]) for end in ("rarest", "commonest")}
    if most["share"] > MOSTLY:
        found.append(f"class {called[most['class']]} has {most['share']:.1%} of the targets: to always answer it is wrong in "
                     f"{1 - most['share']:.1%} only, so an error rate says little. Report balanced accuracy or the AUC too.")
    examples = sum(targets["counts"].values()) if "counts" in targets else FEW_EXAMPLES * targets["count"]
    if targets["rare"] and examples >= FEW_EXAMPLES * targets["count"]:
        found.append(f"{targets['rare']} of {targets['count']} classes have fewer than {FEW_EXAMPLES} examples (class "
                     f"{called[targets['rarest']['class']]} has {targets['rarest']['examples']}): hardly anything "
                     f"is learned of them.{_perhaps_numbers(targets)}")
    return found


def _perhaps_numbers(targets: dict[str, Any]) -> str:
    """What to write where more than twenty classes without names may be numbers to predict, as ages and counts are; else ""."""
    if "names" in targets or targets["count"] <= FEW_CLASSES:
        return ""
    return (" If they are numbers to predict, as ages and counts are, write targets = \"numbers\" below [data] of a file, "
            "y.astype('float32') in Python.")


def _class_name(targets: dict[str, Any], label: int) -> str:
    """What the data call the class with the number `label`, as text; the number where classes have no names."""
    names = targets.get("names", ())
    return names[label] if 0 <= label < len(names) else str(label)


def _suggest_model(x: dict[str, Any], targets: dict[str, Any]) -> dict[str, Any] | None:
    """A model of `fedtail.models` for inputs that are one tensor, as the table of an experiment file: {"part": name, ...}.

    `x` and `targets` are the report's entries on them. None for inputs that are single numbers, or integers other than bytes
    (tokens), for sequences of targets, and for labels that are all equal.
    """
    features = math.prod(x["shape"])
    if x["dtype"] not in ("float16", "bfloat16", "float32", "float64", "uint8") or not x["shape"] or not features:
        return None
    if targets["kind"] == "numbers":
        outputs = {} if targets["outputs"] == 1 else {"outputs": targets["outputs"]}
        return {"part": "LeastSquares", "features": features, **outputs}
    if targets["kind"] == "sequences" or targets["count"] == 1:
        return None
    few_gaps = targets["min"] >= 0 and targets["max"] < 2 * targets["count"]       # a class that no client here has
    classes = targets["max"] + 1 if few_gaps else targets["count"]
    if len(x["shape"]) in (2, 3) and x["shape"][-2:] == [_SIDE, _SIDE]:
        return {"part": "ConvNet", "classes": classes, "channels": x["shape"][0] if len(x["shape"]) == 3 else 1}
    if classes == 2:
        return {"part": "LogisticRegression", "features": features}
    return {"part": "SoftmaxRegression", "features": features, "classes": classes}
