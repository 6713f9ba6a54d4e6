"""Shards of clients in actors of Ray: the local engine's model, also when actors are killed, and clear words where it cannot be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedtail
from fedtail import Family, IntegerChannel, PlainChannel, Population, Task, train
from fedtail.engine import LocalFleet
from fedtail.engine.blocks import cut_into_blocks
from fedtail.rows import RowFolder, RowsError
from fedtail.rows.folder import RowSite
from fedtail.runs import Interrupted, run
from fedtail.runs.files import RunRefused

from cases import small_population
from node_process import make_task
from own_risk import OwnMedian
from run_cases import BASE, METHODS, Onlooker, experiment
from wide_risk import WIDE, Habit

ray = pytest.importorskip("ray")

from fedtail.engine.ray import RayFleet, cluster, ray_fleet  # noqa: E402
from fedtail.engine.ray.shard_actor import ShardActor  # noqa: E402
from fedtail.engine.ray.shards import bytes_to_send, make_shard_data, population_from_shard_data  # noqa: E402

POPULATION = small_population()
LOCAL = {"learning_rate": 0.2, "batch_size": 4}
RECIPES = {
    "fedavg": fedtail.fedavg(8, **LOCAL),
    "fedprox, stragglers": fedtail.fedprox(0.1, 8, epochs=2, work=fedtail.Stragglers(0.5), **LOCAL),
    "delta_fl": fedtail.delta_fl(0.4, 8, **LOCAL),
    "smoothed": fedtail.delta_fl(0.4, 8, form="smoothed", **LOCAL),
    "q_ffl": fedtail.q_ffl(1.0, 8, **LOCAL),
    "afl": fedtail.afl(0.5, **LOCAL),
    "afl groups": fedtail.afl(0.5, groups=3, cohort_size=8, **LOCAL),
    "ditto": fedtail.ditto(0.1, 8, **LOCAL),
    "family": Family((fedtail.fedavg(8, **LOCAL), fedtail.delta_fl(0.4, 8, **LOCAL), fedtail.term(1.0, 8, **LOCAL))),
}
OWN = [sys.modules["own_risk"], sys.modules["wide_risk"], sys.modules[__name__]]


@pytest.fixture(scope="module", autouse=True)
def one_ray():
    """One start for all tests: fleets share it, and it ends with its last user, which is this."""
    leave = cluster.join_ray(None, cores=2, memory=0)
    yield
    assert ray.is_initialized()
    leave()
    assert not ray.is_initialized()


@pytest.fixture(scope="module", params=["linear", "module"])
def shared(request):
    """Shards with their task; linear models are computed client by client, so that a row depends on nobody else."""
    task = make_task(request.param)
    with RayFleet(POPULATION, task, shards=3 if request.param == "linear" else 2, chunk=1, own=OWN) as fleet:
        yield fleet, task


def params_of(trained):
    states = trained.state if isinstance(trained.state, tuple) else (trained.state,)
    return torch.cat([s.params for s in states])


@pytest.mark.parametrize("name", RECIPES)
def test_the_model_of_the_local_engine(name, shared):
    fleet, task = shared
    for channel in (PlainChannel(), IntegerChannel()) if fleet.kernel.name == "closed" else (PlainChannel(),):
        views = {"here": [], "there": []}
        here = train(RECIPES[name], task, POPULATION, rounds=2, seed=5, channel=channel, on_round=lambda p, v=views["here"]: v.append(p.view))
        there = train(RECIPES[name], task, fleet=fleet, rounds=2, seed=5, channel=channel, on_round=lambda p, v=views["there"]: v.append(p.view))
        assert torch.allclose(params_of(there), params_of(here), atol=1e-6)
        assert (params_of(here) - torch.cat([task.params()] * (len(params_of(here)) // len(task.params())))).abs().max() > 0.01
        assert there.memory.kept.keys() == here.memory.kept.keys()
        assert all(torch.allclose(there.memory.kept[k], v, atol=1e-6, equal_nan=True) for k, v in here.memory.kept.items())
        for one, other in zip(views["here"], views["there"], strict=True):
            assert torch.equal(one.sampled, other.sampled)
            assert torch.equal(one.trained, other.trained)


@pytest.mark.parametrize("sees", [True, False])
def test_large_memory_is_written_by_actors_that_see_its_files_and_sent_by_others(shared, monkeypatch, tmp_path, sees):
    fleet, task = shared
    fleet.reset_to_folder(tmp_path / "rows")
    if not sees:
        monkeypatch.setattr(RowFolder, "site", lambda self: RowSite("another machine", Path("/"), 0, 0))
    narrow, wide = (replace(fedtail.fedavg(7, **LOCAL), risk=Habit(width)) for width in (4, WIDE))
    here, there = train(narrow, task, POPULATION, rounds=3, seed=5), train(wide, task, fleet=fleet, rounds=3, seed=5)
    assert torch.allclose(params_of(there), params_of(here), atol=1e-6)
    kept, found = here.memory.kept["risk 0"], there.memory.kept["risk 0"].read(POPULATION.key)
    assert torch.equal(found.has, ~kept.isnan().all(1))
    assert torch.allclose(found.rows[:, -1], kept[:, -1].nan_to_num(0.0), atol=1e-6)
    assert len(there.memory.kept["risk 0"].store) == 3 * 7
    assert all(handle.sees == sees for handle in fleet._handles)
    for handle in fleet._handles:
        handle.sees = True
    with LocalFleet(POPULATION, task, folder=tmp_path / "rows") as second, pytest.raises(RowsError, match="has a writer already"):
        train(wide, task, fleet=second, rounds=1)
    fleet.unlock_folder()


@pytest.mark.parametrize("name", ["fedavg", "fedprox, stragglers", "discrete noise"])
def test_sums_of_integers_and_of_noise_are_the_same_to_the_bit(name, shared):
    there, task = shared
    private = replace(fedtail.fedavg(8, **LOCAL), sample=fedtail.Poisson(0.7),
                      aggregate=fedtail.PrivateMean(0.5, fedtail.DiscreteNoise(1.0, planned_clients=1), total=8.0))
    with LocalFleet(POPULATION, task, chunk=1) as here:
        one, other = (train(RECIPES.get(name, private), task, fleet=f, rounds=3, seed=5, channel=IntegerChannel()) for f in (here, there))
    assert torch.equal(params_of(one), params_of(other))


def test_private_runs_have_the_same_noise_and_ledger(shared):
    fleet, task = shared
    method = fedtail.dp_delta_fl(0.5, population=12, clip_norm=0.5, noise_multiplier=1.0, quantile_noise_multiplier=2.0, loss_bound=4.0,
                                 cohort_size=8, noise="discrete", planned_clients=1, **LOCAL)
    here, there = (train(method, task, rounds=3, seed=5, channel=IntegerChannel(), **who) for who in ({"population": POPULATION}, {"fleet": fleet}))
    assert torch.allclose(params_of(there), params_of(here), atol=1e-6)
    assert repr(there.ledger.rounds) == repr(here.ledger.rounds)


def test_rows_are_gathered_in_the_order_of_the_cohort(shared):
    fleet, task = shared
    method = replace(RECIPES["fedavg"], aggregate=OwnMedian())
    here, there = (params_of(train(method, task, rounds=3, **who)) for who in ({"population": POPULATION}, {"fleet": fleet}))
    assert torch.allclose(here, there, atol=1e-6)


@pytest.mark.parametrize("attack", [fedtail.attacks.ModelReplacement(0.3, 5.0), fedtail.attacks.RandomUpdates(0.3), fedtail.attacks.ClaimedLoss(0.3, 9.0)], ids=repr)
def test_corrupted_clients_in_actors_do_what_they_do_here(attack):
    method, task = replace(fedtail.delta_fl(0.6, 12, **LOCAL), aggregate=fedtail.MultiKrum(0.2)), make_task("linear")
    with LocalFleet(POPULATION, task, workers=1, attack=attack) as here, RayFleet(POPULATION, task, shards=2, attack=attack) as there:
        one, other = (params_of(train(method, task, fleet=fleet, rounds=2)) for fleet in (here, there))
    assert torch.allclose(one, other, atol=1e-6)


@dataclass(frozen=True)
class Fickle:
    """Cross-entropy that kills or fails the actor that computes it, once, when a file says so and in which pass."""

    file: Path
    home: int

    def __call__(self, outputs, targets):
        wanted = self.claimed("training" if outputs.requires_grad else "losses") if os.getpid() != self.home else ""
        if wanted:
            if wanted.startswith("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("this loss has had enough")
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

    def claimed(self, place):
        """What is wanted here, for whoever is first."""
        try:
            wanted = self.file.read_text()
            if wanted.endswith(place):
                self.file.unlink()
                return wanted
        except FileNotFoundError:
            pass
        return ""


def test_an_actor_that_is_killed_in_a_round_changes_nothing_and_errors_come_as_they_are(tmp_path):
    task, file = Task(make_task("linear").module, loss=Fickle(tmp_path / "wanted", os.getpid())), tmp_path / "wanted"
    with RayFleet(POPULATION, task, shards=2, kernel="module", own=OWN) as fleet:
        quiet = train(RECIPES["afl"], task, fleet=fleet, rounds=3, seed=5)
        for wanted in ("kill in losses", "kill in training"):
            with pytest.warns(RuntimeWarning, match=r"the actor with clients \d+ to \d+ was lost .* results are the same"):
                disturbed = train(RECIPES["afl"], task, fleet=fleet, rounds=3, seed=5,
                                  on_round=lambda p, wanted=wanted: file.write_text(wanted) and None if p.round == 2 else None)
            assert not file.exists()
            assert torch.equal(params_of(disturbed), params_of(quiet))
            assert quiet.memory.kept
            assert all(torch.equal(disturbed.memory.kept[name], kept) for name, kept in quiet.memory.kept.items())
        file.write_text("fail in training")
        with pytest.raises(ValueError, match=r"^this loss has had enough$"):
            train(RECIPES["fedavg"], task, fleet=fleet, rounds=1)
        assert torch.equal(params_of(train(RECIPES["afl"], task, fleet=fleet, rounds=3, seed=5)), params_of(quiet))


def test_an_actor_that_dies_of_every_question_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_fleet, "TRIES", 1)
    (tmp_path / "wanted").write_text("kill in losses")
    task = Task(make_task("linear").module, loss=Fickle(tmp_path / "wanted", os.getpid()))
    with RayFleet(POPULATION, task, shards=1, kernel="module", own=OWN) as doomed, pytest.raises(RuntimeError, match=r"lost 1 times over the same question.*more shards"):
        train(RECIPES["delta_fl"], task, fleet=doomed, rounds=1)


def test_a_mapped_population_is_opened_by_its_folder_and_not_sent_and_clients_left_out_are_counted(tmp_path):
    x, y = POPULATION.client(10)
    Population.from_clients([*(POPULATION.client(k) for k in range(10)), (x * 1e38, y)]).save(tmp_path / "people")
    mapped, task = Population.open(tmp_path / "people").select(range(2, 11)), make_task("linear")
    assert mapped.folder == tmp_path / "people"
    assert bytes_to_send(mapped) == 0
    assert make_shard_data(mapped, 0, 3).inputs is None
    method, views = fedtail.delta_fl(0.5, 9, learning_rate=1.0), []
    with RayFleet(mapped, task, shards=2) as fleet:
        there = train(method, task, fleet=fleet, rounds=3, on_round=lambda p: views.append(p.view))
    here = train(method, task, mapped, rounds=3)
    assert torch.allclose(params_of(there), params_of(here), atol=1e-6)
    assert there.failed == here.failed == 3
    assert all(view.left_out.tolist() == [False] * 8 + [True] for view in views)
    gone = ray.put(make_shard_data(replace(mapped, folder=tmp_path / "nowhere"), 0, 9))
    with pytest.raises(FileNotFoundError, match="nowhere is not a saved population"):
        ShardActor(0, 9, {}).load_shard([gone, ray.put(ray.cloudpickle.dumps(task))])
    short = make_shard_data(mapped, 6, 9)
    short.clients["start"] += 1000
    with pytest.raises(ValueError, match=r"fewer than where the run was started. Copy the same folder to every node"):
        population_from_shard_data(short)


@pytest.mark.parametrize("people", [POPULATION, POPULATION.select([7, 3, 9]), small_population().split_examples(within=0.5)[0]])
def test_a_shard_holds_its_own_clients_only(people):
    for low, high in cut_into_blocks(people.size, 2):
        held = population_from_shard_data(make_shard_data(people, low, high))
        assert len(held.targets) == int(people.size[low:high].sum())
        for k in range(low, high):
            assert all(torch.equal(a, b) for a, b in zip(held.client(k - low), people.client(k), strict=True))
        assert torch.equal(held.key, people.key[low:high])
        assert torch.equal(held.mass, people.mass[low:high])


def test_a_run_of_a_file_is_that_of_the_local_engine_and_goes_on_with_the_same_bits(tmp_path):
    wanted = experiment("afl", "engine.kind=ray", "engine.shards=1")
    whole = run(wanted, 3, tmp_path / "whole", Onlooker())
    with pytest.raises(Interrupted):
        run(wanted, 3, tmp_path / "parts", Onlooker(stop_after=3))
    elsewhere = experiment("afl", "engine.kind=ray", "engine.shards=1", "engine.address=auto")      # where it is may change
    parts = run(elsewhere, 3, tmp_path / "parts", Onlooker(), resume=True)
    assert parts.result["files"] == whole.result["files"]
    local = run(experiment("afl"), 3, tmp_path / "local", Onlooker())
    here, there = (load_file(one.models[0]) for one in (local, whole))
    assert all(torch.allclose(here[name], there[name], atol=1e-6) for name in here)


def test_personal_models_of_a_file_are_those_of_the_local_engine_and_go_on_with_the_same_bits(tmp_path):
    wanted = experiment("ditto", "engine.kind=ray", "engine.shards=2")
    whole = run(wanted, 3, tmp_path / "whole", Onlooker())
    with pytest.raises(Interrupted):
        run(wanted, 3, tmp_path / "parts", Onlooker(stop_after=3))
    parts = run(wanted, 3, tmp_path / "parts", Onlooker(), resume=True)
    assert parts.result == whole.result                        # with the digests of the models and of every client's errors
    local = run(experiment("ditto"), 3, tmp_path / "local", Onlooker())
    for name in ("personal_loss", "personal_error"):
        assert local.client_columns("test")[name] == pytest.approx(whole.client_columns("test")[name], abs=1e-5)
    assert local.result["participation"] == whole.result["participation"]


def test_a_run_does_not_go_on_with_another_engine(tmp_path):
    with pytest.raises(Interrupted):
        run(experiment("delta_fl"), 0, tmp_path, Onlooker(stop_after=2))
    with pytest.raises(RunRefused, match=r"engine.kind was 'local', is 'ray'"):
        run(experiment("delta_fl", "engine.kind=ray"), 0, tmp_path, Onlooker(), resume=True)


def test_the_command_starts_a_ray_and_ends_it(tmp_path):
    (tmp_path / "mine.toml").write_text(BASE.replace('"SoftmaxRegression"', '"own_net:Net"') + METHODS["delta_fl"])
    (tmp_path / "own_net.py").write_text("from fedtail.models import SoftmaxRegression\n\n\nclass Net(SoftmaxRegression):\n    pass\n")
    command = [sys.executable, "-m", "fedtail", "run", "mine.toml", "--trust", ".", "--engine", "ray", "--set", "engine.shards=1", "--out", "run"]
    here = {**{k: v for k, v in os.environ.items() if not k.startswith("RAY_")}, "PYTHONPATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env=here, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "result.json").exists()
    assert "ERROR" not in done.stderr
    assert [p for p in processes() if str(tmp_path) in p] == []


def processes() -> list[str]:
    """Where every process of this user works."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            found.append(os.readlink(place / "cwd"))
        except OSError:
            continue
    return found


def test_what_it_refuses(monkeypatch):
    task = make_task("linear")
    with pytest.raises(ValueError, match=r"shards must be at least 1, got 0"):
        RayFleet(POPULATION, task, shards=0)
    with pytest.raises(ValueError, match=r"chunk must be at least 1 client, got 0"):
        RayFleet(POPULATION, task, chunk=0)
    with pytest.raises(ValueError, match=r'address must be "auto" or HOST:PORT .* got \'ray://head:10001\'. .*ray job submit'):
        RayFleet(POPULATION, task, address="ray://head:10001")
    with RayFleet(POPULATION, task, address="10.0.0.1:6379") as elsewhere, pytest.raises(ValueError, match=r"this process uses the Ray at .* already"):
        train(RECIPES["fedavg"], task, fleet=elsewhere, rounds=1)
    with pytest.raises(ValueError, match=r"RayFleet holds clients who cannot mask their own rows. Use IntegerChannel"):
        train(fedtail.fedavg(12, **LOCAL), task, fleet=RayFleet(POPULATION, task), rounds=1, channel=fedtail.SecureChannel(threshold=8, minimum_contributors=2))
    with pytest.raises(RuntimeError, match="asked before a round was opened"):
        RayFleet(POPULATION, task).collect((), PlainChannel().encoding(1, 1.0))
    with pytest.raises(ValueError, match=r'shards is for Ray, but the kind of the engine is "local".*--engine ray'):
        experiment("delta_fl", "engine.shards=2")
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs Ray, which is not installed. Write pip install 'fedtail\[ray\]'"):
        RayFleet(POPULATION, task)


def test_an_address_where_nobody_answers_is_refused_at_once():
    with pytest.raises(ConnectionError, match=r"no Ray answers at '127.0.0.1:1' .*leave address out"):
        cluster._check_reachable("127.0.0.1:1")


def test_nothing_is_started_before_the_first_round():
    fleet = RayFleet(POPULATION, make_task("linear"))
    train(RECIPES["fedavg"], make_task("linear"), fleet=fleet, rounds=0)
    assert fleet._handles == []
