"""Following a run in Python: its history, its progress, Ctrl-C, validation, early stopping, going on, loggers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings

import pytest
import torch

import fedtail
from fedtail import History, InterruptedWarning, Validation, evaluate, resume, train
from fedtail.history import html_table
from fedtail.loggers import LoggedRun, TensorBoard, scalar_tag
from fedtail.models import SoftmaxRegression
from fedtail.progress_bar import ProgressBar


def people(clients=12, features=4, classes=3) -> fedtail.Population:
    made = torch.Generator().manual_seed(1)
    x = [torch.randn(5 + k % 4, features, generator=made) for k in range(clients)]
    return fedtail.Population.from_clients([(one, (one[:, 0] + 0.3 * k > 0).long() + (one[:, 1] > 1).long()) for k, one in enumerate(x)])


def task() -> fedtail.Task:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = SoftmaxRegression(4, 3)
        for one in module.parameters():
            torch.nn.init.normal_(one, std=0.3)
    return fedtail.Task(module)


TAIL = fedtail.delta_fl(0.5, cohort_size=6, learning_rate=0.5, batch_size=None, local_steps=3)
MEAN = fedtail.fedavg(6, learning_rate=0.5, batch_size=None, local_steps=3)
QUIET = {"progress": False}


# history

def test_the_history_says_who_took_part_in_every_round():
    seen = []
    result = train(TAIL, task(), people(), rounds=7, on_round=lambda p: seen.append((p.view, len(p.trained.history))) and None, **QUIET)
    assert result.history["round"] == list(range(1, 8)) == [length for _, length in seen]      # each round has its own history
    assert result.history["contributors"] == [view.num_contributors for view, _ in seen]
    assert result.history["cohort_size"] == [6] * 7
    assert result.history[-1]["threshold"] == float(result.state.dual[0])


def test_a_family_has_a_row_for_each_model():
    family = train(fedtail.Family((MEAN, TAIL)), task(), people(), rounds=3, **QUIET)
    alone = train(TAIL, task(), people(), rounds=3, **QUIET)
    assert family.history["model"] == [0, 1] * 3
    assert [{k: v for k, v in row.items() if k != "model"} for row in family.history.of_model(1)] == [pytest.approx(row) for row in alone.history]


def test_histories_share_rows_and_never_change_each_other():
    first = History([{"round": 1}])
    left, right = first.with_rows([{"round": 2, "a": 1}]), first.with_rows([{"round": 2, "a": 2}])
    joined = left.with_rows([{"round": 2, "b": 3}])
    assert (list(first), left["a"], right["a"], joined[-1]) == ([{"round": 1}], [1], [2], {"round": 2, "a": 1, "b": 3})
    assert "b" not in left.columns
    with pytest.raises(KeyError, match="the history has no column 'c'; there are round, a"):
        left["c"]


def test_a_history_grows_in_constant_time():
    grown = History()
    start = time.perf_counter()
    for k in range(20_000):
        grown = grown.with_rows([{"round": k}])
    assert time.perf_counter() - start < 2      # 20,000 copies of a growing list take minutes
    assert len(grown) == 20_000


def test_what_the_cohort_finds_is_in_the_history():
    found = train(TAIL, task(), people(), rounds=4, evaluation=fedtail.FederatedEvaluation(every=2, loss_bound=8.0, split="train"), **QUIET)
    rows = [row for row in found.history if "cohort.loss.mean" in row]
    assert [row["round"] for row in rows] == [0, 2, 4]
    assert rows[-1]["cohort.loss.mean"] == found.evaluation[0].loss.mean()


def test_tables_escape_what_they_show():
    assert "<td>&lt;b&gt;</td>" in html_table(["a"], [["<b>"]])
    assert "<script>" not in History([{"round": 1, "<script>": "x"}])._repr_html_()


# validation, the best, early stopping

@pytest.mark.parametrize(("statistic", "every"), [("loss.mean", 1), ("error.worst20", 2), ("loss.p90", 3)])
def test_validation_stops_keeps_the_best_and_says_by_whom(statistic, every):
    own, held = people(18).split((0.6, 0.4))
    metric, name = statistic.split(".")
    models = []
    train(MEAN, task(), own, rounds=60, on_round=lambda p: models.append(p.trained) and None, **QUIET)
    values = [evaluate(one, held)[metric].statistic(name) for one in models[every - 1 :: every]]
    best = ends = 0
    for k, value in enumerate(values):      # the rule, spelled out
        best, ends = (k, k) if k == 0 or value < values[best] else (best, k)
        if k - best == 3:
            break
    result = train(MEAN, task(), own, rounds=60, validation=Validation(held, every, statistic, patience=3), **QUIET)
    early = ends - best == 3
    assert result.rounds == (every * (ends + 1) if early else 60)
    assert result.stopped == (f"{statistic} was no better in 3 evaluations in a row" if early and result.rounds < 60 else "")
    assert result.history[f"validation.{statistic}"] == values[: ends + 1]
    assert torch.equal(result.best.state.params, models[every * (best + 1) - 1].state.params)
    assert result.best.rounds == every * (best + 1)
    assert set(result.selected_on.tolist()) == set(held.key.tolist())
    assert train(MEAN, task(), own, rounds=2, **QUIET).selected_on is None


def test_the_clients_that_chose_are_given_by_name_in_the_order_of_their_keys():
    crowd = people(18)
    named = fedtail.Population.from_clients({f"site {k}": crowd.client(k) for k in range(18)})
    own, first, later = named.split((0.5, 0.3, 0.2))

    def names(result) -> list[str]:
        return [f"site {named.key.tolist().index(key)}" for key in result.selected_on.tolist()]

    result = train(MEAN, task(), own, rounds=4, validation=Validation(first, 2), **QUIET)
    assert list(result.selected_names) == names(result)
    assert set(result.selected_names) == set(first.names.tolist())
    assert f"selected on {', '.join(result.selected_names)}" in repr(result)
    longer = resume(result, own, rounds=2, validation=Validation(later, 2), **QUIET)
    assert list(longer.selected_names) == names(longer)
    assert set(longer.selected_names) == {*first.names.tolist(), *later.names.tolist()}
    assert f"selected on 9 clients ({', '.join(longer.selected_names[:5])}, ...)" in repr(longer)
    assert resume(longer, own, rounds=2, validation=Validation(first, 2), **QUIET).selected_names == longer.selected_names
    assert train(MEAN, task(), own, rounds=2, **QUIET).selected_names is None
    nameless = fedtail.Population.from_clients([crowd.client(k) for k in range(18)])
    unnamed = train(MEAN, task(), nameless, rounds=2, validation=Validation(nameless.select([1, 2]), 2), **QUIET)
    assert (unnamed.selected_names, "selected on" in repr(unnamed)) == (None, False)


def test_a_metric_where_higher_is_better_stops_at_its_highest():
    accuracy = fedtail.Metric("accuracy", lambda o, t: (o.argmax(1) == t).double(), better="higher")
    judged = fedtail.Task(task().module, metrics=(accuracy,))
    own, held = people(18).split((0.6, 0.4))
    result = train(MEAN, judged, own, rounds=30, validation=Validation(held, 1, "accuracy.mean"), **QUIET)
    values = result.history["validation.accuracy.mean"]
    assert result.best.rounds == 1 + values.index(max(values))
    assert "validation.accuracy.p10" in result.history.columns      # the bad end
    with pytest.raises(ValueError, match=r"statistic is about auc, which is not evaluated. There are loss, error, accuracy"):
        train(MEAN, judged, own, rounds=1, validation=Validation(held, 1, "auc.mean"), **QUIET)


def test_each_model_of_a_family_has_its_own_best():
    own, held = people(18).split((0.6, 0.4))
    rule = Validation(held, 1, "error.worst20")
    alone = [train(one, task(), own, rounds=25, validation=rule, **QUIET) for one in (MEAN, TAIL)]
    both = train(fedtail.Family((MEAN, TAIL)), task(), own, rounds=25, validation=rule, **QUIET)
    for state, one in zip(both.best.state, alone, strict=True):
        assert (state.round, torch.allclose(state.params, one.best.state.params)) == (one.best.rounds, True)
    if len({state.round for state in both.best.state}) > 1:
        with pytest.raises(ValueError, match="those of different rounds"):
            resume(both.best, own, rounds=1, **QUIET)


def test_a_model_that_diverges_is_never_the_best():
    own, held = people(18).split((0.6, 0.4))
    wild = fedtail.fedavg(6, learning_rate=1e30, batch_size=None, local_steps=3)
    with warnings.catch_warnings(action="ignore"):
        result = train(wild, task(), own, rounds=6, validation=Validation(held, 1, "loss.mean", patience=3), **QUIET)
    assert result.best is None or bool(result.best.state.params.isfinite().all())


def test_settings_of_a_validation_are_refused_in_words():
    held = people()
    for wrong, text in (({"patience": 0}, "patience must be a whole number, at least 1, got 0."), ({"every": 0}, "every must be a whole number, at least 1, got 0.")):
        with pytest.raises(ValueError) as refused:
            Validation(held, **wrong)
        assert str(refused.value) == text
    with pytest.raises(TypeError, match="population must be a Population, got list"):
        Validation([])
    with pytest.raises(ValueError, match="worstest"):
        Validation(held, statistic="loss.worstest")


# more rounds

@pytest.mark.parametrize("method", [TAIL, fedtail.Family((MEAN, TAIL)), fedtail.afl(step=0.1, learning_rate=0.3)], ids=["tail", "family", "afl"])
def test_a_run_that_goes_on_is_the_run_of_that_length(method):
    own, held = people(18).split((0.6, 0.4))
    rule = {"validation": Validation(held, 3, "loss.worst20"), **QUIET}
    whole = train(method, task(), own, rounds=11, **rule)
    parts = resume(resume(train(method, task(), own, rounds=4, **rule), own, rounds=1, **rule), own, rounds=6, **rule)
    states = zip(*((one.state if isinstance(one.state, tuple) else (one.state,)) for one in (whole, parts)), strict=True)
    assert all(torch.equal(a.params, b.params) for a, b in states)
    assert parts.history == whole.history
    assert parts.best.rounds == whole.best.rounds


def test_patience_goes_on_where_a_run_does():
    own, held = people(18).split((0.6, 0.4))
    rule = {"validation": Validation(held, 1, "error.worst20", patience=4), **QUIET}
    whole = train(MEAN, task(), own, rounds=80, **rule)
    assert whole.stopped
    parts = train(MEAN, task(), own, rounds=whole.rounds - 2, **rule)
    assert not parts.stopped
    parts = resume(parts, own, rounds=50, **rule)
    assert (parts.rounds, parts.stopped) == (whole.rounds, whole.stopped)


# Ctrl-C

def interrupting(times: int):
    def at(progress):
        for _ in range(times if progress.round == 3 else 0):
            os.kill(os.getpid(), signal.SIGINT)
    return at


def test_a_signal_returns_what_was_trained_so_far_and_it_goes_on(capfd):
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.warns(InterruptedWarning) as said:
        result = train(MEAN, task(), people(), rounds=9, on_round=interrupting(1), **QUIET)
    assert (result.interrupted, result.rounds, len(result.history)) == (True, 3, 3)
    assert [str(one.message) for one in said] == ["interrupted after 3 of 9 rounds: this is the run so far. Go on with fedtail.resume."]
    assert said[0].filename == __file__
    assert "finishing this round; once more to stop at once" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    rest = resume(result, people(), rounds=6, **QUIET)
    assert not rest.interrupted
    assert torch.equal(rest.state.params, train(MEAN, task(), people(), rounds=9, **QUIET).state.params)


def test_a_second_signal_raises():
    with pytest.raises(KeyboardInterrupt):
        train(MEAN, task(), people(), rounds=9, on_round=interrupting(2), **QUIET)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_in_the_last_round_interrupts_nothing():
    result = train(MEAN, task(), people(), rounds=3, on_round=interrupting(1), **QUIET)
    assert (result.interrupted, result.rounds) == (False, 3)


def run_script(text: str, **more) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=120, **more)


def test_a_real_ctrl_c_from_outside_reaches_a_run_with_workers():
    text = f"""
import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_following import MEAN, people, task
import fedtail, warnings
warnings.simplefilter("ignore")
result = fedtail.train(MEAN, task(), people(400), rounds=10**6, engine=fedtail.Engine(workers=2), on_round=lambda p: print(p.round, flush=True), progress=False)
print("returned", result.interrupted, 0 < result.rounds < 10**6)
"""
    child = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        for _ in range(3):
            child.stdout.readline()
        os.killpg(child.pid, signal.SIGINT)      # as a terminal does: to all processes of the group
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert out.splitlines()[-1] == "returned True True", err


def test_a_program_with_a_handler_of_its_own_keeps_it():
    caught = []
    before = signal.signal(signal.SIGINT, lambda *_: caught.append(1))
    try:
        result = train(MEAN, task(), people(), rounds=3, on_round=lambda p: os.kill(os.getpid(), signal.SIGINT), **QUIET)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (result.rounds, result.interrupted, caught) == (3, False, [1, 1, 1])


# progress

def test_one_line_where_output_is_piped_and_none_where_it_is_not_wanted(capfd):
    train(MEAN, task(), people(), rounds=3)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("trained 3 rounds in ")
    train(MEAN, task(), people(), rounds=3, progress=False)
    assert capfd.readouterr().err == ""
    own, held = people(18).split((0.6, 0.4))
    train(MEAN, task(), own, rounds=80, validation=Validation(held, 1, "error.worst20", patience=2))
    assert "error.worst20 was no better in 2 evaluations in a row" in capfd.readouterr().err


def test_a_terminal_gets_a_bar_that_is_erased():
    pty = pytest.importorskip("pty")
    text = f"""
import sys, time; sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_following import MEAN, people, task
import fedtail
fedtail.train(MEAN, task(), people(), rounds=12, on_round=lambda p: time.sleep(0.05))
"""
    here, there = pty.openpty()
    child = subprocess.Popen([sys.executable, "-c", text], stderr=there, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
                             env={**os.environ, "TERM": "xterm", "COLUMNS": "100"})
    os.close(there)
    shown = b""
    while True:
        try:
            part = os.read(here, 4096)
        except OSError:
            break
        if not part:
            break
        shown += part
    assert child.wait(60) == 0, shown
    assert b"training" in shown
    assert b"/12" in shown
    assert b"trained 12" not in shown      # a bar, and no line


def test_the_bar_costs_nothing_between_two_drawings(monkeypatch):
    monkeypatch.setattr("fedtail.progress_bar.make_bar", lambda: None)
    bar = ProgressBar(10**6)
    start = time.perf_counter()
    for k in range(100_000):
        bar.advance(k)
    assert (time.perf_counter() - start) / 100_000 < 5e-6      # a round takes a thousand microseconds


def test_a_notebook_gets_a_bar_of_its_own():
    pytest.importorskip("IPython")
    text = f"""
import sys, time; sys.path.insert(0, {os.path.dirname(__file__)!r})
from IPython.core.interactiveshell import InteractiveShell
import IPython.display
class ZMQInteractiveShell(InteractiveShell): pass
shell = ZMQInteractiveShell.instance()
shown = []
class Handle:
    def update(self, one): shown.append(one.data)
IPython.display.display = lambda one, display_id: Handle()
from test_following import MEAN, people, task
import fedtail
fedtail.train(MEAN, task(), people(), rounds=12, on_round=lambda p: time.sleep(0.05))
assert shown[-1].startswith('<progress value="12" max="12">'), shown
"""
    done = run_script(text)
    assert (done.returncode, done.stderr) == (0, "")


# loggers

def scalars(folder) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def logged_history(logger) -> History:
    own, held = people(18).split((0.6, 0.4))
    return train(TAIL, task(), own, rounds=4, validation=Validation(held, 2), logger=logger, **QUIET).history


def tags(history: History) -> dict[str, list[tuple[int, float]]]:
    return {scalar_tag(name): [(row["round"], pytest.approx(row[name], rel=1e-6)) for row in history if name in row]
            for name in history.columns if name != "round"}


def test_tensorboard_gets_the_history(tmp_path):
    history = logged_history(TensorBoard(str(tmp_path / "board")))
    found = scalars(tmp_path / "board")
    assert found == tags(history)
    assert [step for step, _ in found["error/validation/worst10"]] == [2, 4]
    train(fedtail.Family((MEAN, TAIL)), task(), people(), rounds=2, logger=TensorBoard(str(tmp_path / "two")), **QUIET)
    assert [step for step, _ in scalars(tmp_path / "two" / "model 1")["round/contributors"]] == [1, 2]


def test_mlflow_gets_the_history_in_a_file(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    where = f"sqlite:///{tmp_path / 'mlflow.db'}"
    with warnings.catch_warnings(action="ignore"):
        history = logged_history(fedtail.loggers.MLflow("mine", where))
        client = mlflow.MlflowClient(tracking_uri=where)
        [run] = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
        assert run.info.status == "FINISHED"
        assert run.data.params["rounds"] == "4"
        found = {tag: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, tag)] for tag in run.data.metrics}
    assert found == tags(history)


def test_wandb_gets_the_history_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    if not hasattr(wandb, "init"):
        pytest.skip("a folder called wandb, not the package")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with warnings.catch_warnings(action="ignore"):
        history = logged_history(fedtail.loggers.WandB("mine", mode="offline", folder=str(tmp_path)))
        wandb.teardown()                # its service writes the file after finish() has returned; this waits for its end
    [kept] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = kept.read_bytes()
    for tag in tags(history):
        assert tag.encode() in content


def test_a_missing_client_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ImportError, match=r"this logger needs MLflow. Install it with pip install 'fedtail\[mlflow\]'"):
        train(MEAN, task(), people(), rounds=1, logger=fedtail.loggers.MLflow(), **QUIET)


class Kept:
    """A logger that keeps what it is told, as users may write one."""

    def __init__(self):
        self.rows, self.closed, self.id = [], 0, None

    def open_log(self, run: LoggedRun):
        self.run = run
        return self

    def write(self, round, model, numbers, values):
        self.rows.append((round, model, sorted(numbers)))

    def close(self):
        self.closed += 1


def test_a_logger_of_ones_own_is_closed_also_where_a_run_fails():
    kept = Kept()
    train(fedtail.Family((MEAN, TAIL)), task(), people(), rounds=2, logger=kept, **QUIET)
    assert [(round, model) for round, model, _ in kept.rows] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert (kept.closed, kept.run.members, kept.run.settings["rounds"]) == (1, ("model 0", "model 1"), 2)

    def fail(progress):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        train(MEAN, task(), people(), rounds=2, logger=kept, on_round=fail, **QUIET)
    assert kept.closed == 2
