"""What a ledger knows of its own past: its file against checkpoints, what a model was before, old formats and new prices."""

from __future__ import annotations

import json
import resource
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import attack_budget_retries
import attack_ledger_deleted
import attack_warm_start
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner

import fedtail
from fedtail import Ledger, PrivacyBudget
from fedtail.cli import app
from fedtail.deployment.deployed_experiment import deployed_experiment
from fedtail.deployment.deployed_run import DeployedRun
from fedtail.model_file import model_bytes, read_model, training_record
from fedtail.models import SoftmaxRegression
from fedtail.privacy import BudgetSpent, GaussianRelease, NoSampling, PoissonSampling, RoundEvent
from fedtail.privacy.accounting import epsilon_at
from fedtail.privacy.history import EarlierHistory
from fedtail.privacy.ledger_file import LedgerError, LedgerFile
from fedtail.privacy.statement import (
    SIMULATED,
    UNTOLD,
    describe_guarantee_change,
    guarantee_change,
    privacy_statement,
    release_obstacles,
)
from fedtail.runs import RunFolder, run
from fedtail.runs.checkpoint import Checkpoints, ledger_mark
from fedtail.runs.execution import Interrupted
from fedtail.runs.files import RunError, RunRefused
from fedtail.training import Trained, resume, train

from cases import small_population
from remote_cases import Sites
from run_cases import Onlooker, experiment

UPDATE = GaussianRelease(1.5, 2.0, "the updates")
EVERYONE, SAMPLED = RoundEvent((UPDATE,), NoSampling()), RoundEvent((UPDATE,), PoissonSampling(0.1))
OS = PrivacyBudget(delta=1e-3, randomness="os")
PRIVATE = fedtail.dp_fedavg(40, 0.1, 2.0, cohort_size=20, learning_rate=0.1, noise="discrete")
TASK = fedtail.Task(SoftmaxRegression(5, 3))
DEPLOYED = """\
rounds = 3
[task.module]
part = "SoftmaxRegression"
features = 5
classes = 3
[sample]
cohort_size = 20
[channel]
part = "SecureChannel"
threshold = 8
minimum_contributors = 3
"""


def a_round(ledger: Ledger, number: int, *releases: GaussianRelease, planned: RoundEvent = SAMPLED) -> None:
    ledger.open(number, planned)
    for release in releases:
        ledger.charge([release])
    ledger.close()


# What may be spent

def test_random_conversations_never_cost_more_than_was_promised(monkeypatch):
    assert attack_budget_retries.attack(8).held

    def remembers_too_long(ledger: Ledger, planned: RoundEvent) -> int:
        """As it was: what is left of the first answer, whatever was charged since."""
        left = ledger.__dict__.setdefault("left", ledger.affordable_rounds(planned))
        ledger.__dict__["left"] = left - 1
        return left

    monkeypatch.setattr(Ledger, "_count_fitting_rounds", remembers_too_long)
    assert not attack_budget_retries.attack(8).held


def test_a_lowered_budget_holds_at_once():
    ledger = Ledger(PrivacyBudget(12.0, 1e-5))
    a_round(ledger, 0, UPDATE, planned=EVERYONE)
    ledger.budget = PrivacyBudget(6.0, 1e-5)
    number = 0
    with suppress(BudgetSpent):
        for number in range(1, 100):
            a_round(ledger, number, UPDATE, planned=EVERYONE)
    assert epsilon_at([(EVERYONE, number)], 1e-5) <= 6.0 < epsilon_at([(EVERYONE, number + 1)], 1e-5)


def test_the_round_under_way_is_not_counted_twice():
    """A second charge fits whenever the round with it fits, and the budget is nearly used up by it."""
    twice = RoundEvent((UPDATE, UPDATE), NoSampling())
    epsilon = epsilon_at([(twice, 1)], 1e-5)
    ledger = Ledger(PrivacyBudget(epsilon * 1.0001, 1e-5))
    a_round(ledger, 0, UPDATE, UPDATE, planned=EVERYONE)
    assert ledger.guarantee().epsilon == pytest.approx(epsilon)
    short = Ledger(PrivacyBudget(epsilon * 0.9999, 1e-5))
    with pytest.raises(BudgetSpent):
        a_round(short, 0, UPDATE, UPDATE, planned=EVERYONE)
    assert dict(short.rounds) == {EVERYONE: 1}


def test_sampled_rounds_of_several_kinds_keep_to_the_budget_by_another_accountant():
    """Retries, lost rounds and two kinds of rounds; priced by dp-accounting alone."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    one, more = (RoundEvent((GaussianRelease(1.0), *errors), PoissonSampling(0.3)) for errors in ((), (GaussianRelease(2.0),)))
    ledger, asked = Ledger(PrivacyBudget(4.0, 1e-3)), []
    with suppress(BudgetSpent):
        for number in range(200):
            planned = more if number % 4 == 0 else one
            releases = planned.releases[:1] if number % 7 == 3 else (*planned.releases, *planned.releases[:number % 5 == 2])
            asked.append([])
            ledger.open(number, planned)
            for release in releases:
                ledger.charge([release])
                asked[-1].append(release.noise_multiplier**-2)
    accountant = PLDAccountant()
    for squares in filter(None, asked):
        accountant.compose(PoissonSampledDpEvent(0.3, GaussianDpEvent(sum(squares) ** -0.5)))
    assert number > 3
    assert 3.2 < accountant.get_epsilon(1e-3) <= 4.0 * (1 + 1e-4)               # its grid is another


# The file

def test_a_ledger_has_one_writer(tmp_path):
    first = Ledger(path=tmp_path / "ledger.jsonl")
    a_round(first, 0, UPDATE)
    second = Ledger(path=tmp_path / "ledger.jsonl")
    a_round(second, 1, UPDATE)
    with pytest.raises(LedgerError, match="was changed while this run was writing it"):
        a_round(first, 1, UPDATE)
    assert dict(Ledger(path=tmp_path / "ledger.jsonl").rounds) == {SAMPLED: 2}


def test_what_a_full_disk_took_a_part_of_is_not_on_the_ledger_and_not_released(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path=path)
    a_round(ledger, 0, UPDATE)
    ledger.open(1, SAMPLED)
    whole, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 5, limits[1]))      # the system writes 5 bytes, and refuses the rest
    try:
        with pytest.raises(OSError, match="File too large"):
            ledger.charge([UPDATE])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == whole
    assert dict(ledger.rounds) == {SAMPLED: 1}
    ledger.charge([UPDATE])                                                     # somebody has made room
    assert dict(Ledger(path=path).rounds) == {SAMPLED: 2}


@pytest.mark.filterwarnings("ignore")
def test_rounds_that_were_skipped_are_written_down(tmp_path):
    ledger = Ledger(OS, tmp_path / "ledger.jsonl")
    few = replace(PRIVATE, sample=fedtail.Poisson(0.01))
    few = replace(few, aggregate=replace(few.aggregate, total=0.4))
    trained = train(few, TASK, small_population(40), rounds=3, privacy=ledger)
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [line for line in lines if "skip" in line] == [{"skip": 0}, {"skip": 1}, {"skip": 2}]
    assert (ledger.rounds, sorted(ledger.round_numbers), trained.rounds) == ((), [0, 1, 2], 3)
    assert sorted(Ledger(path=tmp_path / "ledger.jsonl").round_numbers) == [0, 1, 2]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that has done 4 of 6 rounds, with checkpoints after 2 and 4."""
    folder = tmp_path_factory.mktemp("history") / "run"
    with suppress(Interrupted):
        run(experiment("delta_fl"), 0, folder, Onlooker(stop_after=4))
    return folder


def damaged(folder: Path, place: Path, content: bytes | None) -> Path:
    shutil.copytree(folder, place)
    (place / "ledger.jsonl").unlink()
    if content is not None:
        (place / "ledger.jsonl").write_bytes(content)
    return place


def test_a_run_goes_on_only_with_the_ledger_it_had(stopped, tmp_path):
    whole = (stopped / "ledger.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    wrong = {"deleted": None, "cut": b"".join(lines[:-3]), "changed": whole.replace(b'"open": 3', b'"open": 2'), "empty": b"", "a byte less": whole[:-1]}
    for name, content in wrong.items():
        folder = damaged(stopped, tmp_path / name, content)
        with pytest.raises(RunRefused, match=r"does not hold what it held when the checkpoint of round 4 was written .* Put the whole file back"):
            run(experiment("delta_fl"), 0, folder, Onlooker(), resume=True)
        refused = CliRunner().invoke(app, ["privacy", str(folder)])
        assert (refused.exit_code, "does not hold what it held" in refused.output) == (1, True)
        assert ((folder / "ledger.jsonl").read_bytes() if content is not None else None) == content      # nor is it changed
    longer = damaged(stopped, tmp_path / "longer", whole + b'{"open": 4, "sampling": {"kind": "NoSampling"}, "channel": "", "randomness": "seed"}\n{"ask": [0]}\n{"as')
    done = run(experiment("delta_fl"), 0, longer, Onlooker(), resume=True)      # a crash after charging: kept
    assert (longer / "ledger.jsonl").read_bytes().startswith(whole + b'{"open": 4, "sampling": {"kind": "NoSampling"}')
    assert done.result["round"] == 6


def test_a_damaged_ledger_is_found_at_a_release_and_without_the_check_it_would_not_be(monkeypatch):
    assert attack_ledger_deleted.attack(("cut after a round",)).held
    monkeypatch.setattr(Ledger, "check_against_mark", lambda *_: None)
    monkeypatch.setattr(LedgerFile, "matches_mark", lambda *_: True)
    assert not attack_ledger_deleted.attack(("cut after a round",)).held


def without_mark(path: Path) -> None:
    """A checkpoint as version 0.2.0 wrote it."""
    from fedtail.runs.checkpoint import _content_digest

    with safe_open(path, "pt") as file:
        told, tensors = json.loads(file.metadata()["about"]), {name: file.get_tensor(name) for name in file.keys()}      # noqa: SIM118
    del told["lines"]["ledger.jsonl"]
    about = json.dumps(told, sort_keys=True)
    save_file(tensors, path, {"about": about, "check": _content_digest(tensors, about)})


def test_a_run_from_before_goes_on_and_says_what_cannot_be_verified(stopped, tmp_path):
    folder = tmp_path / "old"
    shutil.copytree(stopped, folder)
    for path in Checkpoints(folder).files:
        without_mark(path)
    old = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    (folder / "ledger.jsonl").write_text("".join(json.dumps({k: v for k, v in line.items() if k != "randomness"}) + "\n" for line in old))
    assert "cannot be verified" in CliRunner().invoke(app, ["privacy", str(folder), "--for-release"]).output
    run(experiment("delta_fl"), 0, folder, Onlooker(), resume=True)
    assert "whether ledger.jsonl is whole before round 4 cannot be verified" in (folder / "log.txt").read_text()
    ledger = Ledger(path=folder / "ledger.jsonl")
    [earlier] = ledger.earlier_histories
    assert (earlier.round, earlier.is_known, set(ledger.randomness_sources)) == (4, False, {"", "seed"})
    assert release_obstacles(ledger)[1:] == [f"private with respect to these rounds only: they began with {earlier.what}", SIMULATED, UNTOLD]
    assert ledger_mark(folder)[1].rounds == 6


def test_a_deployed_run_goes_on_only_with_the_ledger_it_had(tmp_path):
    (tmp_path / "experiment.toml").write_text(DEPLOYED)
    wanted, folder = deployed_experiment(tmp_path / "experiment.toml"), tmp_path / "run"

    def kill() -> None:
        if (folder / "ledger.jsonl").exists():                # not before the first round
            raise OSError("the power is gone")

    with pytest.raises(OSError, match="the power is gone"):
        DeployedRun(wanted, 0, folder).run(Sites().fleet(), kill)
    whole = (folder / "ledger.jsonl").read_bytes()
    (folder / "ledger.jsonl").unlink()
    with pytest.raises(RunRefused, match="does not hold what it held when the checkpoint of round 1 was written"):
        DeployedRun(wanted, 0, folder, resume=True).run(Sites().fleet())
    (folder / "ledger.jsonl").write_bytes(whole)
    assert DeployedRun(wanted, 0, folder, resume=True).run(Sites().fleet()).rounds == wanted.rounds


def test_a_finished_run_whose_ledger_is_gone_is_not_finished(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.showwarning", lambda *_: None)
        done = run(experiment("private", "rounds=2"), 3, tmp_path / "run", Onlooker())
    assert done.result["ledger"] == json.loads((done.path / "privacy.json").read_text())["ledger"]
    (done.path / "ledger.jsonl").unlink()
    with pytest.raises(RunError, match="does not hold what it held"):
        run(experiment("private", "rounds=2"), 3, done.path, Onlooker(), resume=True)


# What a model was before

def test_every_way_to_hand_a_model_over_is_qualified_and_would_be_missed_otherwise(monkeypatch):
    assert attack_warm_start.attack().held
    monkeypatch.setattr(Ledger, "record_earlier_history", lambda *_: None)
    assert not attack_warm_start.attack().held


def test_a_known_start_is_priced_with_its_rounds():
    population = small_population(40)
    earlier = train(PRIVATE, TASK, population, rounds=5, privacy=OS)
    later = train(PRIVATE, TASK, population, rounds=1, start=earlier.module, privacy=OS)
    together = epsilon_at([(event, count + 1) for event, count in earlier.ledger.rounds], 1e-3)
    found = later.ledger.guarantee()
    assert found.epsilon == train(PRIVATE, TASK, population, rounds=1, privacy=OS).ledger.guarantee().epsilon < together
    assert str(found) == f"private with respect to these rounds only: {replace(found, only='')}; they began with a model that was trained for 5 " \
                         f"rounds; together with the rounds that made it, epsilon is {together:.4g}"
    assert release_obstacles(later.ledger) == []                                        # all of it is private and known
    third = train(PRIVATE, TASK, population, rounds=1, start=later.module, privacy=OS)
    assert dict(third.ledger.earlier_histories[0].rounds) == {event: count + 1 for event, count in earlier.ledger.rounds}
    same = train(PRIVATE, TASK, population, rounds=1, start=earlier.module, privacy=earlier.ledger.copy())
    assert (same.ledger.earlier_histories, same.ledger.guarantee().epsilon) == ((), pytest.approx(together))      # its own ledger has it all
    assert resume(later, population, rounds=1).ledger.earlier_histories == later.ledger.earlier_histories
    alone = resume(Trained(PRIVATE, TASK, earlier.state), population, rounds=1, privacy=OS)
    assert release_obstacles(alone.ledger) == ["private with respect to these rounds only: they began with a model of unknown history"]
    assert privacy_statement(alone.ledger, 6)["only"] == "they began with a model of unknown history"


def test_randomness_is_recorded_by_round(tmp_path):
    path = tmp_path / "ledger.jsonl"
    a_round(Ledger(PrivacyBudget(delta=1e-3), path), 0, UPDATE)
    a_round(Ledger(OS, path), 1, UPDATE)
    for ledger in (Ledger(OS, path), Ledger(OS, path).copy()):
        assert set(ledger.randomness_sources) == {"seed", "os"}
        assert SIMULATED in release_obstacles(ledger)
        assert privacy_statement(ledger, 2)["randomness"] == "seed and os"
    known = train(PRIVATE, TASK, small_population(40), rounds=1, privacy=PrivacyBudget(delta=1e-3))
    goes_on = resume(known, small_population(40), rounds=1, privacy=OS)
    assert release_obstacles(goes_on.ledger) == [SIMULATED]


def test_a_model_file_carries_its_ledger(tmp_path):
    population, ledger = small_population(40), Ledger(OS, tmp_path / "ledger.jsonl")
    earlier = train(PRIVATE, TASK, population, rounds=3, privacy=ledger)
    file = tmp_path / "model.safetensors"
    file.write_bytes(model_bytes(earlier.module, training_record(ledger, 3)))
    with safe_open(file, "pt") as opened:
        assert json.loads(opened.metadata()["fedtail"])["ledger"] == list(ledger.file_mark())
    a_round(ledger, 3, UPDATE)                                                  # what came later is not this model's
    tensors, history = read_model(file)
    assert all(torch.equal(tensors[name], value) for name, value in earlier.module.state_dict().items())
    assert (sum(count for _, count in history.rounds), history.sources) == (3, ("os",))
    later = train(PRIVATE, TASK, population, rounds=1, start=file, privacy=OS)
    assert later.ledger.earlier_histories == (history,)
    assert torch.equal(train(PRIVATE, TASK, population, rounds=0, start=str(file)).state.params, earlier.state.params)
    (tmp_path / "ledger.jsonl").write_text("")
    assert "whose ledger (digest " in read_model(file)[1].what
    exact = train(fedtail.fedavg(20, learning_rate=0.1), TASK, population, rounds=1)
    file.write_bytes(model_bytes(exact.module, training_record(exact.ledger, 1)))
    assert read_model(file)[1].what == "model.safetensors, trained for 1 rounds that released without a mechanism: the updates, by WeightedMean"
    file.write_bytes(model_bytes(exact.module))
    assert read_model(file)[1] == EarlierHistory("model.safetensors, a model of unknown history")
    file.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="is not a model file that can be read"):
        train(PRIVATE, TASK, population, rounds=1, start=file)


def test_what_a_run_began_with_is_in_its_file(tmp_path):
    ledger, known = Ledger(OS, tmp_path / "ledger.jsonl"), EarlierHistory("a model", 0, ((SAMPLED, 7),), ("seed",))
    ledger.record_earlier_history(known)
    ledger.record_earlier_history(known)
    a_round(ledger, 0, UPDATE)
    again = Ledger(OS, tmp_path / "ledger.jsonl")
    assert again.earlier_histories == (known,)
    assert again.guarantee().only == ledger.guarantee().only
    assert SIMULATED in release_obstacles(again)


# What is not charged, and new prices

def test_a_statement_names_what_is_not_charged(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.showwarning", lambda *_: None)
        done = run(experiment("private", "rounds=2", 'evaluate.keep_best="mean"'), 3, tmp_path / "run", Onlooker())
    exact, chosen = done.privacy["not_charged"]
    assert exact.startswith("the simulator's evaluations of all clients (metrics.jsonl")
    assert chosen == "the best models (best.safetensors) were chosen by exact results of clients: release model.safetensors instead"
    shown = CliRunner().invoke(app, ["privacy", str(done.path)], env={"COLUMNS": "200"}).output
    assert f"not charged: {exact}" in shown
    assert "a client, with all its examples" in shown
    assert "zero-out: add-or-remove-one-client" in shown
    stated = json.loads((done.path / "privacy.json").read_text())
    (done.path / "privacy.json").write_text(json.dumps({**stated, "epsilon": 1.0, "fedtail": "0.1"}))
    told = json.loads(CliRunner().invoke(app, ["privacy", str(done.path), "--json"]).output)
    assert told["repriced"][0]["epsilon"] == {"was": 1.0, "is": stated["epsilon"]}
    assert "repriced: the first 2 rounds were stated as epsilon 1 at delta 0.01 by fedtail 0.1" in CliRunner().invoke(app, ["privacy", str(done.path)]).output


def test_a_new_price_is_found_for_the_rounds_that_were_stated(tmp_path):
    ledger = Ledger(OS, tmp_path / "ledger.jsonl")
    for number in range(3):
        a_round(ledger, number, UPDATE)
    stated = privacy_statement(ledger, 3)
    a_round(ledger, 3, UPDATE)                                                  # a crash after charging
    assert guarantee_change(ledger, stated) is None
    change = guarantee_change(ledger, {**stated, "epsilon": 9.0})
    assert change["epsilon"] == {"was": 9.0, "is": stated["epsilon"]}
    assert describe_guarantee_change(change).startswith("the first 3 rounds were stated as epsilon 9 at delta 0.001 by fedtail ")
    old = {name: value for name, value in stated.items() if name not in ("ledger", "fedtail")}
    assert guarantee_change(ledger, {**old, "epsilon": 9.0}) is None                    # of other rounds, for all it says
    assert guarantee_change(ledger.copy_of_first_bytes(stated["ledger"][0]), {**old, "epsilon": 9.0})["by"] == "an earlier version"
    assert guarantee_change(ledger, {"private": False}) is None
    without = guarantee_change(ledger, {**stated, "without_amplification": "infinity"})
    assert "epsilon without amplification infinity at delta" in describe_guarantee_change(without)


def test_a_resumed_run_keeps_the_price_it_had_stated(tmp_path):
    wanted, watch = experiment("private"), Onlooker()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.showwarning", lambda *_: None)
        with suppress(Interrupted):
            run(wanted, 3, tmp_path / "run", Onlooker(stop_after=3))
        stated = json.loads((tmp_path / "run" / "privacy.json").read_text())
        (tmp_path / "run" / "privacy.json").write_text(json.dumps({**stated, "epsilon": 1.0}))
        done = run(wanted, 3, tmp_path / "run", watch, resume=True)
    assert [change["epsilon"]["was"] for change in done.privacy["repriced"]] == [1.0]
    assert any("were stated as epsilon 1 at delta" in note for note in watch.notes)
    assert RunFolder.open(done.path).privacy["epsilon"] > stated["epsilon"]
