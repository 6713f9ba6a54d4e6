"""Rows on disk: what was committed is there to the bit, whoever wrote it and whoever was killed; and nothing else is."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedtail
from fedtail import Engine, Family, LocalSGD, Trained, resume, train
from fedtail.client_memory import ClientMemory
from fedtail.clients import Clients
from fedtail.engine import LocalFleet, blocks, workers
from fedtail.errors import FieldError
from fedtail.fleet import Broadcast
from fedtail.models import SoftmaxRegression
from fedtail.rows import RowFolder, RowsError, RowStore, writer_lock
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
            store.file.write_row(len(store) + number, int(keys[number]), stamp, rows[number])
        assert_holds(store.rows, model)                    # nothing of an open round is seen
        if round % 3:
            store.commit(keys, stamp)
            model = {**model, **{int(keys[n]): rows[n] for n in (0, 2, 3)}}
        past.append((store.rows, dict(model)))
        if round % 7 == 6:
            store = RowStore.open(tmp_path, pickle.loads(pickle.dumps(store.rows.mark)))
        if round % 11 == 10:
            store = store.rows.copy_to(tmp_path / f"{round}.rows")
            assert len(store) == store.num_keys == len(model)
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
        store.file.write_row(number, key, b"unfinish", torch.ones(2, dtype=torch.float64))
    store.file.write_row(0, 5, b"finished", torch.full((2,), 7.0, dtype=torch.float64))
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
    places = RowFolder(tmp_path).reserve_places(torch.arange(3))
    places.write("risk 0", torch.tensor([0]), torch.zeros(1, 8))
    with pytest.raises(ValueError, match=r"rows of shape \(9,\) came for 'risk 0', where .* holds rows of shape \(8,\)"):
        places.write("risk 0", torch.tensor([1]), torch.zeros(1, 9))


def test_rows_of_another_type_are_refused_and_not_cast(tmp_path):
    folder = RowFolder(tmp_path)
    for dtype in (torch.float64, torch.float32):
        places = folder.reserve_places(torch.arange(3))
        if dtype == torch.float64:
            places.write("risk 0", torch.tensor([0]), torch.full((1, 8), 0.1, dtype=dtype))
            folder.commit(places)
    text = (r"rows of type torch\.float32 came for 'risk 0', where risk-0-\S+ holds rows of type torch\.float64\. .* return "
            r"rows\.to\(torch\.float64\) from it")
    for write in (lambda: places.write("risk 0", torch.tensor([1]), torch.zeros(1, 8)),
                  lambda: folder.stores["risk 0"].write([1], torch.zeros(1, 8)),
                  lambda: folder.stores["risk 0"].file.write_row(1, 1, b"12345678", torch.zeros(8))):
        with pytest.raises(FieldError, match=text):
            write()
    folder.commit(places)
    assert folder.rows_by_name()["risk 0"].keys == [0]


def test_every_name_has_a_file_of_its_own_however_long_it_is_and_whatever_is_in_it(tmp_path):
    names = ["a b", "a-b", "a%20b", "A b", "", ".", "../a", "a/b", "a\0b", "\u00e4" * 300, "x" * 300, "x" * 300 + "y", "x" * 39 + "\u00e4"]
    folder = RowFolder(tmp_path / "rows")
    places = folder.reserve_places(torch.arange(1))
    for number, name in enumerate(names):
        places.write(name, torch.tensor([0]), torch.full((1, 2), float(number)))
    folder.commit(places)
    assert {name: rows.read([0]).rows[0, 0].item() for name, rows in folder.rows_by_name().items()} == {n: k for k, n in enumerate(names)}
    assert len([path for path in (tmp_path / "rows").iterdir() if path.suffix == ".rows"]) == len(names)
    marks = {name: rows.mark for name, rows in folder.rows_by_name().items()}
    assert {RowStore.open(tmp_path / "rows", mark).file.name for mark in marks.values()} == set(names)
    with pytest.raises(FieldError, match=r"has 5000 letters, and with the shape it must fit into 4096 bytes"):
        folder.reserve_places(torch.arange(1)).write("z" * 5000, torch.tensor([0]), torch.zeros(1, 2))


def test_a_file_under_the_name_it_had_before_opens(tmp_path):
    store = RowStore.create(tmp_path / "risk-0-0011223344556677.rows", (2,), torch.float32, "risk 0")
    store.write([4], torch.ones(1, 2))
    folder = RowFolder(tmp_path)
    folder.restore_rows("risk 0", RowStore.open(tmp_path, store.rows.mark).rows)
    places = folder.reserve_places(torch.tensor([5]))
    places.write("risk 0", torch.tensor([0]), torch.zeros(1, 2))
    folder.commit(places)
    assert folder.rows_by_name()["risk 0"].read([4, 5]).rows.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert folder.rows_by_name()["risk 0"].mark.file == store.file.path.name


def test_a_full_disk_is_said_in_words(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    store = RowStore.create(tmp_path / "a.rows", (2,), torch.float64)
    monkeypatch.setattr("fedtail.rows.file.os.pwrite", full)
    with pytest.raises(RowsError, match=r"could not be written: No space left on device\. What earlier rounds wrote is whole"):
        store.write([1], torch.zeros(1, 2, dtype=torch.float64))


# Fleets

@pytest.fixture(scope="module")
def narrow():
    """What is kept in memory as ever: four numbers a client."""
    return train(method(4), task(), POPULATION, rounds=5, seed=3, engine=Engine(workers=1))


@pytest.mark.parametrize("count", [1, 2])
def test_wide_rows_are_those_kept_in_memory_whatever_the_number_of_processes(monkeypatch, count):
    monkeypatch.setattr(workers, "WORTH_STARTING", 0.0)
    monkeypatch.setattr(workers, "WORTH_SHARING", 0.0)
    monkeypatch.setattr(blocks, "GRAIN", 1)
    monkeypatch.setattr(blocks, "TOGETHER", 1)
    reference = train(method(4), task(), POPULATION, rounds=5, seed=3, engine=Engine(workers=1))
    with LocalFleet(POPULATION, task(), workers=count) as fleet:
        wide = train(method(), task(), fleet=fleet, rounds=5, seed=3)
        assert (fleet._team.pool is not None) == (count > 1)
    assert torch.equal(wide.state.params, reference.state.params)
    assert same(wide, reference)
    assert column(wide)[1].sum() > 7                       # some were drawn more than once, some perhaps never


def test_a_family_remembers_each_its_own(narrow):
    members = (method(4), method(), replace(method(), local=LocalSGD(learning_rate=0.1, batch_size=4)))
    trained = train(Family(members), task(), POPULATION, rounds=5, seed=3, engine=Engine(workers=1))
    assert torch.equal(trained.state[1].params, trained.state[0].params)
    assert same(replace(trained, memory=replace(trained.memory, kept={"risk 0": trained.memory.kept["risk 1"]})), narrow)
    assert not torch.equal(column(trained, "risk 2")[0], column(trained, "risk 1")[0])


def test_a_run_in_parts_is_the_run_in_one_and_earlier_parts_stay_as_they_were(narrow):
    half = train(method(), task(), POPULATION, rounds=2, seed=3, engine=Engine(workers=1))
    before = column(half)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    first, second = (resume(half, POPULATION, rounds=3, engine=Engine(workers=1)) for _ in range(2))
    moved = resume(half, POPULATION.select(order), rounds=3, engine=Engine(workers=1))
    with LocalFleet(POPULATION, task(), workers=1) as fleet:      # back to an earlier time on the same fleet, from the same files
        early = train(method(), task(), fleet=fleet, rounds=2, seed=3)
        on, again = (resume(early, fleet=fleet, rounds=3) for _ in range(2))
    for trained in (first, second, on, again):
        assert torch.equal(trained.state.params, narrow.state.params)
        assert same(trained, narrow)
    assert torch.allclose(moved.state.params, narrow.state.params, atol=1e-6)
    assert all(torch.equal(*pair) for pair in zip(column(half), before, strict=True))
    with pytest.raises(ValueError, match=r"remembers something of \d+ clients, which are not the 3 clients of this population"):
        resume(replace(half, algorithm=method(cohort_size=2)), POPULATION.select(range(3)), rounds=1)


def test_temporary_files_go_with_what_refers_to_them_and_abandoned_ones_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, held = tmp_path / "fedtail-rows-left", tmp_path / "fedtail-rows-new"
    for path in (left, held):
        path.mkdir()
    os.utime(left, (0, 0))
    train(fedtail.fedavg(7, **LOCAL), task(), POPULATION, rounds=1, engine=Engine(workers=1))
    assert left.exists()                                   # nobody remembers anything: nothing is touched
    trained = train(method(), task(), POPULATION, rounds=2, engine=Engine(workers=1))
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
    assert len(store) <= 2 * store.num_keys + 7
    assert len(list((tmp_path / "memory").glob("*.rows"))) > 1      # until `remove_unused_files`, for whoever still refers to them
    for earlier, then in snapshots:
        assert all(torch.equal(*pair) for pair in zip(column(earlier), then, strict=True))


def test_parts_recall_rows_and_who_has_any(tmp_path):
    fleet = LocalFleet(POPULATION, task(), workers=1, folder=tmp_path)
    ids = torch.tensor([4, 1, 9])
    rows = {"wide": torch.randn(3, WIDE, dtype=torch.float32), "small": torch.randn(3, 2)}
    rows["wide"][0] = float("nan")                         # a number like others
    for round, (chosen, finished) in enumerate([([0, 2], True), ([1], False), ([], True)]):
        fleet.open_round(Cohort(ids, POPULATION.key[ids], torch.ones(3), 1.0), Broadcast(round + 1, 0, task().params()[None]))
        clients = fleet._shard.clients()
        found = {name: clients.stored_rows(name) for name in rows}
        for name in rows if round else ():
            assert found[name].has.tolist() == [name == "wide", False, True]
            assert torch.equal(found[name].rows[2], rows[name][2])
            assert not found[name].rows[1].any()
        assert round or found == {"wide": None, "small": None}
        for name, values in rows.items():
            some = torch.tensor(chosen, dtype=torch.int64)
            Clients(fleet._shard, some).store_rows(name, values[some])
        if not round:
            fleet._shard.remembered["small"][0] = float("nan")
        fleet.close_round(finished)


def test_a_state_alone_is_refused_where_any_part_remembers_unless_the_fleet_does(narrow):
    for width in (4, WIDE):
        with LocalFleet(POPULATION, task(), workers=1) as fleet:
            half = train(method(width), task(), fleet=fleet, rounds=2, seed=3)
            with pytest.raises(ValueError, match="Habit keeps memory on the clients, which a state alone does not hold"):
                resume(Trained(method(width), task(), half.state, 3), POPULATION, rounds=3)
            on = resume(Trained(method(width), task(), half.state, 3), fleet=fleet, rounds=3)
            assert torch.equal(on.state.params, narrow.state.params)
    fresh = train(method(), task(), POPULATION, rounds=0)
    resume(Trained(method(), task(), fresh.state), POPULATION, rounds=1)      # nobody remembers anything yet


# Checkpoints

def go_on(folder: Path, rounds: int = 6, stop: int | None = None) -> fedtail.training.Trained:
    """Train in a folder with a checkpoint after every round, from the last one there."""
    folder.mkdir(exist_ok=True)
    checkpoints, algorithm = Checkpoints(folder), method()
    checkpoint = checkpoints.load()[0]
    start = checkpoint.to_trained(algorithm, task(), 3) if checkpoint else Trained(algorithm, task(), algorithm.initial_state(task().params(), 3), 3)
    with LocalFleet(POPULATION, task(), workers=1, folder=folder / MEMORY) as fleet:
        return resume(start, fleet=fleet, rounds=(stop or rounds) - start.rounds,
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
    elsewhere = train(method(), task(), POPULATION, rounds=1, engine=Engine(workers=1))
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


# One writer

@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(writer_lock, "PATIENCE", 0.0)


@contextmanager
def other_process(work):
    """A process that does some work and then nothing, until it is killed; one that it has forked outlives it meanwhile."""
    done, tell = os.pipe()
    child = os.fork()
    if child == 0:
        work()
        left = os.fork()
        if left:
            os.write(tell, left.to_bytes(8, "little"))
        signal.pause()
        os._exit(0)
    forked = int.from_bytes(os.read(done, 8), "little")
    try:
        yield child
    finally:
        for process in {child, forked} if Path(f"/proc/{child}").exists() else {forked}:
            os.kill(process, signal.SIGKILL)


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def test_a_second_process_is_refused_and_a_killed_one_leaves_nothing_behind(impatient, tmp_path, whole):
    folder, held = tmp_path / "run", []

    def begin():
        folder.mkdir()
        checkpoints = Checkpoints(folder)
        held.append(LocalFleet(POPULATION, task(), workers=2, folder=folder / MEMORY))
        train(method(), task(), fleet=held[0], rounds=2, seed=3, on_round=lambda progress: checkpoints.save(progress.trained, {}))

    with other_process(begin) as writer:
        text = rf"memory has a writer already, process {writer}, and two would write over each other's rows\. Wait for it to end, or give"
        with pytest.raises(RowsError, match=text):
            go_on(folder)
        with LocalFleet(POPULATION, task(), workers=1, folder=folder / MEMORY) as fleet, pytest.raises(RowsError, match=text):
            train(method(), task(), fleet=fleet, rounds=1)
        with pytest.raises(RowsError, match=text):         # it would remove the files of rows that its checkpoints do not name
            Checkpoints(folder).save(whole, {})
        assert Checkpoints(folder).load()[0].round == 2    # reading is free
        kill(writer)
        assert (folder / MEMORY / ".lock").exists()
        assert same(go_on(folder), whole)
        assert not (folder / MEMORY / ".lock").exists()


def test_a_second_fleet_is_refused_until_the_first_lets_go(impatient, tmp_path):
    def trained(fleet, width=WIDE):
        return train(method(width), task(), fleet=fleet, rounds=2, seed=3)

    first, second = (LocalFleet(POPULATION, task(), workers=1, folder=tmp_path / "rows") for _ in range(2))
    with second:
        assert same(trained(second, 4), trained(first, 4))      # small memory is nobody else's business
        half = trained(first)
        with pytest.raises(RowsError, match=r"another fleet of this process.* Leave its `with` block first"):
            trained(second)
        before, now = column(half), set((tmp_path / "rows").iterdir())
        with first:
            resume(half, fleet=first, rounds=2)
        more = resume(half, fleet=second, rounds=2)           # from the same file, to whose end `first` has written meanwhile
        assert same(more, resume(half, POPULATION, rounds=2))
        assert all(torch.equal(*pair) for pair in zip(column(half), before, strict=True))
        assert now <= set((tmp_path / "rows").iterdir()) | {tmp_path / "rows" / ".lock"}
    del first
    third = LocalFleet(POPULATION, task(), workers=1, folder=tmp_path / "rows")
    trained(third)
    del third                                              # lets go too
    trained(LocalFleet(POPULATION, task(), workers=1, folder=tmp_path / "rows"))


def test_both_in_their_first_round_the_second_to_end_it_is_refused(impatient, tmp_path):
    folders = [RowFolder(tmp_path / "rows") for _ in range(2)]
    places = [folder.reserve_places(torch.arange(2)) for folder in folders]
    for k, place in enumerate(places):
        place.write("risk 0", torch.tensor([0]), torch.full((1, 3), float(k)))
    folders[0].commit(places[0])
    folders[0].remove_unused_files(())                                   # the other's rows are gone
    with pytest.raises(RowsError, match="has a writer already"):
        folders[1].commit(places[1])
    assert folders[0].rows_by_name()["risk 0"].read([0]).rows.tolist() == [[0.0] * 3]


def test_whoever_lets_go_does_not_write_over_what_another_process_wrote_since(tmp_path):
    half = go_on(tmp_path / "run", stop=2)
    with other_process(lambda: go_on(tmp_path / "run", stop=3)) as writer:
        kill(writer)
    with LocalFleet(POPULATION, task(), workers=1, folder=tmp_path / "run" / MEMORY) as fleet, \
         pytest.raises(RowsError, match=r"was written to by another process since it was last used here\. Go on from the checkpoint"):
        resume(half, fleet=fleet, rounds=1)


# Nodes

class Folders(Sites):
    """Nodes with folders of their own."""

    def __init__(self, folder: Path, most: int = 3, **settings):
        self.folder, self.most = folder, most
        super().__init__(3, POPULATION, task(), **settings)

    def fresh(self, node):
        return fedtail.deployment.Site(lambda: fedtail.deployment.Node(
            self.people[node], self.task, parts=[Habit], workers=1, folder=self.folder and self.folder / str(node),
            trainings=self.most), masked_only=False)

    def column(self):
        nodes = [self.sites[n]._loaded_node() for n in sorted(self.sites)]
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
        del site
        sites.sites = {n: sites.fresh(n) for n in sites.sites}
    again = sites.fleet(forgets=False)
    start = Checkpoints(folder).load()[0].to_trained(method(width), task(), 3)
    trained = resume(start, fleet=again, rounds=3)
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
    fleet.open_round(cohort, Broadcast(2, 3, half.state.params[None]))
    fleet.collect((fedtail.questions.Train(method().local, method().risk, torch.zeros(0, dtype=torch.float64), method().aggregate),),
                  fedtail.channel.plain.Plain(7, 30.0))
    fleet.close_round(False)
    again = sites.fleet(forgets=False)
    again.restore_memory(fleet.memory())
    again.open_round(cohort, Broadcast(3, 3, half.state.params[None]))
    again._exchange_messages(dict.fromkeys(again._counts, b""), dict.fromkeys(again._counts, b""))
    assert all(torch.equal(*pair) for pair in zip(sites.column(), before, strict=True))


@pytest.mark.parametrize("width", [4, WIDE])
def test_a_second_node_with_the_same_folder_is_refused(impatient, tmp_path, width):
    sites = Folders(tmp_path)
    train(method(width), task(), fleet=sites.fleet(forgets=False), rounds=2, seed=3)
    saved = sites.sites[0]._loaded_node().save()
    second = sites.fresh(0)._loaded_node()
    with pytest.raises(RowsError, match="has a writer already"):
        second.restore(saved)
    sites.sites.clear()
    second.restore(saved)


def test_a_node_keeps_its_last_trainings_and_never_removes_one_that_is_open(impatient, tmp_path):
    def place(training):
        return tmp_path / "0" / training.hex()

    def trained(sites, width=WIDE):
        half = train(method(width), task(), fleet=sites.fleet(forgets=False), rounds=2, seed=3)
        sites.sites[0].save()
        return half.memory.nodes.training

    sites, others = Folders(tmp_path, most=2), Folders(tmp_path, most=2)
    names = [trained(sites, width) for width in (WIDE, 4)]
    sites.sites[0]._loaded_node().fleet.unlock_folder()    # it would count as used until the next training begins
    (tmp_path / "0" / "operator's notes").mkdir()
    (tmp_path / "0" / "abc").mkdir()                       # no number of whole bytes
    (tmp_path / "0" / ".removing-00").mkdir()              # of a node that was killed meanwhile
    for age, name in enumerate(names):                     # the first was used last
        for path in (place(name), *place(name).iterdir()):
            os.utime(path, (1000.0 - age, 1000.0 - age))
    names.append(trained(sites))
    assert [place(name).exists() for name in names] == [True, False, True]
    for path in (place(names[2]), *place(names[2]).iterdir()):
        os.utime(path, (0.0, 0.0))
    names.append(trained(others))                       # the third is older than all, but `sites` has it open
    assert [place(name).exists() for name in names] == [True, False, True, True]
    assert (tmp_path / "0" / "abc").exists()
    assert not (tmp_path / "0" / ".removing-00").exists()
    assert (tmp_path / "0" / "operator's notes").exists()
    del sites
    names.append(trained(others))
    assert [place(name).exists() for name in names] == [False, False, False, True, True]
    with pytest.raises(ValueError, match=r"trainings must be at least 1, got 0\."):
        Folders(tmp_path, most=0).sites[0]._loaded_node()


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
