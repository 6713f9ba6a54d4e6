"""Run folders: what they hold, and that a crash, a full disk or a change in between loses and mixes nothing."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from safetensors.torch import load_file

import fedtail
from fedtail.engine import LocalFleet
from fedtail.experiment import Source
from fedtail.experiment.experiment import build_experiments
from fedtail.privacy import Ledger
from fedtail.runs import Interrupted, RunError, RunFolder, find_runs, run
from fedtail.runs.checkpoint import Checkpoints
from fedtail.runs.comparison import paired_differences, rows_by_method
from fedtail.runs.files import JsonLinesFile, hold_folder_lock, write_atomically

from run_cases import BASE, METHODS, Onlooker, digests, experiment


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, RunFolder]:
    """Every method, run without interruption."""
    place = tmp_path_factory.mktemp("whole")
    return {name: run(experiment(name), 3, place / name, Onlooker()) for name in METHODS}


def trained(name: str) -> fedtail.Trained:
    """The same method with the library alone, no folder."""
    wanted = experiment(name)
    return fedtail.train(wanted.algorithm, wanted.task.make(3), wanted.data.load(3)["train"], rounds=6, seed=3)


# What a folder holds

@pytest.mark.parametrize("name", METHODS)
def test_models_are_those_of_the_library_and_load_with_load_state_dict(whole, name):
    for path, module in zip(whole[name].models, trained(name).modules, strict=True):
        fresh = fedtail.models.SoftmaxRegression(60, 10)
        fresh.load_state_dict(load_file(path))
        assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), module.parameters(), strict=True))


@pytest.mark.parametrize("name", ["delta_fl", "family"])
def test_metrics_are_statistics_of_the_client_table(whole, name):
    """Recomputed with numpy alone from the parquet file."""
    folder = whole[name]
    last = folder.metrics[-1]
    assert [line["round"] for line in folder.metrics] == [0, 2, 4, 6]
    for member in range(len(folder.members)):
        for split in ("validation", "test"):
            error = folder.client_columns(split, member)["error"]
            told = last["members"][member][split]["error"]
            assert told["mean"] == pytest.approx(error.mean())
            assert told["p90"] == pytest.approx(np.percentile(error, 90))
            assert told["p95"] == pytest.approx(np.percentile(error, 95))
            assert told["worst10"] == pytest.approx(error.max())          # a tenth of four clients is part of one
        train = folder.client_columns("train", member)
        assert last["members"][member]["train"]["loss"]["mean"] == pytest.approx(np.average(train["loss"], weights=train["mass"]))
    assert folder.result["members"] == last["members"]


@pytest.mark.parametrize("name", METHODS)
def test_rounds_say_who_was_asked_and_who_counted(whole, name):
    """Replayed with the library: the cohort from the sampler, who counted from the round's view."""
    wanted, seen = experiment(name), []
    fedtail.train(wanted.algorithm, wanted.task.make(3), wanted.data.load(3)["train"], rounds=6, seed=3,
                  on_round=lambda progress: seen.append(progress.view))
    folder = whole[name]
    assert len(folder.rounds) == 6
    clients = folder.about["splits"]["train"]
    asked, tail = np.zeros(clients, int), np.zeros((len(folder.members), clients), int)
    for line, view in zip(folder.rounds, seen, strict=True):
        assert list(line["asked"]) == view.sampled.tolist()
        for member, told in enumerate(line["members"]):
            counted = view.contributors_of(member).tolist()
            assert list(told["counted"]) == counted
            tail[member][counted] += 1
        asked[line["asked"]] += 1
    for member in range(len(folder.members)):
        table = folder.client_columns("train", member)
        assert table["asked"].tolist() == asked.tolist()
        assert table["in_tail"].tolist() == tail[member].tolist()


def test_the_superquantile_records_its_threshold_and_half_of_the_cohort(whole):
    for line in whole["delta_fl"].rounds[1:]:
        [member] = line["members"]
        assert member["threshold"] > 0
        assert 2 <= len(member["counted"]) <= 4                            # about half of the mass of five clients
    assert all(member["threshold"] is None for line in whole["afl"].rounds for member in line["members"])


def test_what_only_a_simulator_sees_says_so(whole):
    folder = whole["delta_fl"].path
    assert parquet.read_schema(folder / "clients.parquet").metadata[b"simulator_only"] == b"true"
    assert json.loads((folder / "rounds.jsonl").read_text().splitlines()[0])["simulator_only"] is True


def test_the_ledger_is_honest(whole):
    ledger = json.loads((whole["delta_fl"].path / "privacy.json").read_text())
    assert (ledger["private"], ledger["epsilon"], ledger["rounds"]) == (False, "infinity", 6)


def test_the_ledger_of_a_stopped_run_counts_the_rounds_that_were_asked(tmp_path):
    assert json.loads((interrupted(tmp_path) / "privacy.json").read_text())["rounds"] == 5


def test_the_ledger_of_a_private_run_says_all_that_was_released(whole):
    folder = whole["private"].path
    told = json.loads((folder / "privacy.json").read_text())
    expected = trained("private").ledger.guarantee(0.01)
    assert told["epsilon"] == pytest.approx(expected.epsilon)
    assert (told["private"], told["delta"], told["adjacency"], told["sampling"], told["accountant"]) == (True, 0.01, "zero-out", "poisson", "rdp")
    assert told["without_amplification"] == pytest.approx(expected.without_amplification)
    assert told["releases"] == [{"what": "what NoisyHistogram asks about the losses", "times": 6},
                                {"what": "the updates, by AdaptiveClip", "times": 6}]
    assert told["guarantee"] == ("simulated guarantee: the seed is in this folder; "
                                 "simulated guarantee: noise was added in floating point, by the server")
    assert Ledger(path=folder / "ledger.jsonl").rounds == trained("private").ledger.rounds


def test_a_private_family_releases_as_much_for_each_of_its_models(whole):
    told = json.loads((whole["private family"].path / "privacy.json").read_text())
    assert [release["times"] for release in told["releases"]] == [12, 12]
    assert whole["private family"].members == ["tail_fraction 1.0", "tail_fraction 0.5"]


def test_what_is_asked_again_after_a_crash_is_charged_again(tmp_path):
    """Stopped without a word after round 5, the last checkpoint being of round 4."""
    child = subprocess.run([sys.executable, "-c", (
        "import os, sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; from run_cases import Onlooker, experiment\n"
        "from fedtail.runs import run\n"
        "class Dies(Onlooker):\n"
        "    def round(self, round):\n"
        "        if round == 5: os._exit(9)\n"
        "run(experiment('private'), 3, Path(sys.argv[2]), Dies())")
        , str(Path(__file__).parent), str(tmp_path / "run")], check=False)
    assert child.returncode == 9
    run(experiment("private"), 3, tmp_path / "run", Onlooker(), resume=True)
    charged = sum(count for _, count in Ledger(path=tmp_path / "run" / "ledger.jsonl").rounds)
    assert charged == 7                                                    # six, and round 5 twice
    told = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert told["rounds"] == 6
    assert told["epsilon"] > trained("private").ledger.guarantee(0.01).epsilon
    model, expected = load_file(tmp_path / "run" / "model.safetensors"), trained("private").module.state_dict()
    assert all(torch.equal(model[name], expected[name]) for name in expected)


PRIVATE_BUDGET = METHODS["private"].replace("delta = 0.01", "delta = 0.01\nepsilon = 5.0")


@pytest.mark.filterwarnings("default")
def test_a_run_ends_before_it_would_exceed_its_budget_and_is_finished(tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "budget", PRIVATE_BUDGET)
    watch = Onlooker()
    folder = run(experiment("budget", "rounds=60"), 3, tmp_path / "run", watch)
    assert any(note.startswith("a guarantee for each of 8 clients will be useless") for note in watch.notes)
    done = folder.result["round"]
    assert 1 <= done < 60
    told = json.loads((folder.path / "privacy.json").read_text())
    assert told["epsilon"] <= 5.0
    assert told["rounds"] == done
    assert any(f"stopped after {done} of 60 rounds" in note for note in watch.notes)
    assert folder.metrics[-1]["round"] <= done
    before = digests(folder.path)
    run(experiment("budget", "rounds=60"), 3, tmp_path / "run", Onlooker(), resume=True)
    assert digests(folder.path) == before


@pytest.mark.filterwarnings("ignore::fedtail.NoContributionWarning")      # noise no one knows may hide eight clients in all three rounds
def test_cohorts_of_the_operating_system_are_kept_nowhere_and_a_resumed_run_says_that_it_differs(tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "os", METHODS["private"].replace("delta = 0.01", 'delta = 0.01\nrandomness = "os"'))
    models = []
    for name in ("one", "two"):
        with pytest.raises(Interrupted):
            run(experiment("os"), 3, tmp_path / name, Onlooker(stop_after=3))
        watch = Onlooker()
        run(experiment("os"), 3, tmp_path / name, watch, resume=True)
        assert "cohorts and noise come from the operating system: the run goes on, but not as it would have to the bit" in watch.notes
        assert not (tmp_path / name / "rounds.jsonl").exists()
        models.append(torch.cat([tensor.flatten() for tensor in load_file(tmp_path / name / "model.safetensors").values()]))
    assert not torch.equal(*models)
    told = json.loads((tmp_path / "one" / "privacy.json").read_text())
    assert told["randomness"] == "os"


@pytest.mark.parametrize(("more", "text"), [
    ("delta = 0.01", "this run is private, but at which delta? Write [privacy] and below it delta = 0.01, say: below one over the number of clients."),
    ("delta = 0.01\nepsilon = 0.2", "epsilon = 0.2 at delta = 0.01 does not last for a round with this noise."),
])
def test_promises_that_cannot_be_kept_are_refused_before_anything_is_written(tmp_path, monkeypatch, more, text):
    changed = METHODS["private"].replace("delta = 0.01", more if "epsilon" in more else 'randomness = "seed"')
    monkeypatch.setitem(METHODS, "bad", changed)
    with pytest.raises(ValueError) as refused:
        run(experiment("bad"), 3, tmp_path / "run", Onlooker())
    assert text in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_family_says_who_picks_which_model(whole):
    folder = whole["family"]
    family = fedtail.evaluate_family(trained("family"), experiment("family").data.load(3)["test"])
    picks = np.stack([folder.client_columns("test", member)["picks"] for member in range(3)])
    assert picks.sum(0).tolist() == [1] * 4                                # everybody picks one
    assert picks.argmax(0).tolist() == family.choice.tolist()
    judged = np.stack([folder.client_columns("test", member)["judged"] for member in range(3)])
    assert judged.astype(float).tolist() == [member.values.tolist() for member in family.members]


def test_a_folder_says_what_ran_and_can_be_run_again(whole, tmp_path):
    folder = whole["delta_fl"]
    assert folder.about["seed"] == 3
    assert folder.about["versions"]["torch"] == torch.__version__
    again = fedtail.experiment.read_experiment(folder.path / "experiment.toml")
    assert digests(run(again, again.seeds[0], tmp_path / "again", Onlooker()).path) == digests(folder.path)


def test_finetuning_is_recorded_where_it_is_asked_for(tmp_path):
    wanted = experiment("delta_fl", more="[evaluate.finetune]\nlearning_rate = 0.1\nepochs = 2\n")
    folder = run(wanted, 0, tmp_path / "tuned", Onlooker())
    splits = wanted.data.load(0)
    model = fedtail.train(wanted.algorithm, wanted.task.make(0), splits["train"], rounds=6)
    tuned = fedtail.finetune(model, splits["test"], fedtail.LocalSGD(learning_rate=0.1, epochs=2))
    table = folder.client_columns("test")
    assert table["before_finetuning"].tolist() == tuned.before.error.values.tolist()
    assert table["after_finetuning"].tolist() == tuned.after.error.values.tolist()
    assert folder.result["finetuned"][0]["after"]["mean"] == pytest.approx(np.mean(table["after_finetuning"]))


def test_clients_with_one_example_are_left_out_of_what_needs_two(tmp_path):
    text = "[evaluate.finetune]\nlearning_rate = 0.1\nepochs = 1\n"
    wanted = experiment("family", "data.sizes=[9,1,1,1,5,1,8,1,1,5,9,1,7,1,5,1]", more=text)
    table = run(wanted, 0, tmp_path / "ones", Onlooker()).client_columns("test")
    alone = table["size"] == 1
    assert alone.any()
    assert all(value is None for value in table["picks"][alone])
    assert np.isnan(table["judged"][alone].astype(float)).all()
    assert np.isnan(table["after_finetuning"][alone].astype(float)).all()
    assert np.isfinite(table["after_finetuning"][~alone].astype(float)).all()


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_tensorboard_gets_the_same_numbers_and_purges_what_came_after_a_checkpoint(tmp_path, stop, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    files = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    monkeypatch.setattr(files, "_global_uid", files._global_uid.__class__(9), raising=True)      # the next writer is 10, before 9
    wanted = experiment("delta_fl", "evaluate.tensorboard=true")
    with pytest.raises(Interrupted):
        run(wanted, 0, tmp_path / "board", Onlooker(stop_after=stop))
    folder = run(wanted, 0, tmp_path / "board", Onlooker(), resume=True)
    events = accumulator.EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    told = [(event.step, event.value) for event in events.Scalars("error/test/p90")]
    assert told == [(line["round"], pytest.approx(line["members"][0]["test"]["error"]["p90"], rel=1e-6)) for line in folder.metrics]
    assert "loss/train" in events.Tags()["histograms"]


# Interrupted, and the same to the bit

@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("stops", [[1], [3, 1, 1], [5]], ids=str)
def test_an_interrupted_run_ends_with_the_same_bits(whole, tmp_path, name, stops):
    for stop in stops:
        with pytest.raises(Interrupted):
            run(experiment(name), 3, tmp_path / "run", Onlooker(stop_after=stop), resume=True)
    last = Onlooker()
    folder = run(experiment(name), 3, tmp_path / "run", last, resume=True)
    assert last.began[2] == sum(stops)
    assert digests(folder.path) == digests(whole[name].path)


def killing(after: str, hits: int, folder: Path) -> subprocess.CompletedProcess:
    """Run in another process that dies by SIGKILL when a function is called for the so-many-th time."""
    program = f'''
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch; torch.set_num_threads(1)
from run_cases import Onlooker, experiment
import fedtail.runs.execution
module, _, name = {after!r}.rpartition(".")
owner = eval(module, {{"fedtail": fedtail, "os": os}})
real, left = getattr(owner, name), [{hits}]
def dying(*args, **kwargs):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **kwargs)
setattr(owner, name, dying)
from fedtail.runs import run
run(experiment("delta_fl"), 3, {str(folder)!r}, Onlooker(), resume=True)
'''
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120,
                          env={**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize(("features", "classes"), [(50, 2), (7, 3)])
def test_from_every_checkpoint_of_a_narrow_model_training_goes_on_to_the_same_bits(tmp_path, features, classes):
    """Products are rounded by where their factors lie in memory, and a mapped file puts them anywhere."""
    random = np.random.default_rng(0)
    people = fedtail.Population.from_arrays(random.normal(size=(400, features)).astype(np.float32),
                                            random.integers(0, classes, 400), np.arange(400) % 20)
    task, method, rounds = fedtail.Task(fedtail.models.SoftmaxRegression(features, classes)), fedtail.term(1.0, 10), 12
    states = {}

    def note(progress):
        states[progress.round] = progress.trained

    whole = fedtail.train(method, task, people, rounds=rounds, on_round=note, engine=fedtail.Engine(workers=1))
    for stop in range(1, rounds):
        kept = Checkpoints(tmp_path / str(stop))
        kept.folder.mkdir()
        kept.save(states[stop], {})
        read = kept.load()[0].to_trained(method, task, 0)
        more = fedtail.resume(read, people, rounds=rounds - stop, engine=fedtail.Engine(workers=1))
        assert torch.equal(more.state.params, whole.state.params)


@pytest.mark.parametrize("after", ["os.fsync", "fedtail.runs.simulation_records.round_line"])
def test_killed_with_no_warning_it_goes_on_to_the_same_bits(whole, tmp_path, after):
    """Killed in the middle of writing files, and between rounds; resumed each time until it is done."""
    codes = [killing(after, hits, tmp_path / "run").returncode for hits in (0, 5)]
    assert codes == [-9, -9]
    folder = run(experiment("delta_fl"), 3, tmp_path / "run", Onlooker(), resume=True)
    assert digests(folder.path) == digests(whole["delta_fl"].path)


@pytest.mark.faults
@pytest.mark.parametrize("after", ["os.fsync", "fedtail.runs.simulation_records.round_line", "os.open", "fedtail.runs.recording.write_atomically",
                                   "fedtail.runs.simulation_records.write_client_table", "fedtail.runs.files.Path.replace"])
def test_killed_at_every_moment(whole, tmp_path, after):
    """At the first call, the second, ..., until a run gets through; each resumes what the one before it left."""
    for hits in range(60):
        done = killing(after, hits, tmp_path / f"{hits}")
        folder = run(experiment("delta_fl"), 3, tmp_path / f"{hits}", Onlooker(), resume=True)
        assert digests(folder.path) == digests(whole["delta_fl"].path), (after, hits)
        if done.returncode == 0:
            break
        assert done.returncode == -9, done.stderr
    assert hits > 0
    assert done.returncode == 0


def newest(folder: Path) -> Path:
    return max((path for path in Checkpoints(folder).files if path.exists()), key=lambda path: path.stat().st_mtime_ns)


def interrupted(tmp_path: Path, stop: int = 5) -> Path:
    with pytest.raises(Interrupted):
        run(experiment(), 3, tmp_path / "run", Onlooker(stop_after=stop))
    return tmp_path / "run"


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "gone"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(whole, tmp_path, damage):
    folder = interrupted(tmp_path)                         # rounds 0, 2, 4, 5 had a checkpoint
    place = newest(folder)
    content = place.read_bytes()
    flipped = bytearray(content)
    flipped[-5] ^= 1
    if damage == "gone":
        place.unlink()
    else:
        place.write_bytes({"cut": content[:-100], "empty": b"", "flipped": bytes(flipped)}[damage])
    onlooker = Onlooker(stop_after=1)
    with pytest.raises(Interrupted):
        run(experiment(), 3, folder, onlooker, resume=True)
    assert onlooker.began[2] == 4
    assert Checkpoints(folder).load()[0].round == 5        # the damaged one was replaced, not the whole one
    done = run(experiment(), 3, folder, Onlooker(), resume=True)
    assert digests(done.path) == digests(whole["delta_fl"].path)
    if damage != "gone":
        assert any(f"{place.name} is damaged" in note and "going on from checkpoint-" in note for note in onlooker.notes)
        assert "is damaged" in (folder / "log.txt").read_text()


def test_a_run_goes_on_with_other_workers_and_says_its_kernel(whole, tmp_path):
    folder = interrupted(tmp_path)
    done = run(experiment("delta_fl", "engine.workers=1"), 3, folder, Onlooker(), resume=True)
    assert digests(done.path) == digests(whole["delta_fl"].path)
    assert done.about["kernel"] == "closed"
    with pytest.raises(RunError, match=r"engine\.kernel was 'auto', is 'module'"):
        run(experiment("delta_fl", "engine.kernel=module"), 3, interrupted(tmp_path / "other"), Onlooker(), resume=True)


def test_two_damaged_checkpoints_are_an_error_and_nothing_is_touched(tmp_path):
    folder = interrupted(tmp_path)
    for place in Checkpoints(folder).files:
        place.write_bytes(b"not a checkpoint")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(RunError, match=r"no checkpoint in .* can be read"):
        run(experiment(), 3, folder, Onlooker(), resume=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "rounds.jsonl"])
def test_lost_or_changed_lines_are_an_error(tmp_path, name):
    folder = interrupted(tmp_path)
    whole = (folder / name).read_bytes()
    for damaged in (whole[:-10], whole[:50] + bytes([whole[50] ^ 1]) + whole[51:]):
        (folder / name).write_bytes(damaged)
        with pytest.raises(RunError, match=r"is not what it was when the checkpoint was written: lines were lost or changed"):
            run(experiment(), 3, folder, Onlooker(), resume=True)


@pytest.mark.parametrize(("settings", "text"), [
    (["risk.tail_fraction=0.4"], "risk.tail_fraction was 0.5, is 0.4"),
    (["rounds=5"], "rounds was 6, is 5"),
    (["local.penalty.part=Proximal", "local.penalty.strength=1"], "local.penalty.part was 'NoPenalty', is 'Proximal'"),
])
def test_an_experiment_that_changed_is_refused(tmp_path, settings, text):
    folder = interrupted(tmp_path)
    with pytest.raises(RunError) as reason:
        run(experiment("delta_fl", *settings), 3, folder, Onlooker(), resume=True)
    assert text in str(reason.value)
    assert "Undo the change, or start again in another folder" in str(reason.value)


def test_a_run_goes_on_though_its_parts_have_got_a_field_since(tmp_path):
    """Folders written before a part had an optional field say nothing of it: `Poisson` has a population now."""
    wanted, folder = experiment("adam averaged"), tmp_path / "run"
    with pytest.raises(Interrupted):
        run(wanted, 3, folder, Onlooker(stop_after=3))
    about = json.loads((folder / "run.json").read_text())
    assert about["experiment"]["sample"].pop("population") == "none"
    (folder / "run.json").write_text(json.dumps(about))
    with pytest.raises(RunError, match=r"sample\.population is new"):
        run(experiment("adam averaged", "sample.population=8"), 3, folder, Onlooker(), resume=True)
    whole = run(wanted, 3, tmp_path / "whole", Onlooker())
    assert run(wanted, 3, folder, Onlooker(), resume=True).models[0].read_bytes() == whole.models[0].read_bytes()


def test_a_run_with_stragglers_goes_on_though_they_can_be_exact_since(tmp_path):
    """A field that was added and is false is not used."""
    wanted, folder = experiment("delta_fl", more='[local]\nwork = { part = "Stragglers", fraction = 0.5 }\n'), tmp_path / "run"
    with pytest.raises(Interrupted):
        run(wanted, 3, folder, Onlooker(stop_after=3))
    about = json.loads((folder / "run.json").read_text())
    assert about["experiment"]["local"]["work"].pop("exact") is False
    (folder / "run.json").write_text(json.dumps(about))
    exact = experiment("delta_fl", more='[local]\nwork = { part = "Stragglers", fraction = 0.5, exact = true }\n')
    with pytest.raises(RunError, match=r"local\.work\.exact is new"):
        run(exact, 3, folder, Onlooker(), resume=True)
    whole = run(wanted, 3, tmp_path / "whole", Onlooker())
    assert run(wanted, 3, folder, Onlooker(), resume=True).models[0].read_bytes() == whole.models[0].read_bytes()


def test_data_that_changed_are_refused(tmp_path):
    data = tmp_path / "a.npz"
    x, y, client = np.ones((40, 60), "float32"), np.arange(40) % 10, np.arange(40) % 8
    np.savez(data, x=x, y=y, client=client)
    settings = [f'data={{kind="arrays",path="{data}",split={{within=0.5}}}}']
    with pytest.raises(Interrupted):
        run(experiment("delta_fl", *settings), 3, tmp_path / "run", Onlooker(stop_after=2))
    np.savez(data, x=x + 1e-3, y=y, client=client)
    with pytest.raises(RunError, match="the data are not what"):
        run(experiment("delta_fl", *settings), 3, tmp_path / "run", Onlooker(), resume=True)


def test_another_seed_does_not_go_on_with_this_one(tmp_path):
    with pytest.raises(RunError, match="seeds was"):
        run(experiment(), 4, interrupted(tmp_path), Onlooker(), resume=True)


def test_a_folder_in_use_is_not_written(tmp_path, whole):
    folder = interrupted(tmp_path)
    with pytest.raises(RunError, match=r"holds a run that has done 5 of 6 rounds\. Go on with --resume"):
        run(experiment(), 3, folder, Onlooker())
    with hold_folder_lock(folder), pytest.raises(RunError, match="another process is writing"):
        run(experiment(), 3, folder, Onlooker(), resume=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "experiment.toml").write_text("precious")
    with pytest.raises(RunError, match=r"holds other things \(experiment\.toml\)"):
        run(experiment(), 3, tmp_path / "mine", Onlooker(), resume=True)
    assert (tmp_path / "mine" / "experiment.toml").read_text() == "precious"
    onlooker = Onlooker()
    assert run(experiment(), 3, whole["delta_fl"].path, onlooker, resume=True).is_finished
    assert "is finished; nothing to do" in onlooker.notes[0]


def test_a_run_that_ended_early_says_so_and_what_it_kept(tmp_path):
    slow = experiment("delta_fl", 'evaluate.keep_best="worst10"', "evaluate.patience=2", "evaluate.every=1", "rounds=30",
                      "local.learning_rate=1e-9")
    onlooker, again = Onlooker(), Onlooker()
    done = run(slow, 0, tmp_path / "run", onlooker)
    kept, reason = done.result["best"][0]["round"], "error.worst10 was no better in 2 evaluations in a row"
    assert onlooker.notes[-1] == (f"stopped after {done.result['round']} of 30 rounds ({reason}). The best model, of round {kept}, is kept beside "
                                  "the last, which the tables are about; `fedtail export` and `predict` take --best.")
    assert kept < done.result["round"] < 30
    run(slow, 0, tmp_path / "run", again, resume=True)
    assert again.notes == [f"{tmp_path / 'run'} is finished; nothing to do. It ended early: {reason}."]


def test_a_full_disk_is_an_error_that_keeps_the_last_checkpoint(tmp_path):
    """The largest file this process may write is made smaller than a checkpoint: the system then refuses as a full disk does."""
    folder, soft = interrupted(tmp_path, stop=2), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, soft[1]))
    try:
        with pytest.raises(RunError, match=r"could not be written: (File too large|No space left)"):
            run(experiment(), 3, folder, Onlooker(), resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft)
    checkpoint, problems = Checkpoints(folder).load()
    assert (checkpoint.round, problems) == (2, [])
    assert not list(folder.glob(".*writing"))
    assert run(experiment(), 3, folder, Onlooker(), resume=True).is_finished


def test_files_are_whole_or_as_they_were(tmp_path, monkeypatch):
    place = tmp_path / "file"
    write_atomically(place, "old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(RunError, match=r"could not be written: No space left on device\. What was there before is still whole"):
        write_atomically(place, "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


def test_lines_after_the_checkpoint_are_cut_off(tmp_path):
    place = tmp_path / "lines"
    lines = JsonLinesFile(place)
    lines.write({"a": float("nan")})
    kept = lines.flush()
    lines.write({"b": 1})
    lines.close()
    again = JsonLinesFile(place, kept)
    assert again.flush() == kept
    again.close()
    assert place.read_text() == '{"a": null}\n'


def own(tmp_path: Path, name: str, code: str, *settings: str) -> fedtail.experiment.Experiment:
    """An experiment with a module of the user's own beside it."""
    (tmp_path / f"{name}.py").write_text(code)
    [made] = build_experiments(Source.parse(BASE + METHODS["delta_fl"], "own.toml", tmp_path, settings, tmp_path), "own")
    return made


DRAWING = """
import os, torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        drawn = torch.frombuffer(bytearray(os.urandom(3600)), dtype=torch.uint8).view(60, 60).float() / 255 / 60
        self.register_buffer("mixing", drawn.t())
        self.last = torch.nn.Linear(60, 10)
    def forward(self, x): return self.last(x @ self.mixing)
"""


def test_a_module_that_draws_from_elsewhere_resumes_with_what_it_began_with(tmp_path):
    """Its buffer is not reproducible by a seed, and not contiguous; it is kept with the run."""
    wanted = own(tmp_path, "mine_drawing", DRAWING, 'task.module={part="mine_drawing:Net"}', "task.buffers=frozen")
    with pytest.raises(Interrupted):
        run(wanted, 0, tmp_path / "run", Onlooker(stop_after=3))
    place = tmp_path / "run" / "initial.safetensors"
    began, content = load_file(place)["mixing"], place.read_bytes()
    place.write_bytes(content[:-1] + b"x")
    with pytest.raises(RunError, match=r"initial\.safetensors is missing or damaged"):
        run(wanted, 0, tmp_path / "run", Onlooker(), resume=True)
    place.write_bytes(content)
    folder = run(wanted, 0, tmp_path / "run", Onlooker(), resume=True)
    assert torch.equal(load_file(folder.models[0])["mixing"], began)


RISK = """
import fedtail
from dataclasses import dataclass
@dataclass(frozen=True)
class Mine(fedtail.Superquantile):
    pass
"""


def test_code_that_changed_is_refused(tmp_path):
    wanted = own(tmp_path, "mine_changing", RISK, "risk.part=mine_changing:Mine")
    with pytest.raises(Interrupted):
        run(wanted, 0, tmp_path / "run", Onlooker(stop_after=3))
    (tmp_path / "mine_changing.py").write_text(RISK + "# another line\n")
    with pytest.raises(RunError, match=r"your own code is not what .* began with"):
        run(wanted, 0, tmp_path / "run", Onlooker(), resume=True)
    (tmp_path / "mine_changing.py").write_text(RISK)
    folder = run(wanted, 0, tmp_path / "run", Onlooker(), resume=True)
    assert fedtail.experiment.read_experiment(folder.path / "experiment.toml", trust=tmp_path).algorithm.risk.tail_fraction == 0.5


def test_groups_that_changed_are_refused(tmp_path):
    data, client = tmp_path / "a.npz", np.arange(40) % 8
    columns = {"x": np.ones((40, 60), "float32"), "y": np.arange(40) % 10, "client": client}
    settings = [f'data={{kind="arrays",path="{data}",group="chain",split={{within=0.5}}}}', 'risk={part="GroupAscent",groups=2}']
    np.savez(data, **columns, chain=client % 2)
    with pytest.raises(Interrupted):
        run(experiment("delta_fl", *settings), 3, tmp_path / "run", Onlooker(stop_after=2))
    np.savez(data, **columns, chain=client // 4)
    with pytest.raises(RunError, match=r"the data are not what .* began with"):
        run(experiment("delta_fl", *settings), 3, tmp_path / "run", Onlooker(), resume=True)


BROKEN = """
import torch
calls = [0]
def loss(outputs, targets):
    calls[0] += 1
    if calls[0] > 60:
        raise TypeError("the user's own mistake")
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
"""


def test_what_fails_in_the_middle_leaves_its_trace_in_the_log(tmp_path):
    wanted = own(tmp_path, "mine_broken", BROKEN, "task.loss=mine_broken:loss", "rounds=60")
    with pytest.raises(RunError, match=r"the run failed: TypeError: the user's own mistake \(the trace is in .*log\.txt\)"):
        run(wanted, 0, tmp_path / "run", Onlooker())
    assert 'raise TypeError("the user\'s own mistake")' in (tmp_path / "run" / "log.txt").read_text()
    assert Checkpoints(tmp_path / "run").load()[0].round > 0


def test_checkpoints_that_are_gone_are_an_error(tmp_path):
    folder = interrupted(tmp_path)
    for place in Checkpoints(folder).files:
        place.unlink()
    with pytest.raises(RunError, match=r"the checkpoints of .* are gone"):
        run(experiment(), 3, folder, Onlooker(), resume=True)


def test_a_run_resumed_near_its_end_does_not_say_that_nobody_counted(tmp_path):
    wanted = experiment("adam averaged", "sample.rate=0.05", "rounds=30", "evaluate.every=30")
    whole = run(wanted, 0, tmp_path / "whole", Onlooker())
    asked = [len(line["asked"]) for line in whole.rounds]
    last = max(k for k, count in enumerate(asked) if count)
    assert last < 28                                       # so that the rest of the rounds ask nobody
    with pytest.raises(Interrupted):
        run(wanted, 0, tmp_path / "run", Onlooker(stop_after=last + 2))
    onlooker = Onlooker()
    folder = run(wanted, 0, tmp_path / "run", onlooker, resume=True)
    assert onlooker.notes == []
    assert digests(folder.path) == digests(whole.path)


# Reading and comparing

def test_runs_are_found_below_folders_and_others_are_refused(whole, tmp_path):
    place = whole["delta_fl"].path.parent
    assert {found.name for found in find_runs([place])} == set(METHODS)
    assert len(find_runs([place, place / "afl"])) == len(METHODS)
    assert find_runs(str(place)) == find_runs(place) == find_runs([place])
    with pytest.raises(FileNotFoundError, match="there is no run in"):
        find_runs([tmp_path])
    with pytest.raises(FileNotFoundError, match="is not a run"):
        RunFolder.open(tmp_path)
    (tmp_path / "run.json").write_text('{"format": "fedtail run", "version": 99}')
    with pytest.raises(ValueError, match="has format version 99; this fedtail reads 1"):
        RunFolder.open(tmp_path)


def test_comparisons_are_means_deviations_and_paired_differences(tmp_path):
    runs = [run(experiment(name, "rounds=2"), seed, tmp_path / f"{name}{seed}", Onlooker()) for seed in (0, 1, 2)
            for name in ("delta_fl", "refreshed momentum")]
    a, b = ([100 * np.array(r.client_columns("test")["error"]) for r in runs if r.name == name] for name in ("delta_fl", "refreshed momentum"))
    first, second = rows_by_method(runs)
    assert (first["method"], second["method"], first["unit"], first["seeds"]) == ("delta_fl", "refreshed momentum", "%", [0, 1, 2])
    assert first["p90"]["mean"] == pytest.approx(np.mean([np.percentile(e, 90) for e in a]))
    assert first["p90"]["std"] == pytest.approx(np.std([np.percentile(e, 90) for e in a], ddof=1))
    assert second["variance"]["mean"] == pytest.approx(np.mean([np.var(e) for e in b]))
    [less] = paired_differences(runs)
    paired = np.array([y.mean() - x.mean() for x, y in zip(a, b, strict=True)])
    assert less["mean"]["mean"] == pytest.approx(paired.mean())
    assert less["mean"]["stderr"] == pytest.approx(paired.std(ddof=1) / np.sqrt(3))
    assert rows_by_method(runs[:1])[0]["mean"]["std"] is None


def test_a_run_whose_dropout_was_drawn_in_another_way_is_refused(tmp_path):
    folder = interrupted(tmp_path)
    place = folder / "run.json"
    about = json.loads(place.read_text())
    assert "randomness" not in about                      # a linear model draws nothing
    place.write_text(json.dumps({**about, "randomness": 1}))
    with pytest.raises(RunError, match=r"drew dropout, .* in another way .* Finish it with that version, or start again"):
        run(experiment(), 3, folder, Onlooker(), resume=True)


def test_a_run_goes_on_with_the_kernel_it_began_with(tmp_path, monkeypatch):
    folder, chosen = interrupted(tmp_path), []
    place = folder / "run.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "kernel": "module"}))
    monkeypatch.setattr(LocalFleet, "__init__", lambda self, *args, __made=LocalFleet.__init__, **settings: (
        chosen.append(settings["kernel"]), __made(self, *args, **settings))[1])
    run(experiment(), 3, folder, Onlooker(), resume=True)
    assert set(chosen) == {"module"}
