"""The file that `fedtail init` writes."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtail.directions import FEW_CLIENTS

if TYPE_CHECKING:
    from fedtail.data.population import Population

FEWEST_TO_SPLIT = 10            # below this, examples are split in place of clients
ENOUGH_FOR_SHARES = 20      # training clients, of whom a half is ten
ENOUGH_FOR_TAIL = 10        # clients that should contribute to a round
ENOUGH_RARE = 10            # examples of all but the commonest class that a client should have, or its loss is chance
LIST_WIDTH = 112            # characters of a line of a list

HEAD = '''\
# An experiment for fedtail. Run it:      fedtail run {name}
# Every part with every field:             fedtail show {name}
# Change a key for one run:                fedtail run {name} --set risk.tail_fraction=0.3

rounds = {rounds}
seeds = "0..2"              # 0, [0, 1] or "0..4"; every seed is a run of its own
# device = "cuda"

# Where the clients come from.
{data}
# The model, and what it is evaluated by. Loss and error follow the targets; [task] loss = "..." changes that.
# Your own module is written "file:Class", with the file beside this one.
{module}
# Who takes part in a round: Uniform, Poisson (rate), ByMass, Everyone.
[sample]
{sample}

# What a client does with its data.
[local]
learning_rate = {rate}
batch_size = 10             # "none" is the full gradient
{work}
# penalty = {{ part = "Proximal", strength = 0.01 }}                         # FedProx
# schedule = {{ part = "StepDecay", factor = 0.5, every = 100 }}
# example_risk = {{ part = "Tilted", tilt = -1.0 }}                          # over a client's examples, in place of the mean

# How clients are weighted by their losses: Mean (FedAvg), Superquantile (the worst tail_fraction of the clients), TailFilter,
# SmoothedSuperquantile, Tilted (tilt), PowerFair (power; with aggregate part = "CurvatureMean"), Worst, Ascent (with sample
# part = "Everyone"), Hierarchical (within, across: risks; groups: how many). All are in docs/methods.md.
{risk}
# How updates are joined, and what the server does with them: SGD, Adam, Yogi, Adagrad.
# [aggregate]
# part = "WeightedMean"
# [server]
# part = "Adam"
# learning_rate = 0.01

[evaluate]
every = {every}                  # rounds between evaluations and checkpoints
# tensorboard = true
# finetune = {{ learning_rate = 0.05, epochs = 5 }}                          # a copy for each test client, at the end

# Differential privacy (some hundred clients at least; inputs are scaled by public numbers then, if at all). Replace the sections
# above by these:
# [sample]
# part = "Poisson"
# rate = 0.1
# population = 1000                                                         # the number of training clients
# [risk]                                                                    # without it, DP-FedAvg
# part = "Binned"
# risk = {{ part = "Superquantile", tail_fraction = 0.5 }}
# histogram = {{ loss_bound = 4.0, expected_clients = 100.0, noise = {{ noise_multiplier = "budget" }} }}
# [aggregate]
# part = "PrivateMean"
# clip_norm = 0.1                                                           # of an update, not of a gradient
# total = 50.0                                                              # tail_fraction times the clients expected
# noise = {{ noise_multiplier = "budget" }}                                   # what epsilon, delta and rounds need; or a number
# [privacy]
# epsilon = 5.0
# delta = 1e-4
# randomness = "seed"                                                       # "os" for release

# Several methods on the same cohorts and batches (`fedtail compare {name}`): remove the # below.
{others}

# What `fedtail tune {name}` searches, by {judged}.
# [tune]
# trials = 20
# statistic = "{statistic}"
# [tune.search]
# local.learning_rate = {{ low = {low:g}, high = {high:g}, log = true }}
{search}
'''

TAIL_METHOD = {
    "risk": '''\
[risk]
part = "Superquantile"
tail_fraction = 0.5         # theta: of the clients of a round, the half with the largest losses; 10 of them at least, better more
''',
    "others": '''\
# [[method]]
# name = "FedAvg"
# risk = { part = "Mean" }
# [[method]]
# name = "Delta-FL 0.5"

# One model for each tail fraction; every client then picks its own (`fedtail choose`).
# [family]
# risk.tail_fraction = {family}''',
    "search": "# risk.tail_fraction = {searched}",
}
MILD_METHOD = {
    "risk": '''\
[risk]
part = "Superquantile"
tail_fraction = 1.0         # theta: all, as FedAvg; {why}
''',
    "others": TAIL_METHOD["others"].replace('"Delta-FL 0.5"', '"Delta-FL 0.5"\n# risk = { tail_fraction = 0.5 }'),
    "search": TAIL_METHOD["search"],
}
FEW_METHOD = {
    "risk": '''\
[risk]
part = "Ascent"             # agnostic federated learning (AFL): weights follow the worst client; shares of so few mean little
step = 0.1
[iterate]
part = "AveragedIterate"
''',
    "others": '''\
# [[method]]
# name = "FedAvg"
# risk = { part = "Mean" }
# iterate = { part = "LastIterate" }
# [[method]]
# name = "AFL"''',
    "search": "# risk.step = { low = 0.01, high = 0.5, log = true }",
}
FEW_NUMBERS_METHOD = {
    "risk": '''\
[risk]
part = "Mean"               # FedAvg: shares of so few clients mean little; look at each by name
''',
    "others": '''\
# [[method]]
# name = "FedAvg"
# [[method]]
# name = "worst client"
# risk = { part = "Worst" }''',
    "search": "# local.batch_size = [10, 50]",
}
FEW_MILD_METHOD = {
    "risk": '''\
[risk]
part = "Mean"               # FedAvg; {why}
''',
    "others": '''\
# [[method]]
# name = "FedAvg"
# [[method]]
# name = "AFL"
# risk = { part = "Ascent", step = 0.1 }
# iterate = { part = "AveragedIterate" }''',
    "search": "# local.batch_size = [10, 50]",
}

EXAMPLE_DATA = '''\
# kind: arrays, leaf, saved, huggingface, or one of the generators digits, label_shift, synthetic, synthetic_iid,
# synthetic_hybrid, three_gaussians. Your own file:
#   kind = "arrays"
#   path = "mine.npz"                            # or .parquet
#   x = "x"
#   y = "y"
#   client = "client"                            # or { part = "dirichlet", clients = 100, concentration = 0.3 }
[data]
kind = "digits"
clients = 100
concentration = 0.3
split = { train = 0.6, validation = 0.2, test = 0.2 }      # clients; within = 0.2 splits examples instead; seed = 0 fixes it
'''

EXAMPLE_MODULE = '''\
[task.module]
part = "SoftmaxRegression"
features = 64
classes = 10
'''


def starter_text(file: Path = Path("experiment.toml"), data: Path | None = None, x: str | list[str] | None = None,
                 y: str | None = None, client: str | None = None) -> str:
    """The text of a commented experiment file, as `fedtail init` writes it to `file`. Nothing is written here.

    Without `data` it uses the digits data set. With a path to the user's data, these are read, and kind, path, scale, split,
    cohort size, method, model, step size and rounds are chosen for them, so that a run trips none of our warnings; `x`, `y` and
    `client` name their arrays or columns. For fewer than 20 training clients, of whom shares mean little, the method is agnostic
    federated learning by client; where targets are numbers it is FedAvg, because a step of weights that follow losses has no
    scale that fits the squares of any unit. It is FedAvg, too, where clients have few examples of all but one class, so that
    whose loss is large is mostly chance. Fewer than 20 held-out clients judge a search by the worst of them, or the mean.

    Raises ValueError where there is nothing to learn, or labels are in one-hot form.
    """
    if data is None:
        return HEAD.format(name=file.name, rounds=100, data=EXAMPLE_DATA, module=EXAMPLE_MODULE, sample=_sample_fields(60),
                           rate=0.1, work=_work(None), low=0.01, high=1.0, every=10, **_method(60, {}), **_judged(100, {}))
    from fedtail.data.describe import all_equal_text, describe, one_hot_text
    from fedtail.data.opening import names_by_role, open_any_data
    from fedtail.experiment.starter_settings import plan_steps, starter_scale

    population = open_any_data(data, x, y, client)
    one_hot, kept = one_hot_text(population.targets[population.example_clients_and_rows()[1]].numpy()), _target_lines(population)
    population = _with_starter_targets(population)
    about, scale = describe(population, data.name), starter_scale(population)
    if refused := one_hot or all_equal_text(about["targets"]):
        raise ValueError(f"{data}: {refused}")
    names = {"x": x, "y": y, "client": client} if data.is_dir() else names_by_role(data, x, y, client)
    section = _data_section(data, file.parent, population, names, scale, kept)
    plan = plan_steps(population, about["suggested"], scale)
    train = _training_clients(len(population))
    return HEAD.format(name=file.name, rounds=plan.rounds, data=section, module=_task_section(about),
                       sample=_sample_fields(train), rate=plan.learning_rate, work=_work(plan.local_steps),
                       low=plan.learning_rate / 10, high=10 * plan.learning_rate, every=max(1, plan.rounds // 10),
                       **_method(train, about), **_judged(len(population), about))


def _method(train: int, about: dict[str, Any]) -> dict[str, str]:
    """The fields of HEAD about the method, for `train` training clients of the data that `about` describes ({}: the digits)."""
    why = _why_mild(about) if about else ""
    if train < ENOUGH_FOR_SHARES:
        few = FEW_NUMBERS_METHOD if about["targets"]["kind"] == "numbers" else FEW_MILD_METHOD if why else FEW_METHOD
        return {name: text.replace("{why}", why) for name, text in few.items()}
    family, searched = str([1.0, *_fractions(train, (0.7, 0.4))]), [*_fractions(train, (0.3, 0.5)), 0.8]
    places = {"{family}": family, "{searched}": str([*searched, 1.0] if why else searched), "{why}": why}
    made = dict(MILD_METHOD if why else TAIL_METHOD)
    for place, text in places.items():
        made = {name: one.replace(place, text) for name, one in made.items()}
    return made


def _why_mild(about: dict[str, Any]) -> str:
    """Why a method for the tail would follow chance, where clients have few examples of all but the commonest class; else ""."""
    from fedtail.data.describe import MOSTLY

    targets = about["targets"]
    if targets["kind"] != "classes" or targets["commonest"]["share"] <= MOSTLY:
        return ""
    rare = (1 - targets["commonest"]["share"]) * about["sizes"]["median"]
    return f"with about {rare:.2g} rare labels a client, whose loss is large is mostly chance" if rare < ENOUGH_RARE else ""


def _judged(clients: int, about: dict[str, Any]) -> dict[str, str]:
    """The fields of HEAD about what a search goes by, for data of so many clients that `about` describes ({}: the digits).

    Fewer than 20 held-out clients have no percentiles: methods that follow the worst clients go by the worst of them, others by
    the mean.
    """
    train = _training_clients(clients)
    held = round(0.8 * clients) - round(0.6 * clients) if clients >= FEWEST_TO_SPLIT else max(1, clients - round(0.8 * clients))
    if held >= FEW_CLIENTS or not about:
        return {"statistic": "p90", "judged": "the 90th percentile of the error over held-out training clients"}
    mean = _why_mild(about) or (train < ENOUGH_FOR_SHARES and about["targets"]["kind"] == "numbers")
    few = f"about {held}: too few for a percentile"
    return {"statistic": "mean", "judged": f"the mean error of held-out training clients ({few})"} if mean else \
        {"statistic": "p100", "judged": f"the error of the worst held-out training client (of {few})"}


def _training_clients(clients: int) -> int:
    """How many of so many clients the file trains on: 60%, or all where examples are split in place of clients."""
    return int(0.6 * clients) if clients >= FEWEST_TO_SPLIT else clients


def _fractions(train: int, wanted: tuple[float, ...]) -> list[float]:
    """Those of the `wanted` tail fractions, raised where ten clients of a round need it: a smaller tail is warned about.

    A round is that of `_sample_fields` for `train` training clients.
    """
    least = math.ceil(10 * ENOUGH_FOR_TAIL / _cohort(train)) / 10
    return sorted({max(one, least) for one in wanted}, reverse=wanted[0] > wanted[-1])


def _cohort(train: int) -> int:
    """How many of `train` training clients a round of the starter samples: half of them, 20 to 50; all if fewer than 40."""
    return min(50, train // 2) if train >= 40 else train


def _sample_fields(train: int) -> str:
    """The lines below [sample] for `train` training clients: half of them per round, 20 to 50; all of them if fewer than 40.

    So the tail of a half is ten clients or more, or as many as there are.
    """
    return f'part = "Uniform"\ncohort_size = {_cohort(train)}' if train >= 40 else 'part = "Everyone"'


def _work(local_steps: int | None) -> str:
    """The line below [local] on how much a client computes in a round."""
    return "epochs = 1                  # or local_steps" if local_steps is None else \
        f"local_steps = {local_steps}            # of a client in a round; or epochs"


def _target_lines(population: Population) -> list[str]:
    """The lines of [data] that say what the targets are, where they are not classes 0, 1, ... or floats already."""
    from fedtail.data.class_names import FEW_CLASSES, are_whole_numbers_to_predict, classes_to_list

    if are_whole_numbers_to_predict(population.targets):
        return ['targets = "numbers"     # whole numbers, of so many values that they are no classes; remove it if they are']
    listed = classes_to_list(population)
    if listed is None:
        return []
    numbers = ""
    if population.targets.is_floating_point():
        numbers = "; remove this line if they are numbers to predict"
    elif len(listed) > FEW_CLASSES and population.classes is None:
        numbers = '; for numbers to predict write targets = "numbers" in its place, and part = "LeastSquares" without classes'
    return [f"classes = {_toml_literal(listed)}      # the labels of y, numbered 0, 1, ... in this order{numbers}"]


def _with_starter_targets(population: Population) -> Population:
    """The population with the targets that the lines of `_target_lines` make."""
    from fedtail.data.class_names import are_whole_numbers_to_predict, classes_to_list, with_classes, with_number_targets

    if are_whole_numbers_to_predict(population.targets):
        return with_number_targets(population)
    listed = classes_to_list(population)
    return population if listed is None else with_classes(population, listed)


def _data_section(data: Path, folder: Path, population: Population, names: dict[str, Any], scale: Any,
                  targets: list[str]) -> str:
    """The text of the [data] section for the user's own data, with the path relative to `folder`.

    From 10 clients on the split is by clients, below that by the examples of each client. `names` are those of the arrays `x`,
    `y` and `client`, `scale` is how inputs are scaled, or None, and `targets` are lines on the targets.
    """
    clients, smallest = len(population), int(population.size.min())
    kind = {".npz": "arrays", ".parquet": "arrays", ".csv": "arrays"}.get(data.suffix.lower()) or _folder_kind(data)
    place = "dataset" if kind == "huggingface" else "path"
    lines = ["[data]", f'kind = "{kind}"', f"{place} = {_toml_literal(os.path.relpath(data, folder))}"]
    if kind in ("arrays", "huggingface"):
        lines += [f"{name} = {_toml_literal(given or name)}" for name, given in names.items()]
    lines += targets
    if scale is not None:
        fitted = isinstance(scale, str)
        public = "" if fitted else ", ".join(f"{name} = {value}" for name, value in scale.items())
        lines.append(f"scale = {_toml_literal(scale)}       # fitted on training clients, kept with the model" if fitted else
                     f"scale = {{ {public} }}       # {'for all columns' if 'shift' in scale else 'bytes to [0, 1]'}")
    if clients < FEWEST_TO_SPLIT and smallest < 2:
        lines.append("at_least = 2            # clients with one example cannot be split")
    lines.append("split = { train = 0.6, validation = 0.2, test = 0.2 }" if clients >= FEWEST_TO_SPLIT else
                 "split = { train = 1.0, within = 0.2 }      # few clients: a fifth of the examples is the test")
    return "\n".join(lines) + "\n"


def _toml_literal(value: Any) -> str:
    """The TOML text of a value, as it stands to the right of "=": quoted text, a number, or a list in lines of 120 characters."""
    import tomli_w

    if isinstance(value, list):
        rows = [""]
        for one in (_toml_literal(each) for each in value):
            if rows[-1] and len(rows[-1]) + len(one) > LIST_WIDTH:
                rows.append("")
            rows[-1] += f"{', ' if rows[-1] else ''}{one}"
        return f"[{rows[0]}]" if len(rows) == 1 else "[\n    " + ",\n    ".join(rows) + ",\n]"
    return tomli_w.dumps({"value": value}, multiline_strings=False).partition("=")[2].strip()


def _folder_kind(data: Path) -> str:
    """The `kind` in [data] for a folder: "saved" for a saved population, "huggingface" for its saved data sets, else "leaf"."""
    from fedtail.data.hub import is_dataset_folder

    if (data / "population.json").is_file():
        return "saved"
    return "huggingface" if is_dataset_folder(data) else "leaf"


def _task_section(about: dict[str, Any]) -> str:
    """The text of [task] and [task.module] for data of which `about` is the description: metrics that say more than the error.

    That is the absolute error of numbers, which is in their unit, and for classes of which one has most of the examples what a
    constant prediction cannot win.
    """
    from fedtail.data.describe import MOSTLY

    targets = about["targets"]
    metrics = ["mean_absolute_error"] if targets["kind"] == "numbers" and targets["outputs"] == 1 else \
        ["balanced_accuracy", "roc_auc"] if targets["kind"] == "classes" and targets["commonest"]["share"] > MOSTLY else []
    line = f"[task]\nmetrics = {_toml_literal(metrics)}\n\n" if metrics else ""
    return line + _module_section(about["suggested"])


def _module_section(suggested: dict[str, Any] | None) -> str:
    """The text of the [task.module] section with the fields `suggested`; for None, a line where the user names a module."""
    if suggested is None:
        return '[task.module]\npart = "mine:Net"      # a torch.nn.Module of yours, in mine.py beside this file\n'
    values = (f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value}" for name, value in suggested.items())
    return "[task.module]\n" + "\n".join(values) + "\n"
