"""Studies of chapter 5 of the thesis: each small; what they train and draw against oracles, and how claims are judged."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from pytest import approx

import fedtail
from fedtail.attacks import LabelPoisoning, ModelReplacement, RandomUpdates
from fedtail.data import Population
from fedtail.models import SoftmaxRegression
from fedtail.personal import FineTuning
from fedtail.theory import DittoProblem
from fedtail_studies import Cell, Data, Results, Verdict, reproduce
from fedtail_studies.catalogue import study_called
from fedtail_studies.ditto import (
    attacked,
    devices,
    gaussian_devices,
    optimal_strength,
    personal_pages,
    printed,
    robustness,
    solver_pages,
)
from fedtail_studies.ditto.attacked import AttackPlan, OnDevices, attack_in, is_strong
from fedtail_studies.ditto.printed import BEST
from fedtail_studies.ditto.several_models import SeveralPersonalModels, choosing
from fedtail_studies.emnist.printed import TABLE4
from fedtail_studies.page import PAGE
from fedtail_studies.results import FILE
from fedtail_studies.running import Silent

from generated_data import generated_writers


def generated_sensors(sensors: int = 8) -> Data:
    random = np.random.default_rng(0)
    owner = np.repeat(np.arange(sensors), 20)
    x = random.standard_normal((len(owner), 4)).astype(np.float32)
    y = (x[:, 0] + 0.3 * owner * x[:, 1] > 0).astype(np.int64)
    people = Population.from_arrays(torch.as_tensor(x), torch.as_tensor(y), owner)
    return Data(f"generated, {sensors} sensors", people, False, "They are generated.")


SHORT = {"seeds": 1, "rounds": 1, "cohort": 4, "local_steps": 2, "devices": 8}
TINY = {
    "ditto_theory": ({"seeds": 1, "draws": 500, "rounds": 60, "repeats": 5}, None),
    "ditto_vehicle": ({**SHORT, "columns": ("clean", "A1 80%", "A2 20%", "A3 50%")}, generated_sensors),
    "ditto_femnist": ({**SHORT, "columns": ("clean", "A1 80%", "A2 80%", "A3 20%"), "tuning_epochs": 1}, generated_writers),
    "ditto_mnist": ({**SHORT, "columns": ("clean", "A1 80%", "A2 80%", "A3 20%"), "tuning_epochs": 1, "each_class": 4}, generated_writers),
    "ditto_solvers": ({**SHORT, "rounds": 2, "stops": (1, 2), "epochs": (1,), "each_class": 4}, generated_writers),
    "ditto_personal": ({**SHORT, "tuning_epochs": 1, "meta_epochs": 1, "meta_rates": (0.1,)}, generated_writers),
}


@pytest.mark.parametrize("name", TINY)
def test_a_study_runs_small_and_writes_its_page(name, tmp_path, monkeypatch):
    monkeypatch.setattr("fedtail.engine.workers.usable_cores", lambda: 1)      # small work is not worth a second process
    study, (changes, data) = study_called(name), TINY[name]
    found = None if data is None else data()
    results = reproduce(study, replace(study.quick, **changes), tmp_path, found, quick=True)
    claims, text = json.loads((tmp_path / FILE).read_text())["claims"], (tmp_path / PAGE).read_text()
    assert results.seeds == (0,)
    assert len(claims) == len(study.claims)
    assert all(f"({path.name})" in text for path in tmp_path.glob("*.png"))
    if found:
        assert not any(claim["verdict"] == Verdict.AGREES for claim in claims)


# several personal models in one run


def small_people() -> Population:
    return fedtail.data.synthetic(1.0, 1.0, 6, 1, [20, 30, 25, 40, 35, 20])


def softmax_task() -> fedtail.Task:
    return fedtail.Task(SoftmaxRegression(60, 10))


LOCAL = {"learning_rate": 0.05, "batch_size": 8, "local_steps": 3}
ONE = fedtail.Engine(workers=1)


def test_several_personal_models_are_those_of_runs_of_their_own():
    people, task, steps = small_people(), softmax_task(), fedtail.LocalSGD(**LOCAL)
    parts = (fedtail.Ditto(0.0, steps), fedtail.Ditto(2.0, steps), fedtail.personal.Mapper(local=steps))
    both = fedtail.train(replace(fedtail.fedavg(3, **LOCAL), personal=SeveralPersonalModels(parts)), task, people, rounds=4, engine=ONE)
    for place, part in enumerate(parts):
        alone = fedtail.train(replace(fedtail.fedavg(3, **LOCAL), personal=part), task, people, rounds=4, engine=ONE)
        found, wanted = (fedtail.evaluate_personal(run, people, engine=ONE) for run in (choosing(both, place), alone))
        assert torch.equal(found.personal.loss.values, wanted.personal.loss.values)
        assert torch.equal(found.shared.loss.values, wanted.shared.loss.values)


def test_a_part_that_diverges_leaves_the_others_alone():
    people, task = small_people(), softmax_task()
    steps = fedtail.LocalSGD(0.1, batch_size=8, epochs=20)
    tuned, diverging = FineTuning(steps), FineTuning(replace(steps, penalty=fedtail.Proximal(1e6)))

    def losses(part, place=None):
        trained = fedtail.train(replace(fedtail.fedavg(3, **LOCAL), sample=fedtail.Everyone(), personal=part), task, people, rounds=1, engine=ONE)
        return fedtail.evaluate_personal(trained if place is None else choosing(trained, place), people, engine=ONE).personal.loss.values

    assert torch.equal(losses(SeveralPersonalModels((diverging, tuned)), 1), losses(tuned))
    assert not torch.equal(losses(SeveralPersonalModels((diverging, tuned)), 0), losses(tuned))


def test_local_models_that_begin_at_the_initial_model_do_not_depend_on_an_attack():
    cell = Cell("x", 3, AttackPlan(rounds=6, cohort=3, local_steps=2), generated_sensors(), "cpu", Silent())
    here = devices.sensors(cell)
    found = []
    for column in ("clean", "A3 50%"):
        attack = attack_in(column, 3, cell.seed)
        parts = {"local": fedtail.Ditto(0.0, attacked.local_steps(cell.plan))}
        trained = cell.train(attacked.beside(attacked.averaging(cell.plan), parts, here), here.task, here.train, 6, attack=attack)
        found.append(attacked.personal_models(trained, parts, here, "cpu")["local"].loss)
    chosen = attacked.benign(here, attack)
    assert int(chosen.sum()) == 4
    assert torch.equal(found[0][chosen], found[1][chosen])
    assert not torch.equal(found[0][~chosen], found[1][~chosen])


# attacks and devices


def test_a_column_names_an_attack_and_its_share():
    assert attack_in("clean", 10, 0) is None
    assert attack_in("A1 20%", 10, 5) == LabelPoisoning(0.2, seed=5)
    assert attack_in("A2 80%", 10, 5) == RandomUpdates(0.8, seed=5)
    assert attack_in("A3 15%", 10, 5) == ModelReplacement(0.15, scale=10.0, seed=5)


def test_strong_attacks_are_model_replacement_and_more_than_half():
    assert [column for column in printed.WIDE if is_strong(column)] == ["A1 80%", "A2 80%", "A3 10%", "A3 20%", "A3 50%"]


def test_a_larger_share_corrupts_the_same_devices_and_more():
    people = generated_sensors(20).population
    few, many = (attack_in(f"A1 {share}%", 10, 2).corrupted(people) for share in (20, 80))
    assert (int(few.sum()), int(many.sum())) == (4, 16)
    assert bool(many[few].all())


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8])
def test_krum_is_told_at_most_what_it_has_a_meaning_for(share):
    rule = attacked.robust(AttackPlan(cohort=10), "Krum", share).aggregate
    assert rule.corrupted_fraction == min(share, 0.3)      # 2 * 3 + 3 of 10


def test_samples_are_split_72_8_20_and_devices_weigh_the_same():
    people = small_people().with_columns(mass=torch.arange(1.0, 7.0, dtype=torch.float64))
    parts = devices.split(people, 1)
    assert torch.equal(sum(part.size for part in parts), people.size)
    shares = [(part.size.sum() / people.size.sum()).item() for part in parts]
    assert shares == approx([0.72, 0.08, 0.2], abs=0.02)
    assert all(part.mass.tolist() == [1.0] * 6 for part in parts)
    assert len(torch.cat([part.inputs for part in parts]).unique(dim=0)) == people.num_examples


def test_participation_is_how_often_runs_sample_devices():
    cell = Cell("x", 3, AttackPlan(rounds=7, cohort=3, local_steps=1), generated_sensors(), "cpu", Silent())
    here, sampled = devices.sensors(cell), []
    cell.train(attacked.averaging(cell.plan), here.task, here.train, 7, lambda progress: sampled.append(progress.view.sampled))
    counts = np.bincount(torch.cat(sampled).numpy(), minlength=8)
    there = counts[counts > 0]
    wanted = {"clients": 8, "never": int((counts == 0).sum()), "min": there.min(), "median": np.median(there), "max": there.max()}
    assert devices.participation(cell, here).items() >= wanted.items()


def test_devices_of_skewed_data_hold_five_classes_and_no_image_twice():
    people = devices.five_classes(generated_writers(10).population, 6, 4, seed=1)
    assert len(people) == 6
    assert [len(people.client(k)[1].unique()) for k in range(6)] == [5] * 6
    rows = people.example_clients_and_rows()[1]
    assert len(people.inputs[rows].flatten(1).unique(dim=0)) == people.num_examples == 6 * 5 * 4


def test_a_device_takes_the_strength_with_its_lowest_validation_loss_if_it_has_four_samples():
    losses = {0.1: [1.0, 3.0, 1.0], 1.0: [2.0, 2.0, 2.0], 2.0: [3.0, float("nan"), 3.0]}
    found = {f"Ditto {one:g}": OnDevices(*(torch.tensor([10 * one, 10 * one + 1, 10 * one + 2], dtype=torch.float64) for _ in range(2)),
                                         torch.tensor(values)) for one, values in losses.items()}
    sizes = Population.from_arrays(torch.zeros(11, 1), torch.zeros(11).long(), [0] * 4 + [1] * 4 + [2] * 3)
    assert attacked.dynamic(found, sizes, strong=False).test.tolist() == [1.0, 11.0, 12.0]      # the last has three: lambda 1


# the theory


def test_the_closed_forms_are_those_of_the_point_estimation_problem():
    """Values of a Monte Carlo computation and of the thesis's formulas that were made apart from this package."""
    rows = {row.name: [row.ours[key][0] for key in ("lambda*", "mean error", "variance")] for row in optimal_strength.exact_table().rows}
    assert rows["point estimation"] == approx([0.8, 0.12, 0.0288], abs=5e-5)
    assert rows["point estimation, 3 adversaries"] == approx([0.3692, 0.1515, 0.0459], abs=5e-5)


def test_the_bayes_estimator_is_a_conditional_mean_under_a_vague_prior():
    problem, vague = DittoProblem(clients=4, examples=3, noise=1.2, spread=0.7), 1e7
    own = np.random.default_rng(0).standard_normal((5, 4, 1))
    models = 0.49 * np.eye(4) + vague
    gain = models @ np.linalg.inv(models + 0.48 * np.eye(4))
    assert gaussian_devices.bayes_estimates(problem, own)[..., 0] == approx(own[..., 0] @ gain.T, abs=1e-5)


def test_errors_of_regression_are_those_of_the_penalised_normal_equations():
    problem = DittoProblem(clients=3, examples=6, noise=0.5, spread=1.0, dim=2, gram=3.0)
    found = gaussian_devices.squared_errors(problem, [0.4], 1, seed=4)[0.4]
    random = np.random.default_rng(4)
    models = random.standard_normal((1, 3, 2))
    inputs = np.linalg.qr(random.standard_normal((1, 3, 6, 2)))[0][0] * 3.0**0.5
    targets = [x @ w + 0.5 * noise for x, w, noise in zip(inputs, models[0], random.standard_normal((1, 3, 6, 1))[0, :, :, 0], strict=True)]
    shared = np.mean([np.linalg.lstsq(x, y, rcond=None)[0] for x, y in zip(inputs, targets, strict=True)], axis=0)
    own = [np.linalg.solve(x.T @ x / 6 + 0.4 * np.eye(2), x.T @ y / 6 + 0.4 * shared) for x, y in zip(inputs, targets, strict=True)]
    assert found[0] == approx(np.square(np.array(own) - models[0]).sum(1))


# printed numbers and verdicts


@pytest.mark.parametrize("table", [printed.VEHICLE, printed.FEMNIST, printed.FASHION])
def test_the_best_strength_that_is_printed_is_one_of_the_printed_rows(table):
    rows = [row for name, row in table.items() if name.startswith("Ditto ")]
    assert all(any(row[column] == found for row in rows) for column, found in table[BEST].items())


def planted(table: printed.Rows, plan: AttackPlan, more: dict[str, float]) -> Results:
    """Results that are the printed numbers, with a small difference from seed to seed; `more` are rows of one accuracy each."""
    def numbers(name: str, column: str, seed: int) -> dict:
        found = table[name][column] if name in table else (more[name], 10.0)
        return {"test": found[0] + 0.01 * seed, "std": found[1] + 0.01 * seed, "validation": found[0]}

    names = [name for name in (*table, *more) if not name.startswith(BEST)]
    cells = {seed: {f"{column}: all": {"seconds": 0.0, "numbers": {name: numbers(name, column, seed) for name in names}} for column in plan.columns}
             for seed in range(3)}
    settings = {"columns": plan.columns, "strengths": plan.strengths, "rules": plan.rules, "tilts": plan.tilts, "with_ditto": plan.with_ditto}
    return Results("x", False, settings, {"name": "x", "papers": True, "about": ""}, (), cells)


def test_the_printed_numbers_of_vehicle_are_judged_as_the_thesis_reads_them():
    study = study_called("ditto_vehicle")
    more = {"TERM 5": 30.0, **{f"Ditto {one} + {rule}": 90.0 for one in ("0.1", "1", "2") for rule in ("clipping", "multi-Krum")}}
    results = planted(printed.VEHICLE, replace(study.full, rules=attacked.RULES), more)
    verdicts = {claim.text: claim.judge(results).verdict for claim in study.claims}
    assert {verdict for text, verdict in verdicts.items() if not text.startswith("Without attacks Ditto is more accurate")} <= {
        Verdict.AGREES, Verdict.DIRECTION}
    backwards = Results(results.study, False, results.plan, results.data, (), {
        seed: {cell: {"seconds": 0.0, "numbers": {name: {key: 100 - value for key, value in one.items()} for name, one in found["numbers"].items()}}
               for cell, found in cells.items()} for seed, cells in results.cells.items()})
    text = next(text for text in verdicts if text.startswith("Under A1"))
    assert next(claim for claim in study.claims if claim.text == text).judge(backwards).verdict is Verdict.DISAGREES


@pytest.mark.parametrize(("name", "table"), [("ditto_femnist", printed.FEMNIST), ("ditto_mnist", printed.FASHION)])
def test_the_printed_numbers_of_other_data_bear_out_every_claim(name, table):
    study = study_called(name)
    columns = tuple(table["global"])
    more = {"TERM 5": 30.0, **{f"Ditto {one:g} + clipping": 90.0 for one in study.full.strengths}}
    results = planted(table, replace(study.full, columns=columns), more)
    found = {claim.text: claim.judge(results) for claim in study.claims}
    assert {finding.verdict for finding in found.values()} <= {Verdict.AGREES, Verdict.DIRECTION}, found


def test_the_best_strength_of_a_seed_is_that_with_the_best_validation_accuracy():
    numbers = {"Ditto 0.1": {"test": 50.0, "validation": 80.0}, "Ditto 1": {"test": 70.0, "validation": 60.0}}
    results = Results("x", False, {"strengths": [0.1, 1.0]}, None, (), {0: {"clean: FedAvg": {"seconds": 0.0, "numbers": numbers}}})
    assert robustness.values(results, "clean", BEST) == [50.0]


def test_a_server_stops_by_what_it_sees_of_all_devices():
    def stop(loss: float, validation: float, accuracy: float) -> dict:
        return {"loss": loss, "validation": validation, "global": 1.0, "joint": {"Ditto 0.1": 70.0},
                "tuned": {"fine-tuning": 0.0, solver_pages.pulled_name(5): accuracy}}
    cells = {0: {"A3 20%": {"seconds": 0.0, "numbers": {"1": stop(3.0, 20.0, 60.0), "2": stop(2.0, 10.0, 50.0), "4": stop(5.0, 30.0, 40.0)}}}}
    results = Results("ditto_solvers", False, {"stops": [1, 2, 4], "epochs": [5], "pull": 0.1}, None, (), cells)
    assert solver_pages.chosen_stops(results, "training loss") == [50.0]
    assert solver_pages.chosen_stops(results, "validation accuracy") == [40.0]
    assert solver_pages.best_stops(results) == [60.0]      # one seed has no others to choose by
    assert solver_pages.best_epochs(results) == [40.0]


def test_the_best_stop_is_chosen_by_other_seeds_so_that_another_one_can_beat_it():
    accuracies = {0: (60.0, 50.0), 1: (40.0, 70.0), 2: (45.0, 65.0)}      # seed 0 is best at stop 1, the others at stop 2
    cells = {seed: {"A3 20%": {"seconds": 0.0, "numbers": {
        str(stop): {"loss": -accuracy, "validation": accuracy, "global": 0.0, "joint": {}, "tuned": {solver_pages.pulled_name(5): accuracy}}
        for stop, accuracy in zip((1, 2), pair, strict=True)}}} for seed, pair in accuracies.items()}
    results = Results("ditto_solvers", False, {"stops": [1, 2], "epochs": [5], "pull": 0.1}, None, (), cells)
    assert solver_pages.best_stops(results) == [50.0, 70.0, 65.0]
    assert solver_pages.chosen_stops(results, "training loss")[0] > solver_pages.best_stops(results)[0]


def test_a_method_takes_its_variant_with_the_best_validation_accuracy():
    found = {"EWC, lambda 10": {"validation": 1.0, "test": 5.0}, "EWC, lambda 1000": {"validation": 2.0, "test": 4.0}, "EWCX": {"validation": 9.0}}
    assert personal_pages.best_of(found, "EWC")["test"] == 4.0


def test_table_4_is_judged_as_the_paper_reads_it():
    def numbers(mean: float, tail: float, seed: int) -> dict:
        return {"test": 100 - mean + 0.001 * seed, "p90": tail + 0.001 * seed, "validation": 0.0}

    def cell(row: dict, seed: int) -> dict:
        found = {"global": numbers(row["before.mean"].mean, row["before.p90"].mean, seed),
                 "fine-tuning": numbers(row["after.mean"].mean, row["after.p90"].mean, seed)}
        return {"seconds": 0.0, "numbers": found}

    cells = {seed: {("clean" if name == "FedAvg" else name): cell(row, seed) for name, row in TABLE4.items()} for seed in range(3)}
    results = Results("x", False, {}, None, (), cells)
    assert personal_pages.close_after(results, "fine-tuning").verdict is Verdict.AGREES
    assert personal_pages.personalisation_helps(results, "fine-tuning").verdict in (Verdict.AGREES, Verdict.DIRECTION)
    assert personal_pages.close_after(results, "global").verdict is Verdict.DISAGREES      # 4.8 points of the 90th percentile
