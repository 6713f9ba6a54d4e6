"""Claim: a statement covers the whole history of a model, or says that it is about some rounds only.

Attacker: an author who wants a small epsilon beside a model that cost more. Method: train for many rounds, without privacy or with
seeded noise; go on for one private round with noise from the operating system, by every way a model can be handed over (the run,
its state, its module, its tensors, its file); look for a statement of the last round's epsilon that is not qualified.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

from outcome import Outcome

import fedtail
from fedtail import Ledger, PrivacyBudget
from fedtail.models import SoftmaxRegression
from fedtail.privacy.statement import privacy_statement, release_obstacles
from fedtail.training import Trained

from cases import small_population

DELTA = 1e-3
PRIVATE = fedtail.dp_fedavg(40, 0.1, 2.0, cohort_size=20, learning_rate=0.1, noise="discrete")
EXACT = fedtail.fedavg(20, learning_rate=0.1)


def attack() -> Outcome:
    """Hand a model over in every way, and read what is said of it."""
    population, task = small_population(40), fedtail.Task(SoftmaxRegression(5, 3))
    wrong, tried = [], 0
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as place:
        warnings.simplefilter("ignore")
        for name, method in (("without privacy", EXACT), ("with seeded noise", PRIVATE)):
            earlier = fedtail.train(method, task, population, rounds=8, privacy=PrivacyBudget(delta=DELTA))
            system = {"rounds": 1, "privacy": PrivacyBudget(delta=DELTA, randomness="os")}
            ways = {
                "start=module": lambda e=earlier, s=system: fedtail.train(PRIVATE, task, population, start=e.module, **s),
                "start=state dict": lambda e=earlier, s=system: fedtail.train(PRIVATE, task, population, start=e.module.state_dict(), **s),
                "Task(module)": lambda e=earlier, s=system: fedtail.train(PRIVATE, fedtail.Task(e.module), population, **s),
                "its state": lambda e=earlier, s=system: fedtail.resume(Trained(PRIVATE, task, e.state, e.seed), population, **s),
                "another ledger": lambda e=earlier, n=name: fedtail.resume(
                    Trained(PRIVATE, task, e.state, ledger=e.ledger), population, rounds=1,
                    privacy=Ledger(PrivacyBudget(delta=DELTA, randomness="os"), Path(place) / f"{n}.jsonl")),
            }
            if method is PRIVATE:
                ways["resume"] = lambda e=earlier, s=system: fedtail.resume(e, population, **s)
            for way, go in ways.items():
                trained, tried = go(), tried + 1
                said = privacy_statement(trained.ledger, trained.rounds)
                qualified = "with respect to these rounds only" in said.get("statement", "") or not said["private"]
                covers = sum(count for _, count in trained.ledger.rounds) >= 8
                if not (qualified or covers) or not release_obstacles(trained.ledger):
                    wrong.append(f"{way} after 8 rounds {name}: epsilon {said['epsilon']:.2f}, "
                                 f"{'for release' if not release_obstacles(trained.ledger) else 'not qualified'}")
    return Outcome(not wrong, "; ".join(wrong) if wrong else f"{tried} ways to hand a model over: qualified or charged in all")
