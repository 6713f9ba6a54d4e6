"""The model card of an exported model: what it was trained on and how, what it promises, how its tail does, where it ends.

It is a README.md as the Hugging Face Hub reads it: settings between two lines of ---, in YAML, of which JSON is a part.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedtail.directions import FEW_CLIENTS, bad_percentile_name
from fedtail.runs.comparison import metric_direction, number_of_tested_clients
from fedtail.runs.diverged import divergence_sentences
from fedtail.runs.metric_bounds import metric_name
from fedtail.runs.promise_entries import promise_sentences
from fedtail.runs.run_folder import RunFolder

ALL = "all"
Column = tuple[str, str]                     # words, and the statistic's name
METHOD = ("sample", "local", "risk", "aggregate", "server", "iterate", "personal", "channel")
CLASS_OUTPUTS = ("scores of classes, of which the largest is the prediction; where there is one score, it predicts class 1 above "
                 "0, else class 0")
USE = {
    "model.pt2": '```python\nimport torch\n\nmodel = torch.export.load("model.pt2").module()\noutputs = model({call})\n```',
    "model.onnx": '```python\nimport onnxruntime\n\nsession = onnxruntime.InferenceSession("model.onnx")\n'
                  "outputs = session.run(None, {feeds})[0]\n```",
    "model.safetensors": 'The tensors are in `model.safetensors`; `config.json` says which module they belong to:\n\n'
                         '```python\nfrom safetensors.torch import load_file\n\n'
                         'module.load_state_dict(load_file("model.safetensors"))\nmodule.eval()\n```',
}
SCALED_USE = ("The model scales its inputs itself. In `model.safetensors`, `shift_` and `scale_` are the numbers by which it "
              "does so, and the tensors of the module that `config.json` names begin with `module.`:\n\n"
              "```python\nfrom safetensors.torch import load_file\n\n"
              'tensors = load_file("model.safetensors")\n'
              'module.load_state_dict({name[7:]: one for name, one in tensors.items() if name.startswith("module.")})\n'
              'outputs = module.eval()(((x - tensors["shift_x"]) / tensors["scale_x"]).float())\n```')


def model_card(run: RunFolder, index: int, best: bool, files: list[str], licence: str | None = None) -> str:
    """The text of the card about the model at position `index` of a finished run, exported to `files`.

    With `best` it is about the model that `keep_best` kept, at its round. `licence` is an identifier such as "apache-2.0".
    """
    line = _line_about(run, index, best)
    split = run.tested_split if run.about.get("splits") else ""
    statistics = line["members"][index].get(split, {}) if split else {}
    parts = [_front_matter(run, index, statistics, split, licence), f"# {run.members[index]}", _opening(run, line, best),
             "## Use", *_use(run, files), "## Data", _data(run), "## Training", _training(run),
             "## Results over clients", _results(run, statistics, split, line), _promises(run, index, best),
             "## Privacy", _privacy(run, best), "## Limits", _limits(run, best)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _line_about(run: RunFolder, index: int, best: bool) -> dict[str, Any]:
    """The statistics of the last evaluation or, with `best`, of that of the round at which the model was best."""
    if not best:
        return {"members": [{} for _ in run.members], **run.result}
    round = run.result["best"][index]["round"]
    return next(line for line in run.metrics if line["round"] == round)


def _front_matter(run: RunFolder, index: int, statistics: dict[str, Any], split: str, licence: str | None) -> str:
    """The settings of the card between lines of ---, a line of JSON for each key."""
    data = run.about["experiment"].get("data", {})
    dataset = data.get("dataset")
    found = [{"type": f"{metric}_{name}", "name": f"{metric}, {words.removesuffix(' of clients')} over clients",
              "value": numbers[name]}
             for metric, numbers in statistics.items() for words, name in _columns(run, metric) if numbers.get(name) is not None]
    task = {"type": "classification" if run.about.get("rates") else "prediction"}
    called = str(dataset or data.get("kind", "own data"))
    about = {"name": called, "type": called, "split": split}
    head: dict[str, Any] = {"library_name": "pytorch", "tags": ["federated-learning", "fedtail", *_tags(run)]}
    head |= {"license": licence} if licence else {}
    head |= {"datasets": [dataset]} if isinstance(dataset, str) and not Path(dataset).exists() else {}
    if found:
        results = [{"task": task, "dataset": about, "metrics": found}]
        head["model-index"] = [{"name": run.members[index], "results": results}]
    return "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in head.items()), "---"])


def _tags(run: RunFolder) -> list[str]:
    """Tags that say what kind of training it was."""
    return ["differential-privacy"] if run.privacy.get("private") else []


def _opening(run: RunFolder, line: dict[str, Any], best: bool) -> str:
    """One sentence on what the model is."""
    module = run.about["experiment"].get("task", {}).get("module", {}).get("part", "module")
    which = "the best by a statistic over clients" if best else "the last"
    return (f"A `{module}`, trained by federated learning with fedtail {run.about['versions']['fedtail']} for {line['round']} "
            f"rounds (seed {run.seed}; {which} of its run).")


def _use(run: RunFolder, files: list[str]) -> list[str]:
    """How each exported file is run, with the shape of its inputs."""
    inputs = run.about.get("inputs") or {}
    shapes = ", ".join(f"`{name}` ({', '.join(map(str, ['examples', *one['shape']]))}) {one['dtype']}"
                       for name, one in inputs.items())
    call = "x" if list(inputs) == ["x"] else ", ".join(f"{name}={name}" for name in inputs)
    feeds = "{" + ", ".join(f'"{name}": {name}{_cast(run, one["dtype"])}' for name, one in inputs.items()) + "}"
    kind = CLASS_OUTPUTS if run.about.get("rates") else "the predicted numbers"
    names = [f"`{name}`" for name in run.about.get("columns") or ()]
    order = f" Columns of `x`, in this order: {', '.join(names)}." if names else ""
    called = ", ".join(f"{k} is `{name}`" for k, name in enumerate(run.about.get("classes") or ()))
    head = f"Inputs: {shapes}.{order} Outputs: {kind}.{f' Classes: {called}.' if called else ''}" if shapes else ""
    scaled = run.about["experiment"].get("data", {}).get("scale") is not None
    uses = {**USE, "model.safetensors": SCALED_USE} if scaled else USE
    return [head, *(uses[name].replace("{call}", call).replace("{feeds}", feeds) for name in files)]


def _cast(run: RunFolder, dtype: str) -> str:
    """What an array of floats needs to be taken by the ONNX file, whose inputs are in the model's precision: a call, or ""."""
    wanted = run.about["experiment"].get("task", {}).get("dtype", "float32")
    return f'.astype("{wanted}")' if dtype.startswith("float") and dtype != wanted else ""


def _data(run: RunFolder) -> str:
    """Where the clients came from, and how many there were in each split."""
    splits = ", ".join(f"{count} {name.replace('_', '-')}" for name, count in (run.about.get("splits") or {}).items())
    fingerprint = f" Fingerprint of the data: `{run.about['fingerprint']}`." if run.about.get("fingerprint") else ""
    return f"{run.about.get('data') or 'Data of the nodes of a deployment'}. Clients: {splits or 'not recorded'}.{fingerprint}"


def _training(run: RunFolder) -> str:
    """The parts of the method that the experiment names, as a list."""
    table = run.about["experiment"]
    parts = [f"- {name}: `{_in_words(table[name])}`" for name in METHOD
             if isinstance(table.get(name), dict) and not str(table[name].get("part", "No")).startswith("No")]
    family = run.about.get("family")
    several = [f"- one of {len(run.members)} models of a family over `{family['field']}`: {family['values']}"] if family else []
    why = run.result.get("stopped")
    ended = [f"- ended after {run.result['round']} of {run.about['rounds']} rounds: {why}"] if why else []
    return "\n".join([*parts, *several, *ended])


def _in_words(table: dict[str, Any]) -> str:
    """A part as it would be written in Python: Superquantile(tail_fraction=0.5)."""
    given = ", ".join(f"{name}={_in_words(value) if isinstance(value, dict) else value}" for name, value in table.items()
                      if name != "part" and value != "none")
    return f"{table.get('part', '')}({given})"


def _results(run: RunFolder, statistics: dict[str, Any], split: str, line: dict[str, Any]) -> str:
    """A table of statistics over clients, one row for each metric; a sentence where nothing was evaluated.

    Fewer than 20 clients have a worst and a best one instead of tenths. Their names are not written: a card is published.
    """
    if not statistics:
        return "Nothing was evaluated on held-out clients."
    rows = [[_directed(run, metric), *(_number(numbers, name) for _, name in _columns(run, metric)),
             _defined(numbers)] for metric, numbers in statistics.items()]
    head = ["metric", *_heads(run), "defined for"]
    if all(row[-1] == ALL for row in rows):
        head, rows = head[:-1], [row[:-1] for row in rows]
    lines = [head, ["---"] * len(head), *rows]
    clients = run.about["splits"][split]
    over = f"Over {clients} {split.replace('_', '-')} clients of equal weight, after round {line['round']}:"
    return over + "\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in lines)


def _heads(run: RunFolder) -> list[str]:
    """The heads of the table of statistics; the percentile is the 90th, or the 10th of metrics where higher is better."""
    words = [words for words, _ in _columns(run, "")]
    ends = {metric_direction(run, metric) for metric in run.about.get("metrics", ())}
    both = "90th percentile (10th where higher is better)"
    return [both if one == "90th percentile" and "higher" in ends else one for one in words]


def _columns(run: RunFolder, metric: str) -> tuple[Column, ...]:
    """The statistics that a card has of a metric: tenths at its own bad and good end, single clients where there are few."""
    better = metric_direction(run, metric)
    if number_of_tested_clients(run) < FEW_CLIENTS:
        worst, best = ("p100", "p0") if better == "lower" else ("p0", "p100")
        return (("mean", "mean"), ("median", "p50"), ("worst client", worst), ("best client", best))
    bad = bad_percentile_name(better)
    return (("mean", "mean"), ("median", "p50"), (f"{bad[1:]}th percentile", bad), ("worst 10% of clients", "worst10"),
            ("best 10% of clients", "best10"))


def _directed(run: RunFolder, metric: str) -> str:
    """The name of a metric, with "higher is better" where it is, and the unit of squared errors."""
    if metric_name(run.about, metric) == "squared error":
        return "error (squared, in squared units of the targets)"
    return metric if metric_direction(run, metric) == "lower" else f"{metric} (higher is better)"


def _defined(numbers: dict[str, Any]) -> str:
    """For how many clients a metric is defined: "19", or "all"."""
    return ALL if numbers.get("defined") is None else str(numbers["defined"])


def _promises(run: RunFolder, index: int, best: bool) -> str:
    """What the held-out clients promise of the error over new clients, or why they do not; empty where a run does not say.

    It is about the last model; the `best` one of `keep_best` has none.
    """
    if best:
        return ("- No promise about new clients is made for this model, the best one of the run: held-out clients were looked at "
                "for the last model only.")
    found = run.result.get("promises") or []
    entry = found[index].get("error") if index < len(found) else None
    if not entry:
        return ""
    said = promise_sentences(entry, metric_name(run.about, "error"), run.about["better"]["error"], bool(run.about.get("rates")))
    return "\n".join(f"- {text[0].upper()}{text[1:]}" for text in said)


def _privacy(run: RunFolder, best: bool) -> str:
    """The privacy statement, and what it does not cover."""
    found = run.privacy
    line = run.privacy_line
    said = [f"Differential privacy: {line}. {found.get('guarantee', '')}." if line else
            f"No differential privacy: {found.get('why', 'nothing is known of what was released')}."]
    said += ["This model was chosen by exact results of clients, which the statement does not cover."] if best and line else []
    return "\n\n".join([*said, *(f"Not covered: {text}." for text in (run.not_charged_sentences if line else []))])


def _limits(run: RunFolder, best: bool) -> str:
    """What a reader must not take from the card, as a list."""
    splits, split = run.about.get("splits") or {}, run.tested_split if run.about.get("splits") else ""
    limits = ["For clients like those of the training population; on others nothing was measured."]
    if split == "train":
        limits.append("The results are those of clients that trained the model, which is too good for others.")
    count = splits.get(split, 0)
    if 0 < count < 100:
        few = max(1, round(count / 10))
        limits.append(f"The worst 10% of {count} clients are about {few}: statistics of the tail are rough."
                      if count >= FEW_CLIENTS else f"{count} clients show no tail: another one may do worse than all of them.")
    chosen = run.result.get("selected_on")
    if chosen and (best or "end of the run" in chosen["for"]):
        limits.append(f"The {' and the '.join(chosen['for'])} were chosen by {chosen['by']} on the {chosen['split']} clients; "
                      "results on these are too good.")
    limits += [text[0].upper() + text[1:] for text in ([] if best else divergence_sentences([run]))]
    if best and run.result.get("failed"):
        limits.append(f"{run.result['failed']} answers of clients were left out in training, because a loss or an update was not "
                      "finite.")
    limits.append("Statistics are of observed errors, which spread more than the true ones where clients have few examples.")
    return "\n".join(f"- {text}" for text in limits)


def _number(numbers: dict[str, Any], name: str) -> str:
    """A statistic with four significant digits; "not finite" for None, by which JSON holds such a number."""
    if name not in numbers:
        return "not recorded"
    return "not finite" if numbers[name] is None else f"{numbers[name]:z.4g}"
