"""A node answers what its operator accepted, and says so; its commands, its records, and ways around them."""

from __future__ import annotations

import importlib.util
import json
import marshal
import multiprocessing
import os
import shlex
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedtail.cli import app
from fedtail.deployment import audit_log
from fedtail.deployment.audit_log import AUDIT
from fedtail.deployment.consent import accept, changes, check_readiness, experiment_digest
from fedtail.deployment.data_budget import LEDGER, ROUNDS, Charge, DataBudget
from fedtail.deployment.deployed_experiment import deployed_experiments
from fedtail.deployment.deployed_run import DeployedRun
from fedtail.deployment.flower.folder import startup_commands, write_deployment_folder
from fedtail.deployment.node_process import only_process, run_node
from fedtail.deployment.node_status import compare_logs, node_log, run_log
from fedtail.deployment.nvflare.folder import cell_commands
from fedtail.deployment.policy import NodePolicy
from fedtail.deployment.registry import signed_node_info
from fedtail.deployment.settings import NodeSettings
from fedtail.deployment.signed_info import encode_request
from fedtail.deployment.told import rounds_left
from fedtail.privacy.accounting import epsilon_at
from fedtail.privacy.events import GaussianRelease, NonPrivateRelease, NoSampling, RoundEvent
from fedtail.secure.encoding import Refused

from departing_server import BARE, PRIVATE, DepartingServer, Nodes, train_question, truth

POLICY = NodePolicy(smallest_cohort=2, smallest_tail=1, questions=8, repeats=0, rounds_without_noise=2)
BARE_CHARGE = Charge(NonPrivateRelease("the updates"), "client", False)
NOISY_CHARGE = Charge(GaussianRelease(4.0, 2.0, "the updates"), "client", True)


def command(*words):
    return CliRunner().invoke(app, ["node", *map(str, words)])


def digest_of(settings):
    return experiment_digest(settings.read_experiments())


@pytest.fixture
def hospitals(tmp_path):
    return Nodes(tmp_path)


def asked(hospitals, round=0):
    """A server that asked the first question of a round, what it read, and what nodes said."""
    server = DepartingServer(hospitals)
    server.begin(round)
    return server.read(train_question(hospitals.method)), server.said


# Consent

@pytest.mark.parametrize(("old", "new"), [
    ("rounds = 3", "rounds = 4"), ("learning_rate = 0.2", "learning_rate = 0.3"), ("clip_norm = 10.0", "clip_norm = 11.0"),
    ("noise_multiplier = 2.0", "noise_multiplier = 1.9"), ("rate = 0.5", "rate = 0.6"), ("classes = 3", "classes = 4"), ("planned_clients = 12", "planned_clients = 11"),
    ("[sample]", '[channel]\npart = "SecureChannel"\nthreshold = 9\n[sample]'), ("[sample]", "[evaluate.on_nodes]\n[sample]"),
    ("[sample]", '[risk]\npart = "Superquantile"\ntail_fraction = 0.5\n[sample]')])
def test_whatever_decides_what_leaves_is_in_the_digest(tmp_path, old, new):
    (tmp_path / "e.toml").write_text(PRIVATE)
    before = experiment_digest(deployed_experiments(tmp_path / "e.toml"))
    assert experiment_digest(deployed_experiments(tmp_path / "e.toml")) == before
    (tmp_path / "e.toml").write_text(PRIVATE.replace(old, new, 1))
    assert experiment_digest(deployed_experiments(tmp_path / "e.toml")) != before


def test_what_stays_with_the_server_is_not(tmp_path):
    (tmp_path / "e.toml").write_text(BARE)
    before = experiment_digest(deployed_experiments(tmp_path / "e.toml"))
    (tmp_path / "e.toml").write_text(f'seeds = [7]\n{BARE}[data]\nkind = "digits"\nclients = 9\n[engine]\nworkers = 1\n')
    assert experiment_digest(deployed_experiments(tmp_path / "e.toml")) == before


def test_the_users_own_code_and_what_lies_beside_it_are_in_the_digest(tmp_path):
    (tmp_path / "ours_consent.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(5, 3)\n")
    (tmp_path / "e.toml").write_text('rounds = 1\n[task.module]\npart = "ours_consent:make"\n[sample]\ncohort_size = 4\n[local]\nlearning_rate = 0.1\n')
    before = experiment_digest(deployed_experiments(tmp_path / "e.toml", trust=[tmp_path]))
    (tmp_path / "imported_by_it.py").write_text("x = 1\n")
    assert experiment_digest(deployed_experiments(tmp_path / "e.toml", trust=[tmp_path])) != before


def test_an_open_round_is_another_one_when_data_change(hospitals):
    """Rounds that nobody closed are answered again, and after a correction of one label the difference would be that client."""
    first, _ = asked(hospitals)
    hospitals.restart()
    again, _ = asked(hospitals)
    assert first is not None
    assert torch.equal(first, again)
    targets = hospitals.settings[1].folder / "people" / "targets.npy"
    labels = np.load(targets)
    np.save(targets, np.roll(labels, 1))
    hospitals.restart()
    found, said = asked(hospitals)
    assert found[0] == 20                                # clients of the two nodes whose data are what they were
    assert "round 0 of this training was held here before" in said


def test_an_audit_log_is_for_its_operator_only(hospitals):
    asked(hospitals)
    for one in hospitals.settings.values():
        assert stat.S_IMODE((one.folder / AUDIT).stat().st_mode) == 0o600


OWN = 'rounds = 1\n[task.module]\npart = "{}"\n[sample]\ncohort_size = 4\n[local]\nlearning_rate = 0.1\n'
MAKE = "import torch\ndef make():\n    return torch.nn.Linear(5, 3)\n"


def digest_of_code(folder, part):
    (folder / "e.toml").write_text(OWN.format(part))
    return experiment_digest(deployed_experiments(folder / "e.toml", trust=[folder]))


def test_files_of_one_name_are_each_in_the_digest(tmp_path):
    (tmp_path / "ours_twice.py").write_text(MAKE)
    (tmp_path / "zz").mkdir()
    (tmp_path / "zz" / "ours_twice.py").write_text("# nothing\n")
    before = digest_of_code(tmp_path, "ours_twice:make")
    (tmp_path / "ours_twice.py").write_text(MAKE + "# another\n")
    assert digest_of_code(tmp_path, "ours_twice:make") != before


def test_all_that_the_code_can_import_is_in_the_digest(tmp_path):
    """Modules beside a package that is named, code behind a link, and compiled modules."""
    folder, elsewhere = tmp_path / "node", tmp_path / "elsewhere"
    (folder / "ours_package").mkdir(parents=True)
    elsewhere.mkdir()
    (folder / "ours_package" / "models.py").write_text(MAKE)
    (folder / "linked").symlink_to(elsewhere)
    seen = [digest_of_code(folder, "ours_package.models:make")]
    for place in (folder / "beside_package.py", elsewhere / "behind_link.py", folder / "compiled.so"):
        place.write_text("x = 1\n")
        seen.append(digest_of_code(folder, "ours_package.models:make"))
    assert len(set(seen)) == 4


def test_bytecode_beside_accepted_code_is_not_run(tmp_path):
    """An unchecked hash in its header: Python itself would run it without a look at the source."""
    (tmp_path / "ours_bytecode.py").write_text(MAKE)
    forged = compile("def make():\n    raise SystemExit('forged')\n", "ours_bytecode.py", "exec")
    (tmp_path / "__pycache__").mkdir()
    Path(importlib.util.cache_from_source(str(tmp_path / "ours_bytecode.py"))).write_bytes(
        importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8) + marshal.dumps(forged))
    (tmp_path / "e.toml").write_text(OWN.format("ours_bytecode:make"))
    experiment, = deployed_experiments(tmp_path / "e.toml", trust=[tmp_path])
    assert experiment.task.make(0).module.in_features == 5


def test_without_consent_a_node_answers_nothing_and_sends_no_info(hospitals):
    for one in hospitals.settings.values():
        (one.folder / "accepted.json").unlink()
    found, said = asked(hospitals)
    assert found is None
    assert said.count("this node's operator has not accepted its experiment. Its operator decides: `fedtail node accept") == 3
    with pytest.raises(Refused, match="has not accepted its experiment"):
        signed_node_info(hospitals.settings[0], encode_request(bytes(32)))
    with pytest.raises(Refused, match="has not accepted"):
        check_readiness(hospitals.settings[0])
    assert [one["what"] for one in node_log(hospitals.settings[0])[0]] == ["accepted", "refused"]


def test_consent_is_checked_for_every_round(hospitals):
    assert asked(hospitals)[0] is not None
    south = hospitals.settings[1]
    kept = (south.folder / "accepted.json").read_bytes()
    (south.folder / "accepted.json").unlink()
    assert "has not accepted its experiment" in asked(hospitals, 1)[1]
    (south.folder / "accepted.json").write_bytes(kept)
    assert asked(hospitals, 2)[1] == ""
    (south.folder / "experiment.toml").write_text(BARE.replace("0.2", "0.3"))
    assert "experiment file or code changed since its process read it" in asked(hospitals, 3)[1]
    hospitals.restart()
    assert "what this node would be asked is not what its operator accepted" in asked(hospitals, 4)[1]


def change(settings, old, new, file="policy.toml"):
    """Edit a file of a node while its process runs."""
    path = settings.folder / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(("old", "new", "text"), [
    ("smallest_cohort = 2 ", "smallest_cohort = 31 ", "the round has 30 clients, and this node's policy takes part in those of 31 or more"),
    ("smallest_tail = 1 ", "smallest_tail = 11 ", "10 clients of this node are in the round, and its policy has 11 or more"),
    ("rounds_without_noise = 3", "rounds_without_noise = 1", "this data set has answered 1 rounds, all that its policy allows"),
    ("rounds_without_noise = 3", "epsilon = 1.0\ndelta = 1e-6", "under a policy without an epsilon, and no epsilon can be kept")])
def test_a_policy_that_is_tightened_holds_in_the_next_round_of_a_node_that_stays(hospitals, old, new, text):
    assert asked(hospitals)[1] == ""
    change(hospitals.settings[1], old, new)
    found, said = asked(hospitals, 1)
    assert found[0] == 20                                # clients of the two others
    assert text in said
    change(hospitals.settings[1], new, old)
    assert asked(hospitals, 2)[1] == ""


def test_a_policy_that_is_removed_or_broken_holds_too(tmp_path, caplog):
    hospitals = Nodes(tmp_path, trainings=5)
    path = hospitals.settings[1].folder / "policy.toml"
    whole = path.read_text()
    assert asked(hospitals)[1] == ""
    for k, wrong in enumerate((None, "", "smallest_cohort = \"\"", whole.replace("repeats", "repeat"), whole + "epsilon = 1.0\ndelta = 0.1\n")):
        path.unlink() if wrong is None else path.write_text(wrong)
        found, said = asked(hospitals, 1 + k)
        assert found[0] == 20
        assert "the policy of this node is missing or not valid" in said
        assert str(path) not in said                     # which only its own log says
    assert f"there is no policy {path}" in caplog.text
    path.write_text("# its operator's\n" + whole)        # what is allowed is the same: nothing has changed
    server = DepartingServer(hospitals)
    server.begin(9)
    path.write_text(whole)
    assert server.read(train_question(hospitals.method))[0] == 30
    server.begin(10)
    path.unlink()                                        # within a round
    assert server.read(train_question(hospitals.method))[0] == 20
    assert "the policy of this node is missing or not valid" in server.said


@pytest.mark.parametrize("restarted", [False, True], ids=["stays", "started again"])
def test_a_policy_that_is_loosened_allows_nothing_more_in_an_open_round(tmp_path, restarted):
    """A node of Flower is another process for every message: there, too, a round is held under the policy of its beginning."""
    hospitals = Nodes(tmp_path)
    for one in hospitals.settings.values():
        change(one, "questions = 16", "questions = 1")
    server, question = DepartingServer(hospitals), train_question(hospitals.method)
    server.begin(0)
    assert server.read(question)[0] == 30
    assert server.read(question.count_question()) is None
    assert server.said.count("more than 1 questions are asked in round 0") == 3
    for one in hospitals.settings.values():
        change(one, "questions = 1", "questions = 2")
    if restarted:
        hospitals.sites = {k: one.make_site().restore(hospitals.sites[k].save()) for k, one in hospitals.settings.items()}
    for _ in range(2):
        assert server.read(question.count_question()) is None
        assert server.said.count("the policy of this node changed since round 0 began: it answers nothing more in that round") == 3
    server.begin(1)
    assert server.read(question)[0] == 30
    assert server.read(question.count_question()) is not None
    assert DataBudget(hospitals.settings[0].budget_folder, POLICY).rounds_answered == 2


def test_changed_settings_of_a_node_that_stays_are_refused_until_it_is_started_again(hospitals):
    south = hospitals.settings[1]
    file, whole = south.folder / "node.toml", (south.folder / "node.toml").read_text()
    file.write_text("# its operator's\n" + whole)
    assert asked(hospitals)[1] == ""
    change(south, "minimum = 2", "minimum = 3", "node.toml")
    found, said = asked(hospitals, 1)
    assert found[0] == 20
    assert "the settings of this node changed since its process read them (minimum): its operator must start the node again" in said
    with pytest.raises(Refused, match=r"\(minimum\): its operator must start the node again"):
        signed_node_info(south, encode_request(bytes(32)))
    for wrong in (None, "minimum = ", 'secret = "s3cret"\n' + whole):
        file.unlink() if wrong is None else file.write_text(wrong)
        _, said = asked(hospitals, 1)
        assert "the file of this node's settings is missing or not valid" in said
        assert "s3cret" not in said
    file.write_text(whole)
    assert asked(hospitals, 1)[1] == ""
    change(south, "minimum = 2", "minimum = 3", "node.toml")
    hospitals.settings[1] = NodeSettings.read(file)
    hospitals.restart()
    assert asked(hospitals, 2)[1] == "the session's threshold is 2, and this client requires 3 or more."


def test_other_data_or_another_place_of_the_budget_need_consent(hospitals):
    south = hospitals.settings[1]
    shutil.copytree(south.folder / "people", south.folder / "renamed")
    hospitals.settings[1] = replace(south, data="renamed")
    hospitals.restart()
    assert "data or the place of their budget changed" in asked(hospitals)[1]
    assert changes(hospitals.settings[1], hospitals.settings[1].read_experiments()) == [
        'budget: was "people.budget", is "renamed.budget"', 'data: was "people", is "renamed"']
    accept(hospitals.settings[1], digest_of(hospitals.settings[1]))
    hospitals.restart()
    assert asked(hospitals, 1)[1] == ""


def test_a_budget_that_was_lost_is_not_begun_anew(hospitals):
    assert asked(hospitals)[0] is not None
    shutil.rmtree(hospitals.settings[1].budget_folder)
    hospitals.restart()
    assert "the record rounds.jsonl is not what was written" in asked(hospitals, 1)[1]
    with pytest.raises(Refused, match="is not what was written"):
        check_readiness(hospitals.settings[1])


def test_an_audit_log_that_was_removed_is_noticed(hospitals):
    south = hospitals.settings[1]
    for one in (south.audit_file, south.audit_file.with_name(f"{AUDIT}.head")):
        one.unlink()
    assert "audit log does not hold its operator's consent" in asked(hospitals)[1]
    accept(south, digest_of(south))
    assert asked(hospitals, 1)[1] == ""


# The budget

def test_a_policy_that_counts_rounds_counts_those_with_noise_too(tmp_path):
    """Otherwise noise would be averaged away over rounds that are free."""
    budget = DataBudget(tmp_path, POLICY)
    for k in range(2):
        budget.begin_round(b"t", k, b"o")
        budget.charge(b"t", k, b"o", {b"q": NOISY_CHARGE})
    budget.begin_round(b"t", 2, b"o")
    with pytest.raises(Refused, match="has answered 2 rounds, all that its policy allows"):
        budget.charge(b"t", 2, b"o", {b"q": NOISY_CHARGE})
    with pytest.raises(Refused, match="an answer with noise was lost"):
        budget.charge(b"t", 1, b"o", {b"q": NOISY_CHARGE})


def test_after_rounds_without_an_epsilon_none_can_be_kept(tmp_path):
    budget = DataBudget(tmp_path, POLICY)
    budget.begin_round(b"t", 0, b"o")
    budget.charge(b"t", 0, b"o", {b"q": BARE_CHARGE})
    private = DataBudget(tmp_path, replace(POLICY, rounds_without_noise=None, epsilon=100.0, delta=1e-6))
    with pytest.raises(Refused, match="policy of this node changed since round 0 began"):
        private.charge(b"t", 0, b"o", {b"p": NOISY_CHARGE})
    private.begin_round(b"t", 1, b"o")
    with pytest.raises(Refused, match="under a policy without an epsilon, and no epsilon can be kept"):
        private.charge(b"t", 1, b"o", {b"p": NOISY_CHARGE})


def test_a_round_that_was_over_is_another_one_when_it_is_held_again(tmp_path):
    budget = DataBudget(tmp_path, replace(POLICY, repeats=1))
    for _ in range(2):
        budget.begin_round(b"t", 0, b"o")
        budget.begin_round(b"t", 0, b"o")                       # before it is over it is the same
        budget.charge(b"t", 0, b"o", {b"q": BARE_CHARGE})
        budget.end_round(b"t", 0, b"o")
        budget.end_round(b"t", 0, b"o")
    assert DataBudget(tmp_path, POLICY).rounds_answered == 2
    with pytest.raises(Refused, match="was held here before, and its policy allows 1"):
        budget.begin_round(b"t", 0, b"o")


def test_a_ledger_that_was_cut_or_changed_is_noticed(tmp_path):
    policy = replace(POLICY, rounds_without_noise=None, epsilon=100.0, delta=1e-6)
    budget = DataBudget(tmp_path, policy)
    budget.begin_round(b"t", 0, b"o")
    for k in range(3):
        budget.charge(b"t", 0, b"o", {bytes([k]): NOISY_CHARGE})
    whole = (tmp_path / LEDGER).read_bytes()
    for damaged in (b"", whole[: whole[:-1].rfind(b"\n") + 1], whole.replace(b"4.0", b"9.0")):
        (tmp_path / LEDGER).write_bytes(damaged)
        with pytest.raises(Refused, match=r"the record ledger\.jsonl is not what was written"):
            DataBudget(tmp_path, policy).charge(b"t", 0, b"o", {b"n": NOISY_CHARGE})
    (tmp_path / LEDGER).write_bytes(whole)
    DataBudget(tmp_path, policy).charge(b"t", 0, b"o", {b"n": NOISY_CHARGE})


def spend(folder, name, answered):
    budget = DataBudget(folder, replace(POLICY, rounds_without_noise=7))
    for k in range(6):
        training = f"{name} {k}".encode()
        try:
            budget.begin_round(training, 0, b"o")
            budget.charge(training, 0, b"o", {b"q": BARE_CHARGE})
            answered.put(training)
        except Refused:
            pass


def test_several_processes_spend_one_budget(tmp_path):
    fork = multiprocessing.get_context("fork")
    answered = fork.SimpleQueue()
    workers = [fork.Process(target=spend, args=(tmp_path, name, answered)) for name in "abc"]
    for one in workers:
        one.start()
    for one in workers:
        one.join(60)
    found = set()
    while not answered.empty():
        found.add(answered.get())
    assert len(found) == 7
    assert DataBudget(tmp_path, POLICY).rounds_answered == 7


def test_a_node_whose_disk_is_full_refuses_and_loses_nothing(hospitals, monkeypatch):
    assert asked(hospitals)[0] is not None
    record = hospitals.settings[1].budget_folder / ROUNDS
    before, real = record.read_bytes(), os.write

    def full(file, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(audit_log.os, "write", full)
    found, said = asked(hospitals, 1)
    assert found is None
    assert said.count("OSError on the node") == 3
    assert record.read_bytes() == before
    monkeypatch.setattr(audit_log.os, "write", real)
    assert asked(hospitals, 2)[1] == ""
    hospitals.restart()
    assert hospitals.settings[1].data_budget().rounds_answered == 2


def test_how_many_rounds_are_left_is_the_most_that_fit():
    event = RoundEvent((GaussianRelease(8.0, 2.0, "the updates"),), NoSampling())
    for spent in ([], [(event, 5)]):
        left = rounds_left(spent, event, 4.0, 1e-6)
        assert left > 0
        assert epsilon_at([*spent, (event, left)], 1e-6) <= 4.0 < epsilon_at([*spent, (event, left + 1)], 1e-6)
    assert rounds_left([(event, 10**4)], event, 4.0, 1e-6) == 0


# What is logged, on both sides

def test_the_logs_of_both_sides_agree_and_say_what_was_not_asked(hospitals, tmp_path):
    from fedtail.deployment import RemoteFleet

    north = hospitals.settings[0]
    run = DeployedRun(north.read_experiments()[0], 0, tmp_path / "run")
    run.run(RemoteFleet(hospitals.exchange, hospitals.registry))
    entries, problems = run_log(tmp_path / "run")
    theirs, none = node_log(north)
    assert (problems, none) == ([], [])
    assert {one["what"] for one in entries} == {"started", "asked", "answered", "finished"}
    assert [one["what"] for one in theirs] == ["accepted", *["opened", "charged", "answered", "closed"] * 3]
    assert {one["context"] for one in theirs if one["what"] == "answered"} == {one["context"] for one in entries if one["what"] == "asked"}
    assert compare_logs(entries, theirs) == []
    fewer = [one for one in entries if one["what"] != "asked" or one["round"] != 1]
    assert len(compare_logs(fewer, theirs)) == 1
    assert entries[0]["method"] == theirs[0]["methods"]["bare"]
    done = CliRunner().invoke(app, ["deploy", "log", str(tmp_path / "run"), "--verify", "--node", str(north.audit_file)])
    assert (done.exit_code, done.stdout) == (0, f"{len(entries)} lines, none cut, changed, moved or left out.\n")
    path = tmp_path / "run" / AUDIT
    for kept, head in ((path.read_bytes().splitlines()[:-3], True), (path.read_bytes().splitlines()[:-4], False)):
        path.write_bytes(b"".join(one + b"\n" for one in kept))
        if not head:
            path.with_name(f"{AUDIT}.head").unlink()
        done = CliRunner().invoke(app, ["deploy", "log", str(tmp_path / "run"), "--verify"])
        assert done.exit_code == 1
        assert "lines are missing at the end" in done.stderr


# The commands

def test_the_commands_of_an_operator_from_the_folder_to_a_change(hospitals, tmp_path):
    north = hospitals.settings[0]
    file = north.folder / "node.toml"
    (north.folder / "accepted.json").unlink()
    assert command("check", file).exit_code == 2
    said = command("accept", file).stdout
    assert "north is asked about the clients in people, by experiment.toml:" in said
    assert "bare (Mean, LocalSGD, WeightedMean), 3 rounds, without noise that clients add" in said
    assert "the updates, by WeightedMean: a sum over clients, without noise" in said
    assert "It costs 3 rounds. Of 3 that the policy allows 3 are left: enough." in said
    words = shlex.split(said.strip().splitlines()[-1].removeprefix("To accept this: "))
    assert words[:3] == ["fedtail", "node", "accept"]
    assert command("accept", file, "0" * 64).exit_code == 2
    assert command(*words[2:]).exit_code == 0
    done = command("check", file)
    assert done.exit_code == 0, done.output
    assert "The experiment is accepted, and the node may start." in done.stdout
    assert asked(hospitals)[0] is not None
    north_status = command("status", file).stdout
    assert f"takes part in {words[-1]}:" in north_status
    assert "answered last: 20" in north_status
    assert "left: 2 rounds of bare" in north_status
    (north.folder / "experiment.toml").write_text(BARE.replace("learning_rate = 0.2", "learning_rate = 0.3").replace("rounds = 3", "rounds = 5"))
    said = command("accept", file).stdout
    assert "It costs 5 rounds. Of 3 that the policy allows 2 are left: NOT enough, the rest is refused." in said
    assert f"You accepted {words[-1]}. Since then:" in said
    assert "methods.bare.local.learning_rate: was 0.2, is 0.3" in said
    assert "methods.bare.rounds: was 3, is 5" in said
    assert "answers nothing: what this node would be asked is not what its operator accepted" in command("status", file).stdout
    assert command("log", file, "--verify").exit_code == 0
    assert "  answered  training=" in command("log", file).stdout
    path = north.audit_file
    path.write_bytes(path.read_bytes().replace(b'"round": 0', b'"round": 7', 1))
    done = command("log", file, "--verify")
    assert done.exit_code == 1
    assert "NOT WHAT WAS WRITTEN: line" in done.stderr
    assert command("status", file).exit_code == 1


def test_what_a_private_experiment_costs_is_told(tmp_path):
    hospitals = Nodes(tmp_path, PRIVATE)
    file = hospitals.settings[0].folder / "node.toml"
    said = command("accept", file).stdout
    policy = hospitals.settings[0].read_policy()
    assert "a sum over clients of 18 numbers, with noise 2 times what one client moves it at most, by shares of 12 clients or more" in said
    assert f"of {policy.epsilon:g} that the policy allows: enough." in said
    assert "the same." in said
    assert "left: 3 rounds of private" in command("budget", file).stdout


def test_a_node_is_run_by_the_command_that_deploy_init_prints(tmp_path, hospitals, monkeypatch):
    (tmp_path / "e.toml").write_text(BARE)
    made = write_deployment_folder(tmp_path / "d", tmp_path / "e.toml", ["a", "b"], "fl.example.org", 8000)
    for commands in (startup_commands(made, ["a", "b"], "fl.example.org", 8000), cell_commands(made, "fl.example.org", 8000)):
        assert commands.startswith("Copy each nodes/NAME to its node over a way you trust, and delete it here.\n")
        assert "fedtail node run node.toml" in commands
    folder = hospitals.settings[0].folder
    shutil.copy(made.node_folder("a") / "gate.toml", folder)
    started = []
    monkeypatch.setattr("fedtail.deployment.flower.process.join", lambda *given: started.append(given))
    run_node(folder)
    assert started == [(folder, "fl.example.org:8000", "node.toml")]
    (folder / "accepted.json").unlink()
    with pytest.raises(Refused, match="has not accepted"):
        run_node(folder)
    assert len(started) == 1


def test_a_node_of_neither_transport_or_both_is_not_run(hospitals):
    folder = hospitals.settings[0].folder
    for names in ((), ("gate.toml", "server.toml")):
        for name in names:
            (folder / name).write_text('host = "h"\nport = 1\n')
        with pytest.raises(ValueError, match=r"must have either gate\.toml, for Flower, or server\.toml, for NVFlare"):
            run_node(folder)


def test_files_of_a_node_hold_no_data(hospitals):
    """Not one number of the data, as text or bytes, is in what it logs; digests and counts are."""
    asked(hospitals)
    text = hospitals.settings[0].audit_file.read_text()
    assert json.loads(text.splitlines()[-1])["what"] == "answered"
    rows = truth(train_question(hospitals.method), list(range(10)))
    assert not any(f"{value:.4g}" in text for value in rows[1:].tolist())
    assert torch.isfinite(rows).all()


@pytest.mark.parametrize(("file", "transport"), [("server.toml", "nvflare"), ("gate.toml", "flwr")])
def test_a_second_process_of_a_node_does_not_start(hospitals, file, transport):
    """Two of one name take each other's place at the server, and the second of Flower deletes what the first has written."""
    pytest.importorskip(transport)
    folder = hospitals.settings[0].folder
    (folder / file).write_text('host = "127.0.0.1"\nport = 1\n')
    with only_process(folder):
        done = CliRunner().invoke(app, ["node", "run", str(folder / "node.toml")])
    assert done.exit_code
    assert f"another process runs the node of {folder}" in done.stderr.replace("\n", " ")
    with only_process(folder):                                 # and when the first has ended, another may
        pass
