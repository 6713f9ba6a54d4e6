"""`fedtail deploy local`: FedAvg and Delta-FL over nodes on this machine, next to the simulator on the same cohorts."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from fedtail.channel import IntegerChannel
from fedtail.data import Population, digits
from fedtail.deployment.deployed_experiment import deployed_experiment
from fedtail.deployment.flower.folder import DeploymentFolder, write_deployment_folder
from fedtail.deployment.flower.loopback import Loopback
from fedtail.training import train

EXPERIMENT = """\
name = "loopback"
rounds = {rounds}

[task.module]
part = "SoftmaxRegression"
features = 64
classes = 10

[sample]
cohort_size = {cohort}

[local]
learning_rate = 0.1

[channel]
part = "SecureChannel"
threshold = {threshold}
minimum_contributors = 3

[[method]]
name = "FedAvg"

[[method]]
name = "Delta-FL"
risk = {{ part = "Superquantile", tail_fraction = 0.5 }}
"""
EVALUATED = """
[evaluate.on_nodes]
split = "test"
"""
METHODS = ("FedAvg", "Delta-FL")
CLIENTS = 8             # at each node
HELD_OUT = 0.2          # of each client's examples


@dataclass(frozen=True)
class Compared:
    """How the model of one method, trained on the deployment, compares with the simulator's, and what the exchanges took."""

    method: str
    rounds: int
    difference: float                   # largest over the parameters
    moved: float                        # how far the model went from its start
    error: float | None                 # mean over the clients of the last cohort, on held-out examples, as nodes found it
    worst10: float | None               # of its worst tenth
    exchanges: int
    seconds: float                      # of one exchange, the median
    channel: str


def write_example(path: Path, nodes: int, rounds: int, minimum: int = 2,
                  share: float = 0.5, evaluates: bool = False,
                  write: Callable[..., DeploymentFolder] = write_deployment_folder) -> tuple[DeploymentFolder, Population]:
    """Write a deployment on the digits data into a new folder `path`, and return (its paths, a population of all clients).

    There are 8 clients at each of `nodes` nodes; each node's data are saved beside its settings. The experiment trains for
    `rounds` rounds; a `share` of the clients is sampled in each, and a row is summed over `minimum` nodes or more. With
    `evaluates`, clients hold out examples and evaluate on them; `write` writes the folder of one transport or another. Raises
    FileExistsError where the folder is not empty.
    """
    population = digits(clients=CLIENTS * nodes)
    cohort = int(len(population) * share)
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise FileExistsError(f"{path} is not empty. Choose a new folder.")
    text = EXPERIMENT.format(rounds=rounds, cohort=cohort, threshold=cohort // 2 + 1) + (EVALUATED if evaluates else "")
    written = path.parent / f"{path.name}.toml"
    written.write_text(text, encoding="utf-8")
    try:
        folder = write(path, written, node_names(nodes), "127.0.0.1", 1, data="data", minimum=minimum,
                       keys="data", test_share=HELD_OUT if evaluates else 0.0)
    finally:
        written.unlink()
    home = torch.arange(len(population)) % nodes
    for number, name in enumerate(node_names(nodes)):
        population.select(home == number).save(folder.node_folder(name) / "data")
    return folder, population


def node_names(nodes: int) -> list[str]:
    """The names "node-1", "node-2", ... of `nodes` nodes."""
    return [f"node-{number}" for number in range(1, nodes + 1)]


def compare_with_simulator(folder: DeploymentFolder, population: Population, method: str, out: Path, seed: int = 0) -> Compared:
    """Train `method` in the simulator, on the cohorts of a finished deployed run and with integer sums, and compare the models.

    Returns how far they are apart, and what the run took, as a `Compared`. `folder` is the deployment's and `out` the run's,
    whose files are read; `population` holds the clients of all nodes; `seed` must be the run's.
    """
    from safetensors.torch import load_file

    experiment = deployed_experiment(folder.path / "experiment.toml", method)
    task = experiment.task.make(seed)
    if experiment.evaluate.on_nodes:
        population, _ = population.split_examples(within=HELD_OUT)
    simulated = train(experiment.algorithm, task, population, rounds=experiment.rounds, seed=seed, channel=IntegerChannel(),
                      progress=False)
    ours, theirs = simulated.module.state_dict(), load_file(out / "model.safetensors")
    difference = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
    answers = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    seconds, result = (json.loads((out / name).read_text()) for name in ("seconds.json", "result.json"))
    found = result["members"][0]["test"]["error"] if "members" in result else {}
    return Compared(method, experiment.rounds, difference, float((simulated.state.params - task.params()).abs().max()),
                    found.get("mean"), found.get("worst10"), sum(line["exchanges"] for line in answers),
                    statistics.median(seconds), "; ".join(result["channel"]))


def run_example(path: Path, nodes: int, rounds: int, say: Callable[[str], None], patience: float = 600.0) -> list[Compared]:
    """Run FedAvg and Delta-FL on a deployment on this machine, and return for each how it compares with the simulator.

    There are `nodes` nodes, and each method trains for `rounds` rounds. Everything is written to the new folder `path`. `say` is
    called with lines of progress; `patience` is the seconds allowed for each run. Every process is ended in any case. Raises
    ValueError for fewer than 3 nodes, FileExistsError where the folder is not empty, RuntimeError where a run fails.
    """
    if nodes < 3:
        raise ValueError(f"needs 3 nodes or more, got {nodes}: so that a sum tolerates one that drops out.")
    folder, population = write_example(path, nodes, rounds, evaluates=True)
    found = []
    with Loopback(folder) as loopback:
        say(f"SuperLink on 127.0.0.1:{loopback.port}, TLS and node authentication on")
        loopback.start_superlink()
        for name in node_names(nodes):
            loopback.register_node(name)
            loopback.start_node(name)
        say(f"{nodes} nodes registered and started, {len(population)} clients")
        for method in METHODS:
            out = folder.path / "runs" / method.lower()
            loopback.submit_run(method=method, out=str(out), nodes=nodes)
            loopback.wait_for_result(out, patience)
            found.append(compare_with_simulator(folder, population, method, out))
            say(f"{method}: {rounds} rounds, {found[-1].exchanges} exchanges of {found[-1].seconds:.1f} s")
    return found
