"""A server that is restored from an old backup charges the rounds that its nodes were asked and its ledger does not hold."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fedtail.deployment import RemoteFleet
from fedtail.deployment.asked_rounds import note_asked, read_asked
from fedtail.deployment.audit_log import AuditLog, last_entry
from fedtail.deployment.deployed_experiment import deployed_experiment
from fedtail.deployment.deployed_run import DeployedRun
from fedtail.deployment.forgotten_rounds import forgotten_rounds, questions_on_ledger
from fedtail.deployment.node_messages import NodeMessage, encode_message, read_message
from fedtail.deployment.site import MOST_REFUSALS, Refusals

from departing_server import DepartingServer, nodes, train_question
from remote_cases import Sites

FILE = """\
name = "restored"
rounds = {rounds}
[task.module]
part = "SoftmaxRegression"
features = 5
classes = 3
[sample]
cohort_size = 20
[local]
learning_rate = 0.3
[risk]
part = "Superquantile"
tail_fraction = 0.5
[channel]
part = "SecureChannel"
threshold = 8
minimum_contributors = 3
"""
PRIVATE = """\
name = "private"
rounds = {rounds}
[task.module]
part = "SoftmaxRegression"
features = 5
classes = 3
[sample]
cohort_size = 20
[local]
learning_rate = 0.3
[aggregate]
part = "PrivateMean"
clip_norm = 1.0
noise = {{ part = "DiscreteNoise", noise_multiplier = 2.0, planned_clients = 8 }}
total = 20.0
[channel]
part = "SecureChannel"
threshold = 8
minimum_contributors = 3
[privacy]
epsilon = {epsilon}
delta = 1e-3
"""


class Noted(Sites):
    """Nodes that note what they are asked, each in a folder of its own."""

    def __init__(self, path):
        super().__init__()
        self.folders = {node: path / str(node) for node in self.sites}
        for one in self.folders.values():
            one.mkdir(parents=True)

    def exchange(self, letters):
        for node, letter in letters.items():
            if (message := read_message(letter)).ask:
                note_asked(self.folders[node], message)
        return super().exchange(letters)

    def asked(self, run):
        return lambda: [read_asked(folder, run.training_name()) for folder in self.folders.values()]


def interrupted(run, sites, after):
    """Train until `after` more rounds are held, then end as by Ctrl-C."""
    held = []

    def count():
        held.append(1)
        if len(held) > after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.run(RemoteFleet(sites.exchange, sites.registry), count, sites.asked(run))


def start(tmp_path, text=FILE, rounds=8, **more):
    (tmp_path / "experiment.toml").write_text(text.format(rounds=rounds, **more))
    experiment = deployed_experiment(tmp_path / "experiment.toml")
    return (lambda resume=False: DeployedRun(experiment, 0, tmp_path / "run", resume=resume)), Noted(tmp_path / "nodes")


def opened(tmp_path):
    return [line["open"] for line in map(json.loads, (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()) if "open" in line]


def test_an_undisturbed_run_and_one_that_is_resumed_forget_nothing(tmp_path):
    make, sites = start(tmp_path)
    interrupted(make(), sites, 3)
    make(True).run(RemoteFleet(sites.exchange, sites.registry), asked=sites.asked(make(True)))
    assert opened(tmp_path) == list(range(8))
    assert "does not hold" not in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize("kept", [0, 2])
def test_a_restored_server_charges_what_nodes_were_asked_since(tmp_path, kept):
    """`kept` rounds are in the backup and three were held after it: they are charged, and then held once more."""
    make, sites = start(tmp_path)
    interrupted(make(), sites, kept)
    shutil.copytree(tmp_path / "run", tmp_path / "backup")
    interrupted(make(True), sites, 3)
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(tmp_path / "backup", tmp_path / "run")
    result = make(True).run(RemoteFleet(sites.exchange, sites.registry), asked=sites.asked(make(True)))
    again = list(range(kept, kept + 3))
    assert opened(tmp_path) == [*range(kept), *again, *range(kept, 8)]
    assert sum(count for _, count in result.ledger.rounds) == 8 + 3
    log = (tmp_path / "run" / "log.txt").read_text()
    assert f"nodes answered 3 rounds (rounds {again[0]} to {again[-1]}) that the ledger of this folder does not hold" in log
    assert any("lost with the machine" in one for one in json.loads((tmp_path / "run" / "result.json").read_text())["channel"])


@pytest.mark.filterwarnings("ignore::fedtail.training.BudgetSpentWarning")
def test_what_was_forgotten_is_charged_beyond_the_budget_and_nothing_more_is_released(tmp_path):
    """Epsilon lasts for some rounds: those that the old server held are paid from it, and the rest of the run is refused."""
    make, sites = start(tmp_path, PRIVATE, rounds=60, epsilon=12.0)
    interrupted(make(), sites, 1)
    shutil.copytree(tmp_path / "run", tmp_path / "backup")
    whole = make(True).run(RemoteFleet(sites.exchange, sites.registry), asked=sites.asked(make(True)))
    held = len(opened(tmp_path))
    assert "would exceed" in whole.stopped
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(tmp_path / "backup", tmp_path / "run")
    before = len(sites.letters)
    restored = make(True).run(RemoteFleet(sites.exchange, sites.registry), asked=sites.asked(make(True)))
    assert len(opened(tmp_path)) == held
    assert restored.rounds == 1
    assert "would exceed" in restored.stopped
    assert len(sites.letters) == before                      # nobody was asked anything
    assert restored.ledger.guarantee().epsilon == pytest.approx(whole.ledger.guarantee().epsilon)


def test_questions_are_counted_by_run_and_a_damaged_line_is_passed_over(tmp_path):
    ledger = tmp_path / "ledger.jsonl"
    lines = [{"format": "fedtail ledger 1"}, {"open": 0}, {"release": {}}, {"ask": [0]}, {"ask": [0]}, {"open": 1}, {"ask": [0]}, {"skip": 2}]
    ledger.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"ask": [')
    assert [questions_on_ledger(ledger)[round] for round in range(3)] == [2, 1, 0]
    a, b = b"a", b"b"
    assert forgotten_rounds([((0, a, 2), (1, a, 1))], ledger) == {}
    assert forgotten_rounds([((0, a, 2), (0, b, 2))], ledger) == {0: (2, 2)}
    assert forgotten_rounds([((0, a, 2),), ((0, b, 1),)], ledger) == {0: (1, 1)}
    assert forgotten_rounds([((0, a, 2),), ((0, a, 1),)], ledger) == {}
    assert forgotten_rounds([((5, a, 3),)], Path(tmp_path / "none")) == {5: (1, 3)}
    liar = tuple((round, a, 1) for round in range(100_010))         # stops nobody's run, and is not charged
    assert forgotten_rounds([liar, ((5, a, 3),)], ledger) == {5: (1, 3)}
    (tmp_path / "asked.jsonl").write_text('{"training": "aa", "round": 3, "run": "01"}\nrubbish\n{"training": "bb", "round": 1, "run": "01"}\n'
                                          '{"training": "aa", "round": 3, "run": "01"}\n{"training": "aa", "rou')
    assert read_asked(tmp_path, b"\xaa") == ((3, b"\x01", 2),)


def test_a_node_notes_what_it_answers_and_a_server_that_sends_what_it_likes_fills_no_disk():
    with nodes() as hospitals:
        server, folder = DepartingServer(hospitals), hospitals.settings[0].folder
        question = train_question(hospitals.method)
        server.begin(0)
        assert server.read(question) is not None
        assert [(round, count) for round, _, count in read_asked(folder, server.memory().nodes.training)] == [(0, 1)]
        before = (folder / "asked.jsonl").read_bytes()
        server.begin(1)
        assert server.read(replace(question, gather=True)) is None
        for name in ("run", "training"):
            letter = replace(NodeMessage(b"r", 0, 1, (), b"ask", b"", b"t", 0), **{name: bytes(65)})
            said = hospitals.exchange({0: encode_message(letter)})[0]
            assert b"is named by 65 bytes, and 64 are the most" in said
        assert (folder / "asked.jsonl").read_bytes() == before
        for k in range(3 * MOST_REFUSALS):
            hospitals.exchange({0: encode_message(NodeMessage(b"r" * (k + 65), 0, k))})
        lines = (folder / "audit.jsonl").read_text().splitlines()
        assert sum('"refused"' in line for line in lines) == MOST_REFUSALS


def test_refusals_that_were_not_written_are_counted_in_the_next_line(tmp_path, monkeypatch):
    log, refusals = AuditLog(tmp_path / "audit.jsonl"), Refusals()
    for k in range(MOST_REFUSALS + 7):
        refusals.write(log, f"refusal {k}")
    monkeypatch.setattr("fedtail.deployment.site.MINUTE", 0.0)
    refusals.write(log, "a minute later")
    assert last_entry(log.path)["not_written_before"] == 7
    refusals.write(log, "and another")
    assert "not_written_before" not in last_entry(log.path)
