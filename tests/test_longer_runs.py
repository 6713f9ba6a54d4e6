"""Runs on disk that go on with more rounds, stop early, are interrupted in Python and are logged elsewhere."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fedtail.cli import app
from fedtail.deployment.launch import run_on_transport
from fedtail.experiment import ExperimentError
from fedtail.runs import Interrupted, RunError, RunFolder, run
from fedtail.runs.execution import folder_holds_run
from fedtail.runs.logs import check_loggers

from run_cases import BASE, METHODS, Onlooker, digests, experiment

LONG = ("rounds=10",)
KEEP = ('evaluate.keep_best="worst20"', "evaluate.every=1")


# more rounds

@pytest.mark.parametrize("name", ["delta_fl", "afl", "adam averaged", "family", "refreshed momentum", "away", "ditto"])
def test_a_finished_run_that_goes_on_is_the_run_of_that_length(tmp_path, name):
    whole = run(experiment(name, *LONG), 3, tmp_path / "whole", Onlooker())
    run(experiment(name), 3, tmp_path / "parts", Onlooker())
    last = Onlooker()
    parts = run(experiment(name, *LONG), 3, tmp_path / "parts", last, resume=True)
    assert last.rounds == [7, 8, 9, 10]
    assert digests(parts.path) == digests(whole.path)
    assert parts.about == whole.about


def test_a_private_run_goes_on_with_its_ledger(tmp_path):
    whole = run(experiment("private", *LONG), 3, tmp_path / "whole", Onlooker())
    run(experiment("private"), 3, tmp_path / "parts", Onlooker())
    parts = run(experiment("private", *LONG), 3, tmp_path / "parts", Onlooker(), resume=True)
    assert parts.privacy["epsilon"] == whole.privacy["epsilon"]
    assert parts.privacy["rounds"] == 10
    assert parts.models[0].read_bytes() == whole.models[0].read_bytes()


def test_an_interrupted_run_goes_on_with_more_rounds_and_a_killed_extension_too(tmp_path):
    whole = run(experiment("delta_fl", *LONG), 3, tmp_path / "whole", Onlooker())
    with pytest.raises(Interrupted):
        run(experiment("delta_fl"), 3, tmp_path / "parts", Onlooker(stop_after=3))
    with pytest.raises(Interrupted):
        run(experiment("delta_fl", *LONG), 3, tmp_path / "parts", Onlooker(stop_after=5), resume=True)
    assert not RunFolder.open(tmp_path / "parts").is_finished
    parts = run(experiment("delta_fl", *LONG), 3, tmp_path / "parts", Onlooker(), resume=True)
    assert digests(parts.path) == digests(whole.path)


def test_a_run_that_is_not_told_how_often_is_evaluated_as_often_as_before(tmp_path):
    short, long = (experiment("delta_fl", f"rounds={rounds}", "evaluate={}") for rounds in (20, 40))
    assert (short.evaluate_every, long.evaluate_every) == (1, 2)
    run(short, 3, tmp_path / "parts", Onlooker())
    assert folder_holds_run(long, 3, tmp_path / "parts", shorter=True)
    parts = run(long, 3, tmp_path / "parts", Onlooker(), resume=True)
    assert [line["round"] for line in parts.metrics] == list(range(41))


def test_fewer_rounds_are_refused_and_the_finished_run_stays(tmp_path):
    done = run(experiment("delta_fl"), 3, tmp_path / "run", Onlooker())
    before = digests(done.path)
    with pytest.raises(RunError, match="rounds was 6, is 5"):
        run(experiment("delta_fl", "rounds=5"), 3, tmp_path / "run", Onlooker(), resume=True)
    assert digests(done.path) == before


def test_the_command_goes_on_with_more_rounds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.toml").write_text(BASE + METHODS["delta_fl"])
    for words in (["run", "one.toml"], ["run", "one.toml", "--set", "rounds=9", "--resume"]):      # finds its folder by itself
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    [place] = (tmp_path / "runs").iterdir()
    assert RunFolder.open(place).result["round"] == 9


# early stopping by keep_best and patience

def expected_end(values: list[float], patience: int) -> tuple[int, int]:
    best = ends = 0
    for k, value in enumerate(values):
        best, ends = (k, k) if value < values[best] or k == 0 else (best, k)
        if k - best == patience:
            break
    return best, ends


def validation_values(folder: RunFolder, member: int = 0) -> list[float]:
    return [line["members"][member]["validation"]["error"]["worst10"] for line in folder.metrics]


TEN = ('evaluate.keep_best="worst10"', "evaluate.every=1", "rounds=40")


def test_a_run_ends_where_its_best_is_long_ago(tmp_path):
    whole = run(experiment("delta_fl", *TEN), 3, tmp_path / "whole", Onlooker())
    best, ends = expected_end(validation_values(whole), 4)
    assert ends < 40
    early = run(experiment("delta_fl", *TEN, "evaluate.patience=4"), 3, tmp_path / "early", Onlooker())
    assert (early.result["round"], early.result["best"][0]["round"]) == (ends, best)
    assert early.result["stopped"] == "error.worst10 was no better in 4 evaluations in a row"
    assert early.result["selected_on"] == {"split": "validation", "by": "error.worst10", "for": ["best models", "end of the run"]}
    assert whole.result["selected_on"]["for"] == ["best models"]
    assert early.metrics == whole.metrics[: ends + 1]


@pytest.mark.parametrize("stops", [[1], [2, 2], [5, 1]], ids=str)
def test_an_interruption_does_not_change_where_it_ends(tmp_path, stops):
    wanted = experiment("family", *TEN, "evaluate.patience=7")
    whole = run(wanted, 3, tmp_path / "whole", Onlooker())
    assert whole.result["stopped"]
    for stop in stops:
        with pytest.raises(Interrupted):
            run(wanted, 3, tmp_path / "parts", Onlooker(stop_after=stop), resume=True)
    (tmp_path / "parts" / "keep_best.json").write_text(json.dumps([*json.loads((tmp_path / "parts" / "keep_best.json").read_text()),
                                                                   {"round": 30, "values": [0.0] * 3, "better": "lower"}]))      # of rounds that were lost
    assert digests(run(wanted, 3, tmp_path / "parts", Onlooker(), resume=True).path) == digests(whole.path)
    more = run(experiment("family", *TEN, "evaluate.patience=7", "rounds=80"), 3, tmp_path / "parts", Onlooker(), resume=True)
    assert more.result["round"] == whole.result["round"]      # as a run of 80 rounds would have ended


def test_patience_needs_something_to_wait_for():
    with pytest.raises(ValueError, match="patience says how long to wait for a better value, but of what"):
        experiment("delta_fl", "evaluate.patience=4")
    with pytest.raises(ValueError, match="patience must be a whole number, at least 1, got 0"):
        experiment("delta_fl", *KEEP, "evaluate.patience=0")


def test_clients_that_choose_are_the_tested_ones_where_no_others_are_there(tmp_path):
    done = run(experiment("delta_fl", *KEEP, "data.split={ train = 0.5, test = 0.5 }"), 3, tmp_path / "run", Onlooker())
    assert done.result["selected_on"] == {"split": "test", "by": "error.worst20", "for": ["best models"]}


# Ctrl-C in Python

class Interrupting(Onlooker):
    def round(self, round: int) -> None:
        super().round(round)
        if round == 3:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_in_python_saves_the_round_and_says_so(tmp_path):
    whole = run(experiment("delta_fl"), 3, tmp_path / "whole", Onlooker())
    with pytest.raises(Interrupted, match="stopped after round 3 of 6; everything is saved"):
        run(experiment("delta_fl"), 3, tmp_path / "parts", Interrupting())
    last = Onlooker()
    assert digests(run(experiment("delta_fl"), 3, tmp_path / "parts", last, resume=True).path) == digests(whole.path)
    assert last.rounds == [4, 5, 6]


# [log]

def test_a_run_is_logged_to_tensorboard_where_the_file_says(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    where = tmp_path / "board"
    wanted = experiment("family", 'log.part="TensorBoard"', f'log.folder="{where}"')
    done = run(wanted, 3, tmp_path / "run", Onlooker())
    for k, name in enumerate(done.members):
        events = accumulator.EventAccumulator(str(where / name))
        events.Reload()
        told = [(one.step, one.value) for one in events.Scalars("error/test/worst10")]
        assert told == [(line["round"], pytest.approx(line["members"][k]["test"]["error"]["worst10"])) for line in done.metrics]
    elsewhere = experiment("family", 'log.part="TensorBoard"', f'log.folder="{tmp_path / "other"}"', *LONG)
    assert run(elsewhere, 3, tmp_path / "run", Onlooker(), resume=True).result["round"] == 10      # where it is logged may change


@pytest.mark.filterwarnings("ignore")      # of MLflow's own packages
def test_a_resumed_run_goes_on_in_its_mlflow_run(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    where = f"sqlite:///{tmp_path / 'mlflow.db'}"
    wanted = experiment("delta_fl", 'log.part="MLflow"', f'log.tracking_uri="{where}"')
    with pytest.raises(Interrupted):
        run(wanted, 3, tmp_path / "run", Onlooker(stop_after=3))
    done = run(wanted, 3, tmp_path / "run", Onlooker(), resume=True)
    client = mlflow.MlflowClient(tracking_uri=where)
    [logged] = client.search_runs([client.get_experiment_by_name("fedtail").experiment_id])
    assert logged.data.params["risk.tail_fraction"] == "0.5"
    steps = [one.step for one in client.get_metric_history(logged.info.run_id, "error/test/worst10")]
    assert sorted(set(steps)) == [line["round"] for line in done.metrics]


def test_an_unknown_logger_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="MLflow"):
        experiment("delta_fl", 'log.part="MLFlow"')


MISSING = [('[log]\npart = "MLflow"', "mlflow", "this logger needs MLflow. Install it with pip install 'fedtail[mlflow]', or leave the logger out."),
           ('[log]\npart = "WandB"', "wandb", "this logger needs Weights & Biases. Install it with pip install 'fedtail[wandb]'"),
           ('[log]\npart = "TensorBoard"', "torch.utils.tensorboard", "this logger needs TensorBoard."),
           ("tensorboard = true", "torch.utils.tensorboard", "this logger needs TensorBoard.")]


@pytest.mark.parametrize(("section", "package", "told"), MISSING)
@pytest.mark.parametrize("command", [("run", "one.toml"), ("compare", "one.toml", "--out", "runs"), ("matrix", "one.toml", "--out", "runs")])
def test_a_logger_whose_client_is_missing_is_refused_before_anything_is_written(tmp_path, monkeypatch, section, package, told, command):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    text = BASE + METHODS["delta_fl"]
    text = text.replace("[evaluate]", "[evaluate]\ntensorboard = true") if section.startswith("tensor") else f"{text}\n{section}\n"
    more = {"run": "", "compare": '[[method]]\nname = "a"\n[[method]]\nname = "b"\nrisk = "Mean"\n', "matrix": "[matrix.a]\none = {}\ntwo = {}\n"}
    (tmp_path / "one.toml").write_text(text + more[command[0]])
    done = CliRunner().invoke(app, list(command))
    assert done.exit_code == 2, done.output
    assert told in " ".join(done.stderr.split())
    assert ("one.toml, line" in done.stderr) == (command[0] != "matrix")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.toml"]


def test_a_server_whose_logger_is_missing_is_refused_before_it_waits_for_nodes(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    (tmp_path / "one.toml").write_text(BASE[:BASE.index("[data]")] + BASE[BASE.index("[task.module]"):] + METHODS["delta_fl"] + '[log]\npart = "MLflow"\n')
    with pytest.raises(ExperimentError, match="this logger needs MLflow"):
        run_on_transport(None, {"experiment": tmp_path / "one.toml"}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_logger_of_ones_own_needs_no_check_of_its_client(tmp_path):
    wanted = replace(experiment("delta_fl"), log=SimpleNamespace(open_log=None))
    check_loggers(wanted)


# one line for each run

def test_commands_write_a_line_for_each_run_where_output_is_piped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.toml").write_text(BASE + METHODS["delta_fl"])
    done = CliRunner().invoke(app, ["run", "one.toml", "--seeds", "0,1"])
    lines = [line for line in done.stderr.splitlines() if "seed" in line]
    assert [line.rpartition(",")[0] for line in lines] == ["1/2 one, seed 0: 6 rounds", "2/2 one, seed 1: 6 rounds"]
    assert "rounds" not in CliRunner().invoke(app, ["run", "one.toml", "--seeds", "0,1", "--json"]).stderr.replace("round;", "")
