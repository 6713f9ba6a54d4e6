"""Rows on disk: what was committed is there to the bit, whoever wrote it and whoever was killed; and nothing else is."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedtail
from fedtail import Family, LocalSGD, train
from fedtail.client_memory import ClientMemory
from fedtail.clients import Clients
from fedtail.engine import LocalFleet, blocks, workers
from fedtail.fleet import Broadcast
from fedtail.models import SoftmaxRegression
from fedtail.rows import RowFolder, RowsError, RowStore
from fedtail.rows import folder as folder_module
from fedtail.runs import Interrupted, run
from fedtail.runs.checkpoint import MEMORY, Checkpoints
from fedtail.runs.files import RunError
from fedtail.sampling import Cohort

from cases import small_population
from remote_cases import Sites
from run_cases import Onlooker, digests, experiment
from wide_risk import WIDE, Habit

POPULATION = small_population()
LOCAL = {"learning_rate": 0.2, "batch_size": 4}
WHO = range(5)


def task() -> fedtail.Task:
    return fedtail.Task(SoftmaxRegression(5, 3))


def method(width: int = WIDE, cohort_size: int = 7) -> fedtail.FederatedAlgorithm:
    return replace(fedtail.fedavg(cohort_size, **LOCAL), risk=Habit(width))


def column(trained_or_fleet, name: str = "risk 0", people=POPULATION):
    """What every client remembers of the number that does not depend on the width, and who remembers anything."""
    memory = trained_or_fleet.memory() if hasattr(trained_or_fleet, "collect") else trained_or_fleet.memory
    kept = memory.kept[name]
    if isinstance(kept, torch.Tensor):
        return kept[:, -1].nan_to_num(0.0), ~kept.isnan().all(1)
    found = kept.read(people.key)
    return found.rows[:, -1], found.has


def same(one, other, name: str = "risk 0") -> bool:
    return all(torch.equal(a, b) for a, b in zip(column(one, name), column(other, name), strict=True))


# The store

def rows_for(seed: int, count: int, dtype=torch.float32, shape=(3, 2)):
    rows = torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    rows[0].view(-1)[seed % rows[0].numel()] = float("nan")
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_store_is_a_dictionary_with_snapshots_whatever_is_committed_copied_and_opened_again(tmp_path, dtype):
    """Against a dictionary, over rounds of which every third is not held to its end; every snapshot stays what it was."""
    def written(seed, count):
        return torch.full((count, 3, 2), seed) if dtype == torch.int64 else rows_for(seed, count, dtype)

    store, model, past = RowStore.create(tmp_path / "a.rows", (3, 2), dtype, "updates"), {}, []
    for round in range(30):
        keys = torch.randperm(9, generator=torch.Generator().manual_seed(round))[:4] - 4
        stamp, rows = bytes([round]) * 8, written(round, 4)
        for number in (0, 2, 3):                           # the client at place 1 writes nothing
            store.file.write(len(store) + number, int(keys[number]), stamp, rows[number])
        assert_holds(store.rows, model)                    # nothing of an open round is seen
        if round % 3:
            store.commit(keys, stamp)
            model = {**model, **{int(keys[n]): rows[n] for n in (0, 2, 3)}}
        past.append((store.rows, dict(model)))
        if round % 7 == 6:
            store = RowStore.open(tmp_path, pickle.loads(pickle.dumps(store.rows.mark)))
        if round % 11 == 10:
            store = store.rows.copied(tmp_path / f"{round}.rows")
            assert len(store) == store.live == len(model)
    for rows, then in [*past, (store.rows, model)]:
        assert_holds(rows, then)


def assert_holds(rows, model):
    keys = list(range(-4, 6))
    found = rows.read(keys)
    assert found.has.tolist() == [key in model for key in keys]
    assert sorted(rows.keys) == sorted(model)
    for row, key in zip(found.rows, keys, strict=True):
        expected = model[key] if key in model else torch.zeros_like(row)
        assert torch.equal(row.view(torch.uint8), expected.contiguous().view(torch.uint8))      # NaN too, to the bit


def test_rows_of_a_round_that_was_not_held_to_its_end_are_not_taken_for_the_next_ones(tmp_path):
    store = RowStore.create(tmp_path / "a.rows", (2,), torch.float64)
    for number, key in enumerate((1, 2, 3)):
        store.file.write(number, key, b"unfinish", torch.ones(2))
    store.file.write(0, 5, b"finished", torch.full((2,), 7.0))
    store.commit([5, 2], b"finished")                      # 2 wrote before, in the same place, and not now
    assert store.rows.read([5, 2, 1]).has.tolist() == [True, False, False]
    assert RowStore.open(tmp_path, store.rows.mark).rows.read([5, 2, 1]).has.tolist() == [True, False, False]


@pytest.mark.parametrize("damage", ["gone", "cut", "head", "numbers", "beginning", "another"])
def test_a_damaged_file_is_refused_in_words(tmp_path, damage):
    store = RowStore.create(tmp_path / "a.rows", (100,), torch.float64, "risk 0")
    store.write(WHO, torch.randn(5, 100, dtype=torch.float64))
    mark, path = store.rows.mark, store.file.path
    content = bytearray(path.read_bytes())
    record = (len(content) - 4096) // 5
    if damage == "gone":
        path.unlink()
    else:
        place = {"head": 4096 + 2 * record + 10, "numbers": 4096 + 2 * record + 300, "beginning": 3}.get(damage)
        if place:
            content[place] ^= 1
        path.write_bytes(content[:-1] if damage == "cut" else content)
    if damage == "another":
        mark = mark._replace(digest="00" * 16)
    text = {"gone": "is missing, and with it what clients remember", "cut": "is too short for the 5 rows",
            "head": "rows were changed", "another": "rows were changed", "beginning": "is not a file of rows",
            "numbers": "row 2 of .*, of client 2, is not what was written"}[damage]
    with pytest.raises(RowsError, match=text + r".*Put back a copy of it, or start again in another folder\."):
        RowStore.open(tmp_path, mark).rows.read(WHO)


def test_rows_of_another_shape_are_refused(tmp_path):
    places = RowFolder(tmp_path).reserve(torch.arange(3))
    places.write("risk 0", torch.tensor([0]), torch.zeros(1, 8))
    with pytest.raises(ValueError, match=r"rows of shape \(9,\) came for 'risk 0', where .* holds rows of shape \(8,\)"):
        places.write("risk 0", torch.tensor([1]), torch.zeros(1, 9))


def test_a_full_disk_is_said_in_words(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    store = RowStore.create(tmp_path / "a.rows", (2,), torch.float64)
    monkeypatch.setattr("fedtail.rows.file.os.pwrite", full)
    with pytest.raises(RowsError, match=r"could not be written: No space left on device\. What earlier rounds wrote is whole"):
        store.write([1], torch.zeros(1, 2))


# Fleets

@pytest.fixture(scope="module")
def narrow():
    """What is kept in memory as ever: four numbers a client."""
    return train(method(4), task(), POPULATION, rounds=5, seed=3, workers=1)


@pytest.mark.parametrize("count", [1, 2])
def test_wide_rows_are_those_kept_in_memory_whatever_the_number_of_processes(monkeypatch, count):
    monkeypatch.setattr(workers, "WORTH_STARTING", 0.0)
    monkeypatch.setattr(workers, "WORTH_SHARING", 0.0)
    monkeypatch.setattr(blocks, "GRAIN", 1)
    monkeypatch.setattr(blocks, "TOGETHER", 1)
    reference = train(method(4), task(), POPULATION, rounds=5, seed=3, workers=1)
    with LocalFleet(POPULATION, task(), workers=count) as fleet:
        wide = train(method(), task(), fleet=fleet, rounds=5, seed=3)
        assert (fleet._team.helpers is not None) == (count > 1)
    assert torch.equal(wide.state.params, reference.state.params)
    assert same(wide, reference)
    assert column(wide)[1].sum() > 7                       # some were drawn more than once, some perhaps never


def test_a_family_remembers_each_its_own(narrow):
    members = (method(4), method(), replace(method(), local=LocalSGD(learning_rate=0.1, batch_size=4)))
    trained = train(Family(members), task(), POPULATION, rounds=5, seed=3, workers=1)
    assert torch.equal(trained.state[1].params, trained.state[0].params)
    assert same(replace(trained, memory=replace(trained.memory, kept={"risk 0": trained.memory.kept["risk 1"]})), narrow)
    assert not torch.equal(column(trained, "risk 2")[0], column(trained, "risk 1")[0])


def test_a_run_in_parts_is_the_run_in_one_and_earlier_parts_stay_as_they_were(narrow):
    half = train(method(), task(), POPULATION, rounds=2, seed=3, workers=1)
    before = column(half)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    first, second = (train(method(), task(), POPULATION, rounds=3, start=half, workers=1) for _ in range(2))
    moved = train(method(), task(), POPULATION.select(order), rounds=3, start=half, workers=1)
    with LocalFleet(POPULATION, task(), workers=1) as fleet:      # back to an earlier time on the same fleet, from the same files
        early = train(method(), task(), fleet=fleet, rounds=2, seed=3)
        on, again = (train(method(), task(), fleet=fleet, rounds=3, start=early) for _ in range(2))
    for trained in (first, second, on, again):
        assert torch.equal(trained.state.params, narrow.state.params)
        assert same(trained, narrow)
    assert torch.allclose(moved.state.params, narrow.state.params, atol=1e-6)
    assert all(torch.equal(*pair) for pair in zip(column(half), before, strict=True))
    with pytest.raises(ValueError, match=r"remembers something of \d+ clients, which are not the 3 clients of this population"):
        train(method(cohort_size=2), task(), POPULATION.select(range(3)), rounds=1, start=replace(half, algorithm=method(cohort_size=2)))


def test_temporary_files_go_with_what_refers_to_them_and_abandoned_ones_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, held = tmp_path / "fedtail-rows-left", tmp_path / "fedtail-rows-new"
    for path in (left, held):
        path.mkdir()
    os.utime(left, (0, 0))
    train(fedtail.fedavg(7, **LOCAL), task(), POPULATION, rounds=1, workers=1)
    assert left.exists()                                   # nobody remembers anything: nothing is touched
    trained = train(method(), task(), POPULATION, rounds=2, workers=1)
    assert len(list(tmp_path.glob("fedtail-rows-*/risk-0-*.rows"))) == 1
    assert column(trained)[1].any()
    assert held.exists()
    assert not left.exists()
    del trained
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == ["fedtail-rows-new"]


def test_replaced_rows_are_given_up_when_they_outweigh_the_others(tmp_path, monkeypatch, narrow):
    monkeypatch.setattr(folder_module, "SLACK", 0)
    with LocalFleet(POPULATION, task(), workers=1, folder=tmp_path / "memory") as fleet:
        snapshots = []
        trained = train(method(), task(), fleet=fleet, rounds=5, seed=3, on_round=lambda p: snapshots.append((p.trained, column(p.trained))) and None)
    assert same(trained, narrow)
    store = trained.memory.kept["risk 0"].store
    assert len(store) <= 2 * store.live + 7
    assert len(list((tmp_path / "memory").glob("*.rows"))) > 1      # until `sweep`, for whoever still refers to them
    for earlier, then in snapshots:
        assert all(torch.equal(*pair) for pair in zip(column(earlier), then, strict=True))


def test_parts_recall_rows_and_who_has_any(tmp_path):
    fleet = LocalFleet(POPULATION, task(), workers=1, folder=tmp_path)
    ids = torch.tensor([4, 1, 9])
    rows = {"wide": torch.randn(3, WIDE, dtype=torch.float32), "small": torch.randn(3, 2)}
    rows["wide"][0] = float("nan")                         # a number like others
    for round, (chosen, finished) in enumerate([([0, 2], True), ([1], False), ([], True)]):
        fleet.open(Cohort(ids, POPULATION.key[ids], torch.ones(3), 1.0), Broadcast(round + 1, 0, task().params()[None]))
        clients = fleet._shard.clients()
        found = {name: clients.recalled(name) for name in rows}
        for name in rows if round else ():
            assert found[name].has.tolist() == [name == "wide", False, True]
            assert torch.equal(found[name].rows[2], rows[name][2])
            assert not found[name].rows[1].any()
        assert round or found == {"wide": None, "small": None}
        for name, values in rows.items():
            some = torch.tensor(chosen, dtype=torch.int64)
            Clients(fleet._shard, some).remember(name, values[some])
        if not round:
            fleet._shard.remembered["small"][0] = float("nan")
        fleet.close(finished)


def test_a_state_alone_is_refused_where_any_part_remembers_unless_the_fleet_does(narrow):
    for width in (4, WIDE):
        with LocalFleet(POPULATION, task(), workers=1) as fleet:
            half = train(method(width), task(), fleet=fleet, rounds=2, seed=3)
            with pytest.raises(ValueError, match="Habit keeps memory on the clients, which a state alone does not hold"):
                train(method(width), task(), POPULATION, rounds=3, seed=3, start=half.state)
            on = train(method(width), task(), fleet=fleet, rounds=3, seed=3, start=half.state)
            assert torch.equal(on.state.params, narrow.state.params)
    fresh = train(method(), task(), POPULATION, rounds=0)
    train(method(), task(), POPULATION, rounds=1, start=fresh.state)      # nobody remembers anything yet


# Checkpoints

def go_on(folder: Path, rounds: int = 6, stop: int | None = None) -> fedtail.training.Trained:
    """Train in a folder with a checkpoint after every round, from the last one there."""
    folder.mkdir(exist_ok=True)
    checkpoints, algorithm = Checkpoints(folder), method()
    checkpoint = checkpoints.load()[0]
    done, start = (checkpoint.round, checkpoint.trained(algorithm, task(), 3)) if checkpoint else (0, None)
    with LocalFleet(POPULATION, task(), workers=1, folder=folder / MEMORY) as fleet:
        return train(algorithm, task(), fleet=fleet, rounds=(stop or rounds) - done, seed=3, start=start,
                     on_round=lambda progress: checkpoints.save(progress.trained, {}))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return go_on(tmp_path_factory.mktemp("whole") / "run")


def killed(folder: Path, name: str, hits: int) -> bool:
    """Whether a process that trains in a folder was killed, at its so many-th call of a function of the system."""
    child = os.fork()
    if child == 0:
        real, left = getattr(os, name), [hits]

        def dying(*given, **named):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*given, **named)

        setattr(os, name, dying)
        go_on(folder)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status != 0


@pytest.mark.parametrize(("name", "hits"), [("pwrite", 1), ("pwrite", 70), ("fsync", 4), ("link", 0)])
def test_killed_with_no_warning_memory_is_there_to_the_bit(whole, tmp_path, name, hits):
    assert killed(tmp_path / "run", name, hits)
    trained = go_on(tmp_path / "run")
    assert torch.equal(trained.state.params, whole.state.params)
    assert same(trained, whole)


@pytest.mark.faults
@pytest.mark.parametrize("name", ["pwrite", "fsync", "link", "replace", "preadv"])
@pytest.mark.parametrize("compact", [False, True])
def test_killed_at_every_moment_memory_is_there_to_the_bit(whole, tmp_path, monkeypatch, name, compact):
    if compact:
        monkeypatch.setattr(folder_module, "SLACK", 0)
    hits = 0
    while killed(tmp_path / f"{hits}", name, hits):
        killed(tmp_path / f"{hits}", name, hits // 2)      # and killed again while it goes on
        trained = go_on(tmp_path / f"{hits}")
        assert torch.equal(trained.state.params, whole.state.params), hits
        assert same(trained, whole), hits
        hits += 1 + hits // 8
    assert hits > 0


def test_a_checkpoint_holds_a_mark_and_its_folder_what_two_checkpoints_name(tmp_path, monkeypatch, whole):
    monkeypatch.setattr(folder_module, "SLACK", 0)
    trained = go_on(tmp_path / "run")
    assert same(trained, whole)
    assert all(path.stat().st_size < 10_000 for path in Checkpoints(tmp_path / "run").files)
    named = {trained.memory.kept["risk 0"].mark.file}
    assert len(named | {path.name for path in (tmp_path / "run" / MEMORY).iterdir()}) <= 2
    elsewhere = train(method(), task(), POPULATION, rounds=1, workers=1)
    with pytest.raises(RunError, match=r"but a checkpoint names what is in .*memory\. Train with a fleet whose folder is that one"):
        Checkpoints(tmp_path / "run").save(elsewhere, {})


def test_a_checkpoint_whose_rows_are_damaged_falls_back_or_is_refused_in_words(tmp_path, whole):
    trained = go_on(tmp_path / "run", stop=4)
    mark, path = trained.memory.kept["risk 0"].mark, trained.memory.kept["risk 0"].store.file.path
    os.truncate(path, path.stat().st_size - 1)             # the last row of round 4
    checkpoint, problems = Checkpoints(tmp_path / "run").load()
    assert checkpoint.round == 3
    assert [f"is too short for the {mark.length} rows" in one for one in problems] == [True]
    assert same(go_on(tmp_path / "run"), whole)
    path.unlink()
    with pytest.raises(RunError, match=r"no checkpoint in .* can be read: .*\.rows is missing, and with it what clients remember"):
        Checkpoints(tmp_path / "run").load()


def test_a_checkpoint_from_before_there_were_stores_goes_on(tmp_path, whole):
    """It holds wide rows whole, NaN for those who kept nothing."""
    half = go_on(tmp_path / "new", stop=3)
    dense = half.memory.kept["risk 0"].read(POPULATION.key).or_nan()
    (tmp_path / "old").mkdir()
    Checkpoints(tmp_path / "old").save(replace(half, memory=ClientMemory(POPULATION.key, {"risk 0": dense})), {})
    assert same(go_on(tmp_path / "old"), whole)
    assert list((tmp_path / "old" / MEMORY).glob("*.rows"))


# Nodes

class Folders(Sites):
    """Nodes with folders of their own."""

    def __init__(self, folder: Path, **settings):
        self.folder = folder
        super().__init__(3, POPULATION, task(), **settings)

    def fresh(self, node):
        return fedtail.deployment.Site(lambda: fedtail.deployment.Node(
            self.people[node], self.task, parts=[Habit], workers=1, folder=self.folder and self.folder / str(node)))

    def column(self):
        nodes = [self.sites[n]._awake() for n in sorted(self.sites)]
        found = [column(node.fleet, people=self.people[n]) for n, node in enumerate(nodes)]
        return torch.cat([rows for rows, _ in found]), torch.cat([has for _, has in found])


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("width", [4, WIDE])
def test_nodes_keep_their_last_round_and_a_server_that_restarts_finds_it(tmp_path, narrow, width, restart):
    sites = Folders(tmp_path, restart=restart)
    fleet = sites.fleet(forgets=False)
    half = train(method(width), task(), fleet=fleet, rounds=2, seed=3)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    Checkpoints(folder).save(half, {})                     # the server ends before anybody hears how round 2 ended
    if restart:                                            # and nodes with it: nothing but their folders is left
        for site in sites.sites.values():
            site.save()                                    # as after every letter, though nobody will give it back
        sites.sites = {n: sites.fresh(n) for n in sites.sites}
    again = sites.fleet(forgets=False)
    start = Checkpoints(folder).load()[0].trained(method(width), task(), 3)
    trained = train(method(width), task(), fleet=again, rounds=3, start=start)
    again.finish()
    assert torch.allclose(trained.state.params, narrow.state.params, atol=1e-6)
    rows, has = sites.column()
    expected = column(narrow)
    assert torch.equal(has, expected[1])
    assert torch.allclose(rows, expected[0], atol=1e-6)
    other = train(method(width), task(), fleet=sites.fleet(forgets=False), rounds=5, seed=3)      # another training begins anew
    assert torch.equal(other.state.params, train(method(width), task(), fleet=Folders(None).fleet(), rounds=5, seed=3).state.params)


def test_a_lost_round_is_not_kept_though_the_server_restarts(tmp_path):
    sites = Folders(tmp_path)
    fleet = sites.fleet(forgets=False)
    half = train(method(), task(), fleet=fleet, rounds=2, seed=3)
    fleet.finish()
    before = sites.column()
    cohort = method().sample(POPULATION, 3, 2)
    fleet.open(cohort, Broadcast(2, 3, half.state.params[None]))
    fleet.collect((fedtail.questions.Train(method().local, method().risk, torch.zeros(0, dtype=torch.float64), method().aggregate),),
                  fedtail.channel.plain.Plain(7, 30.0))
    fleet.close(False)
    again = sites.fleet(forgets=False)
    again.recall(fleet.memory())
    again.open(cohort, Broadcast(3, 3, half.state.params[None]))
    again._exchange_letters(dict.fromkeys(again._counts, b""), dict.fromkeys(again._counts, b""))
    assert all(torch.equal(*pair) for pair in zip(sites.column(), before, strict=True))


def test_a_node_without_a_folder_says_so_when_it_is_saved(tmp_path):
    sites = Folders(None)
    train(method(), task(), fleet=sites.fleet(forgets=False), rounds=2, seed=3)
    with pytest.raises(RowsError, match=r"remember \(risk 0\) is too large to be saved elsewhere. Give the node a folder"):
        [site.save() for site in sites.sites.values()]


# Run folders

def test_a_run_keeps_its_row_stores_in_its_folder_and_resumes_to_the_same_bits(tmp_path):
    experiments = [replace(made, algorithm=replace(made.algorithm, risk=Habit(width)))
                   for width in (4, WIDE) for made in [experiment("delta_fl")]]
    narrow_run, whole_run = (run(one, 3, tmp_path / str(k), Onlooker()) for k, one in enumerate(experiments))
    with pytest.raises(Interrupted):
        run(experiments[1], 3, tmp_path / "parts", Onlooker(stop_after=3))
    assert list((tmp_path / "parts" / MEMORY).glob("risk-0-*.rows"))
    parts = run(experiments[1], 3, tmp_path / "parts", Onlooker(), resume=True)
    assert digests(parts.path) == digests(whole_run.path)
    assert digests(parts.path)["model.safetensors"] == digests(narrow_run.path)["model.safetensors"]
    assert not (tmp_path / "0" / MEMORY).exists()          # small memory is in the checkpoint, as ever
