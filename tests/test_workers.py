"""Processes that share a round: no bit changes with their number, and nothing of them is left behind."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import fedtail
from fedtail import LocalSGD, Population, Task
from fedtail.clients import Shard, client_means
from fedtail.declarations import AggregatorDeclaration
from fedtail.engine import LocalFleet, blocks, fork_pool, workers
from fedtail.engine.blocks import cohort_blocks
from fedtail.engine.shared_memory import Place, SharedMemory
from fedtail.engine.threads import _Threads, use_one_thread
from fedtail.engine.workers import Team
from fedtail.local.batches import batches
from fedtail.local.full_gradient import gradients_in_stacks
from fedtail.models import SoftmaxRegression
from fedtail.modules import lock_and_restore_generators
from fedtail.parts import Penalty, full_gradients
from fedtail.privacy.events import NoSampling, RoundEvent

pytestmark = pytest.mark.skipif(not workers.can_fork(), reason="processes are forked on Linux only")

CPU = torch.device("cpu")
RANDOM = np.random.default_rng(0)
SIZES = RANDOM.integers(5, 40, 24)
POPULATION = Population.from_arrays(RANDOM.standard_normal((SIZES.sum(), 6)).astype("float32"), RANDOM.integers(0, 4, SIZES.sum()),
                                    np.repeat(np.arange(24), SIZES), group=np.arange(24) % 3)
METHODS = {
    "fedavg": fedtail.fedavg(12),
    "delta_fl": fedtail.delta_fl(0.5, 12),
    "q_ffl": fedtail.q_ffl(1.0, 12),
    "afl": fedtail.afl(0.1),
    "family": fedtail.delta_fl_family((1.0, 0.5), 12),
    "a family that remembers": fedtail.Family((fedtail.afl(0.1), fedtail.afl(0.5))),
    "fedprox, stragglers": fedtail.fedprox(0.1, 12, epochs=2, work=fedtail.Stragglers(0.5)),
}


def linear() -> Task:
    return Task(SoftmaxRegression(6, 4))


def stacked() -> Task:
    torch.manual_seed(0)
    return Task(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))


def dropout() -> Task:
    torch.manual_seed(0)
    return Task(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4)))


@pytest.fixture
def eager(monkeypatch):
    """Many small blocks, shared at once however little they are."""
    monkeypatch.setattr(blocks, "GRAIN", 64)
    monkeypatch.setattr(blocks, "TOGETHER", 1)
    monkeypatch.setattr(workers, "WORTH_STARTING", 0.0)
    monkeypatch.setattr(workers, "WORTH_SHARING", 0.0)


def children() -> set[int]:
    return {process.pid for process in multiprocessing.active_children()}


def params_of(trained: fedtail.Trained) -> torch.Tensor:
    states = trained.state if isinstance(trained.state, tuple) else (trained.state,)
    return torch.cat([s.params for s in states])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("make", "channel"), [(linear, fedtail.IntegerChannel()), *((make, fedtail.PlainChannel()) for make in
                                               (linear, stacked, dropout))], ids=["integers", "linear", "stacked", "dropout"])
def test_the_number_of_workers_changes_no_bit(eager, name, make, channel):
    task, runs, views = make(), [], []
    for count in (1, 2, 4):
        with LocalFleet(POPULATION, task, workers=count) as fleet:
            seen = []
            runs.append(fedtail.train(METHODS[name], task, POPULATION, rounds=3, seed=5, fleet=fleet, channel=channel,
                                      on_round=lambda p, seen=seen: seen.append(p.view)))
            assert (fleet._team.pool is not None) == (count > 1)
        views.append(seen)
    for other, seen in zip(runs[1:], views[1:], strict=True):
        assert torch.equal(params_of(other), params_of(runs[0]))
        assert all(torch.equal(other.memory.kept[k], v) for k, v in runs[0].memory.kept.items())
        for here, there in zip(views[0], seen, strict=True):
            assert torch.equal(here.trained, there.trained)
            assert torch.equal(here.left_out, there.left_out)


@dataclass(frozen=True)
class InTraining:
    """A client's mean loss as it trains: with dropout."""

    def losses(self, clients, model):
        batch = next(iter(batches(clients, torch.ones(len(clients), dtype=torch.int64), torch.ones(len(clients), dtype=torch.int64), None)))
        params = clients.params(model).expand(len(clients), -1)
        return (clients.kernel.losses(params, batch.inputs, batch.targets) * batch.weight).sum(1)


@dataclass(frozen=True)
class Along(Penalty):
    """Draws in `prepare_for_clients`: once through a helper that seeds itself, once by the kernel alone."""

    shift: torch.Tensor | None = None

    def prepare_for_clients(self, clients, anchor):
        batch = clients.examples(torch.zeros(len(clients), 1, dtype=torch.int64))
        alone = clients.kernel.gradients(anchor.expand(len(clients), -1), *batch, torch.ones(len(clients), 1))
        return Along(alone + full_gradients(clients, anchor))

    def add_gradient(self, gradients, params, anchor):
        return gradients + self.shift[: len(gradients)]


@dataclass(frozen=True)
class Drawing(LocalSGD):
    """Dropout wherever client code may draw: in the objective, in the penalty, in the steps."""

    penalty: Penalty = Along()

    @property
    def objective(self):
        return InTraining()


def test_whatever_a_client_draws_is_its_own_however_many_processes_there_are(eager):
    task = dropout()
    method = fedtail.Family(tuple(dataclasses.replace(fedtail.delta_fl(0.5, 12), local=local) for local in (Drawing(0.1), LocalSGD(0.1))))
    runs, before = [], torch.get_rng_state()
    for count in (1, 1, 3):
        torch.manual_seed(len(runs))                  # nothing depends on where the user's generator stands
        runs.append(fedtail.train(method, task, POPULATION, rounds=3, seed=5, engine=fedtail.Engine(workers=count)))
    for other in runs[1:]:
        assert torch.equal(params_of(other), params_of(runs[0]))
    torch.set_rng_state(before)


def test_gradients_and_objectives_with_dropout_are_the_same_in_any_batch_of_clients():
    task = dropout()
    kernel, params = fedtail.engine.kernel_choice.kernel_for(task, CPU, torch.float32, POPULATION, "module"), task.params()[None]
    shard = Shard(POPULATION, torch.ones(24, dtype=torch.float64), fedtail.fleet.Broadcast(1, 5, params), kernel, params)
    with lock_and_restore_generators():
        together = gradients_in_stacks(shard.clients(), params[0]), shard.compute_losses(0, 0, 24, InTraining())
        for k in (5, 3, 23):
            assert torch.equal(gradients_in_stacks(shard.clients(k, k + 1), params[0])[0], together[0][k])
            alone = shard.compute_losses(0, k, k + 1, InTraining())[0]      # of other padding: of other rounding, with the masks of the batch
            assert abs(alone - together[1][k]) < 1e-6 * together[1][k]
    assert len(together[1].unique()) > 20


@dataclass(frozen=True)
class Batches:
    """A client's mean loss in evaluation mode; notes how many clients it is computed for at once."""

    sizes: list = dataclasses.field(default_factory=list, compare=False)

    def losses(self, clients, model):
        self.sizes.append(len(clients))
        return client_means(clients.kernel, clients.params(model), clients.shard.population.select(clients.place), [clients.kernel.task.loss])[0]


def test_an_objective_that_draws_nothing_is_computed_for_all_clients_at_once():
    task, objective = dropout(), Batches()
    kernel, params = fedtail.engine.kernel_choice.kernel_for(task, CPU, torch.float32, POPULATION), task.params()[None]
    shard = Shard(POPULATION, torch.ones(24, dtype=torch.float64), fedtail.fleet.Broadcast(1, 5, params), kernel, params)
    assert torch.equal(shard.losses(0, objective), shard.losses(0))
    assert objective.sizes == [24]


@pytest.mark.parametrize("make", [linear, stacked, dropout])
def test_evaluation_and_fine_tuning_are_the_same_too(eager, make):
    task = make()
    evaluations = [fedtail.evaluate(task.module, POPULATION, task, engine=fedtail.Engine(workers=count)) for count in (1, 3)]
    tuned = [fedtail.finetune(task.module, POPULATION, LocalSGD(0.1, epochs=2), task, engine=fedtail.Engine(workers=count)) for count in (1, 3)]
    assert torch.equal(evaluations[0].loss.values, evaluations[1].loss.values)
    assert torch.equal(tuned[0].after.loss.values, tuned[1].after.loss.values)
    assert not torch.equal(tuned[0].after.loss.values, tuned[0].before.loss.values)
    assert not children()


def test_clients_left_out_by_another_process_are_counted(eager):
    x, y = POPULATION.client(23)
    people = Population.from_clients([*(POPULATION.client(k) for k in range(23)), (x * 1e38, y)])
    views = []
    for count in (1, 3):
        fedtail.train(fedtail.delta_fl(0.5, 24, learning_rate=10.0), dropout(), people, rounds=1, engine=fedtail.Engine(workers=count),
                      on_round=lambda p: views.append(p.view))
    assert [view.num_failed for view in views] == [1, 1]
    assert views[1].left_out[views[1].sampled == 23].all()


def test_rows_are_gathered_from_all_processes(eager):
    @dataclass(frozen=True)
    class Median:
        declares = AggregatorDeclaration(columns=0, gathers=True)

        def rows(self, updates, weighted, train, clients):
            return updates.double()

        def fit(self, train):
            rows = yield train
            return rows.median(0).values

        def bound(self, width, weight):
            return torch.full((width,), 1e3)

    rows = []
    for count in (1, 3):
        question = fedtail.questions.Train(LocalSGD(0.1), fedtail.Mean(), torch.zeros(0), Median(), gather=True)
        with LocalFleet(POPULATION, linear(), workers=count) as fleet:
            cohort = fedtail.Everyone()(POPULATION, 0, 0)
            broadcast = fedtail.clients.Broadcast(0, 0, linear().params()[None])
            planned = RoundEvent((question.release(28),), NoSampling())
            with fedtail.PlainChannel().open(fleet, cohort, broadcast, fedtail.Ledger(), planned) as ask:
                rows.append(ask(question))
    assert rows[0].shape == (24, 28)
    assert torch.equal(*rows)


def test_small_rounds_are_not_shared():
    with LocalFleet(POPULATION, linear(), workers=4) as fleet:
        fedtail.train(METHODS["delta_fl"], linear(), POPULATION, rounds=3, fleet=fleet)
        assert fleet._team.pool is None


def test_blocks_follow_from_shapes_and_cover_everybody():
    torch.manual_seed(0)
    for clients, dim in ((100, 115_646), (7, 10**6), (1000, 300), (3, 10**8), (1, 10**7)):
        sizes = torch.randint(1, 500, (clients,))
        found = cohort_blocks(sizes, dim, 1, CPU)
        assert [low for low, _ in found] == [0, *(high for _, high in found[:-1])]
        assert found[-1][1] == clients
        assert len(found) <= blocks.max_blocks(dim)
        if len(found) > 1:                            # about as many examples each, but for one client more or less
            held = [int(sizes[low:high].sum()) for low, high in found]
            assert max(held) <= sizes.sum() / len(found) + 2 * sizes.max()
    assert cohort_blocks(torch.zeros(0, dtype=torch.int64), 10, 1, CPU) == []


def test_work_goes_to_whoever_is_free(monkeypatch):
    monkeypatch.setattr(workers, "WORTH_STARTING", 0.0)
    team = Team(lambda job, block: (time.sleep(0.3 if block == 1 else 0.02), os.getpid())[1], 2)
    done = team.run("job", 12)
    team.close()
    slow = done[1]                                    # whoever slept long did few others
    assert len(set(done)) == 2
    assert done.count(slow) < 6


def test_an_error_is_raised_here_and_the_team_goes_on(eager):
    def perform(job, block):
        if job == "break" and block >= 3:
            raise ValueError(f"block {block} is broken")
        return block * 10

    team = Team(perform, 3)
    assert team.run("fine", 6) == [0, 10, 20, 30, 40, 50]
    with pytest.raises(ValueError, match="block 3 is broken"):
        team.run("break", 6)
    assert team.run("fine", 6) == [0, 10, 20, 30, 40, 50]
    team.close()
    assert not children()


def test_an_error_in_a_users_loss_is_the_same_with_workers(eager):
    def picky(outputs, targets):
        if outputs.requires_grad:
            raise ValueError("this loss cannot be trained")
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    for count in (1, 3):
        with pytest.raises(ValueError, match="this loss cannot be trained"):
            fedtail.train(METHODS["fedavg"], Task(stacked().module, loss=picky), POPULATION, rounds=1, engine=fedtail.Engine(workers=count))
        assert not children()


def test_errors_that_cannot_be_pickled_are_told(eager):
    class Odd(Exception):
        def __init__(self, code, place):
            super().__init__(f"code {code}")

    def perform(job, block):
        if os.getpid() != home:
            raise Odd(7, lambda: None)
        time.sleep(0.05)
        return block

    home, team = os.getpid(), Team(perform, 2)
    with pytest.raises(RuntimeError, match="Odd: code 7") as caught:
        team.run("job", 8)
    team.close()
    assert "raise Odd(7, lambda: None)" in "".join(traceback.format_exception(caught.value))


class Demanding(Exception):
    """Pickled without complaint, but not made again: its constructor needs more than the message."""

    def __init__(self, code, place):
        super().__init__(f"code {code} at {place}")


@pytest.mark.parametrize(("reason", "kind", "text"), [
    (Demanding(7, "x"), RuntimeError, "Demanding: code 7 at x"),
    (KeyError("missing"), KeyError, "missing"),
    (UnicodeDecodeError("utf-8", b"abc", 1, 2, "odd"), UnicodeDecodeError, "odd"),
], ids=["demanding", "plain", "several arguments"])
def test_an_error_in_a_worker_keeps_its_kind_where_it_can_and_shows_the_line_of_the_user(eager, reason, kind, text):
    home = os.getpid()

    def loss_of_a_user(outputs, targets):
        if os.getpid() != home:
            raise reason
        time.sleep(0.002)
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    with pytest.raises(kind, match=text) as caught:
        fedtail.train(METHODS["fedavg"], Task(dropout().module, loss=loss_of_a_user), POPULATION, rounds=1, engine=fedtail.Engine(workers=3))
    shown = "".join(traceback.format_exception(caught.value))
    assert f'File "{__file__}"' in shown
    assert "in loss_of_a_user" in shown
    assert not children()


def test_a_process_that_dies_costs_time_only(eager):
    home = os.getpid()

    def perform(job, block):
        time.sleep(0.02)
        if os.getpid() != home and job == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return block

    team = Team(perform, 3)
    with pytest.warns(RuntimeWarning, match="worker processes died"):
        assert team.run("die", 8) == list(range(8))
    assert team.run("live", 8) == list(range(8))      # nobody left: alone
    assert team.pool is None
    assert not children()


@pytest.fixture
def held():
    """A lock that another thread holds."""
    lock, let_go = threading.Lock(), threading.Event()
    thread = threading.Thread(target=lambda: [lock.acquire(), let_go.wait(), lock.release()])
    thread.start()
    while not lock.locked():
        time.sleep(0.001)
    yield lock
    let_go.set()
    thread.join()


def test_a_process_that_hangs_is_told_of_with_its_line_and_ends_with_an_interrupt(eager, monkeypatch, held):
    monkeypatch.setattr(fork_pool, "QUIET", 0.25)
    home = os.getpid()

    def waits_for_ever(job, block):
        if os.getpid() != home:
            held.acquire()
        time.sleep(0.01)
        return block

    def interrupt(*_):
        raise KeyboardInterrupt

    team, before = Team(waits_for_ever, 2), signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 3)
    try:
        with pytest.warns(RuntimeWarning, match="has sent nothing for .* s and uses no processor time") as told, \
                pytest.raises(KeyboardInterrupt):
            team.run("job", 8)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(told) == 1
    assert f'File "{__file__}"' in str(told[0].message)
    assert "in waits_for_ever" in str(told[0].message)
    assert "workers=1" in str(told[0].message)
    assert not children()


def test_long_work_is_not_taken_for_a_hang(eager, monkeypatch):
    monkeypatch.setattr(fork_pool, "QUIET", 0.25)
    home = os.getpid()

    def computes(job, block):
        end = time.process_time() + (0.0 if os.getpid() == home else 0.8)
        while time.process_time() < end:
            torch.ones(100).sum()
        return block

    team = Team(computes, 2)
    assert team.run("job", 8) == list(range(8))       # a warning is an error here
    team.close()


def test_a_process_that_hangs_before_it_begins_is_done_without(eager, monkeypatch, held):
    monkeypatch.setattr(fork_pool, "QUIET", 0.25)
    monkeypatch.setattr(fork_pool, "_can_compute_gradients", held.acquire)
    team = Team(lambda job, block: block, 2)
    with pytest.warns(RuntimeWarning, match="It is ended, and the others do its work"):
        assert team.run("job", 8) == list(range(8))
    assert not children()


@pytest.mark.parametrize("forked_by", ["main thread", "other thread"])
def test_a_process_that_hangs_ends_with_its_parent(eager, monkeypatch, forked_by):
    monkeypatch.setattr(fork_pool, "PATIENCE", 0.1)

    def parent():
        home, lock = os.getpid(), threading.Lock()

        def perform(job, block):
            if os.getpid() != home:
                theirs.send(os.getpid())
                lock.acquire()
            time.sleep(0.05)
            return block

        lock.acquire()
        run = threading.Thread(target=Team(perform, 2).run, args=("job", 8))
        run.run() if forked_by == "main thread" else run.start()

    mine, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=parent)
    process.start()
    assert mine.poll(60)
    pid = mine.recv()
    process.kill()
    process.join()
    deadline = time.monotonic() + 30
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = _alive(pid)
    if left:                                          # or it would be there for ever
        os.kill(pid, signal.SIGKILL)
    assert not left


def test_processes_outlive_the_thread_that_started_them(eager):
    team, home = Team(lambda job, block: (time.sleep(0.01), os.getpid())[1], 2), os.getpid()
    thread = threading.Thread(target=team.run, args=("job", 8))
    thread.start()
    thread.join()
    before = children()
    time.sleep(0.1)
    assert len(before) == 1
    assert set(team.run("job", 8)) == {home, *before}
    team.close()


def test_jobs_that_cannot_be_pickled_are_done_alone(eager):
    team = Team(lambda job, block: (job(block), os.getpid()), 3)
    done = team.run(lambda block: block + 1, 4)
    assert [d for d, _ in done] == [1, 2, 3, 4]
    assert {pid for _, pid in done} == {os.getpid()}
    assert team.pool is None


def test_a_daemon_cannot_fork_and_works_alone(eager):
    def inside(connection):
        torch.set_num_threads(1)
        connection.send(params_of(fedtail.train(METHODS["fedavg"], linear(), POPULATION, rounds=1, engine=fedtail.Engine(workers=3))).tolist())

    mine, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=inside, args=(theirs,), daemon=True)
    process.start()
    assert mine.poll(60)
    found = mine.recv()
    process.join()
    assert found == params_of(fedtail.train(METHODS["fedavg"], linear(), POPULATION, rounds=1, engine=fedtail.Engine(workers=1))).tolist()


def test_processes_end_with_the_run_the_fleet_and_an_exception(eager):
    fedtail.train(METHODS["fedavg"], linear(), POPULATION, rounds=1, engine=fedtail.Engine(workers=3))
    assert not children()
    fleet = LocalFleet(POPULATION, linear(), workers=3)
    fedtail.train(METHODS["fedavg"], linear(), POPULATION, rounds=1, fleet=fleet)
    assert len(children()) == 2
    del fleet
    gc.collect()
    assert not children()

    def stop(progress):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        fedtail.train(METHODS["fedavg"], linear(), POPULATION, rounds=2, engine=fedtail.Engine(workers=3), on_round=stop)
    assert not children()


def test_a_family_after_one_model_on_the_same_fleet(eager):
    with LocalFleet(POPULATION, linear(), workers=3) as fleet:
        for name in ("fedavg", "family", "fedavg"):
            shared = fedtail.train(METHODS[name], linear(), POPULATION, rounds=2, fleet=fleet)
            alone = fedtail.train(METHODS[name], linear(), POPULATION, rounds=2, engine=fedtail.Engine(workers=1))
            assert torch.equal(params_of(shared), params_of(alone))


SLOW = """
import os, sys, time, torch, numpy as np, fedtail
from fedtail.engine import workers
workers.WORTH_STARTING = workers.WORTH_SHARING = 0.0
import fedtail.engine.blocks as blocks
blocks.GRAIN = 1

def loss(outputs, targets):
    time.sleep(0.02)
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

people = fedtail.Population.from_arrays(np.zeros((400, 3), "float32"), np.zeros(400, int), np.repeat(np.arange(20), 20))
module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(0.1))
def tell(progress):
    import multiprocessing
    print("round", *[child.pid for child in multiprocessing.active_children()], flush=True)
fedtail.train(fedtail.fedavg(20), fedtail.Task(module, loss=loss), people, rounds=1000, workers=3, kernel="module", on_round=tell)
"""


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_this_one_however_it_ends(sign):
    started = subprocess.Popen([sys.executable, "-c", textwrap.dedent(SLOW)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               preexec_fn=heed_interrupts)
    try:
        line = started.stdout.readline().split()
        assert line[0] == "round", started.stderr.read()
        pids = [int(pid) for pid in line[1:]]
        assert len(pids) == 2
        time.sleep(0.1)                               # somewhere in the next round
        started.send_signal(sign)
        started.wait(90)
    finally:
        started.kill()
        started.communicate()
    assert (started.returncode == 0) == (sign is signal.SIGINT)      # an interrupted training returns what it has so far
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and any(_alive(pid) for pid in pids):
        time.sleep(0.1)
    assert not any(_alive(pid) for pid in pids)


def heed_interrupts() -> None:
    """What a shell starts in the background ignores SIGINT, and so do the processes it starts, these tests among them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_torch_is_left_as_it_was(eager):
    task = dropout()
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    fedtail.train(METHODS["delta_fl"], task, POPULATION, rounds=2, engine=fedtail.Engine(workers=3))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_a_training_that_ends_early_leaves_others_with_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        threads = _Threads()                               # of its own: a fleet of another test may be in the middle of a round
        first, second, third = (threads.take_lease() for _ in range(3))
        first()
        assert (torch.get_num_threads(), threads.usual_count()) == (1, 2)
        first()                                            # once is enough
        del second                                         # a fleet that was never closed
        assert torch.get_num_threads() == 1
        third()
        assert torch.get_num_threads() == 2
        use_one_thread(0)()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_training_in_a_thread(eager):
    found = []
    thread = threading.Thread(target=lambda: found.append(fedtail.train(METHODS["delta_fl"], linear(), POPULATION, rounds=2, engine=fedtail.Engine(workers=3))))
    thread.start()
    thread.join()
    assert torch.equal(params_of(found[0]), params_of(fedtail.train(METHODS["delta_fl"], linear(), POPULATION, rounds=2, engine=fedtail.Engine(workers=1))))
    assert not children()


def test_trainings_with_dropout_in_threads_do_not_disturb_each_other(eager):
    methods = [METHODS["fedavg"], METHODS["delta_fl"]]
    tasks = [dropout(), dropout()]                    # made here: making one draws from the generators that threads share

    def run(place, count):
        found[place] = params_of(fedtail.train(methods[place], tasks[place], POPULATION, rounds=3, seed=place, engine=fedtail.Engine(workers=count)))

    found, before = {}, torch.get_rng_state()
    for place in range(2):
        run(place, 1)
    alone = dict(found)
    for counts in ((1, 1), (1, 3)):
        threads = [threading.Thread(target=run, args=(place, count)) for place, count in enumerate(counts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(found[place], alone[place]) for place in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert not children()


def test_modules_that_draw_nothing_neither_seed_nor_wait():
    torch.manual_seed(0)
    task = Task(nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 4)))
    fleet, done = LocalFleet(POPULATION, task, workers=1, kernel="module"), []
    assert (fleet.kernel.draws, fleet.kernel.counted_draws) == (False, False)
    thread = threading.Thread(target=lambda: done.append(fedtail.train(METHODS["delta_fl"], task, fleet=fleet, rounds=1)))
    with lock_and_restore_generators():                             # as if another training were in the middle of a client
        thread.start()
        thread.join(60)
        assert done
    kernel = LocalFleet(POPULATION, dropout(), workers=1).kernel
    assert (kernel.name, kernel.draws, kernel.counted_draws) == ("stacked", False, True)      # by counters, with nothing to wait for
    noisy = Task(nn.Sequential(nn.Linear(6, 4), nn.RReLU()))
    with pytest.warns(fedtail.engine.kernel_choice.SlowKernelWarning, match=r"1 \(RReLU\) draws from torch's generators by another"):
        assert LocalFleet(POPULATION, noisy, workers=1).kernel.draws


def test_shared_memory_holds_sums_of_64_bits():
    memory = SharedMemory(torch.zeros(2, 10), 3)
    for values in (torch.arange(11.0, dtype=torch.float64), torch.arange(11)):
        place = memory.put_sum(1, values)
        assert isinstance(place, Place)
        assert torch.equal(memory.get_sum(place), values)
    long = torch.zeros(10_000, dtype=torch.float64)
    assert memory.put_sum(0, long) is long
    narrow = torch.zeros(3)
    assert memory.put_sum(0, narrow) is narrow


def test_workers_are_counted_from_none_to_many():
    with pytest.raises(ValueError, match="workers must be at least 0, got -1"):
        fedtail.train(METHODS["fedavg"], linear(), POPULATION, rounds=1, engine=fedtail.Engine(workers=-1))
    assert 1 <= workers.usable_cores() <= (os.cpu_count() or 1)
    assert workers.num_workers(torch.device("cpu"), 0) == 0
    assert workers.num_workers(torch.device("meta"), 5) == 1
    threads = [params_of(fedtail.train(METHODS["fedavg"], linear(), POPULATION, rounds=2, engine=fedtail.Engine(workers=count))) for count in (0, 1)]
    assert torch.allclose(*threads, atol=1e-6)
