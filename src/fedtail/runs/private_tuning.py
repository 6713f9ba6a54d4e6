"""A private search: what its trials cost together, and how they are judged by clients who train in none of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fedtail.algorithm import planned_round, run_round
from fedtail.data import Population
from fedtail.engine.local_fleet import LocalFleet
from fedtail.evaluation import FederatedEvaluation
from fedtail.experiment.experiment import Experiment
from fedtail.experiment.tune_section import Search
from fedtail.fleet import SimulatedPopulation
from fedtail.privacy.accounting import NEIGHBOURS, UNIT
from fedtail.privacy.events import GaussianRelease, NonPrivateRelease, NoSampling, RoundEvent
from fedtail.privacy.ledger import Ledger, PrivacyBudget
from fedtail.privacy.randomness import Randomness, SeededRandomness, SystemRandomness
from fedtail.privacy.selection import Stopping, draw_number_of_trials, epsilon_of_search
from fedtail.privacy.statement import FLOATING, OBSERVER, REAL, SIMULATED
from fedtail.runs.files import RunError, RunRefused
from fedtail.sampling import Everyone
from fedtail.training import Trained

CHOSEN_ONLY = "an observer of the chosen model and its settings; not of other trials, nor of how many there were"
HELD_OUT = "the held-out clients, by whose exact results the best trial was chosen, are not covered"
NOT_PRIVATE = ("the trials are private, the choice among them is not: best.toml was chosen by exact results, and a run of it "
               "states the cost of that run only. Write private = \"poisson\" below [tune] for a search with a guarantee")


@dataclass(frozen=True)
class PrivateSearch:
    """The accounts of a search whose trials are private, all of one cost."""

    search: Search
    population: Population          # who train
    held: Population                # who judge

    @property
    def stopping(self) -> Stopping:
        """How the number of trials is found."""
        assert self.search.settings.private is not None
        return self.search.settings.private

    @property
    def budget(self) -> PrivacyBudget:
        """That of one trial: what it costs is known before, and the search as a whole is priced."""
        return replace(self.search.first().privacy, epsilon=None)

    @cached_property
    def trial(self) -> RoundEvent:
        """A round of every trial."""
        return self.planned(self.search.first())

    @cached_property
    def rounds(self) -> int:
        """The rounds of every trial."""
        return self.search.first().rounds

    @property
    def score(self) -> tuple[tuple[RoundEvent, int], ...]:
        """What the clients who judge a trial release; nothing where their results are exact, which is said instead."""
        if self.evaluation is None:
            return ()
        asked = self.evaluation.questions(0, 1)
        return ((RoundEvent(tuple(one.release(1) for one in asked), NoSampling()), 1),)

    @cached_property
    def evaluation(self) -> FederatedEvaluation | None:
        """How held-out clients judge a trial: by a noisy histogram of their errors; None where exactly."""
        noise = self.search.settings.noise
        return None if noise is None else FederatedEvaluation("train", noise=noise)

    def planned(self, experiment: Experiment) -> RoundEvent:
        """What a round of an experiment releases at most."""
        return planned_round(experiment.algorithm, SimulatedPopulation(self.population), experiment.channel,
                             len(experiment.task.make(0).params()))

    def epsilon(self, trials: int) -> float:
        """What so many trials cost, or so many on average."""
        assert self.budget.delta is not None
        return epsilon_of_search([(self.trial, self.rounds)], self.score, self.stopping, trials, self.budget.delta,
                                 self.budget.adjacency)

    def check(self) -> None:
        """Refuse what has no price, before anything is trained."""
        first, settings = self.search.first(), self.search.settings
        bare = [release.what for release in self.trial.releases if isinstance(release, NonPrivateRelease)]
        if bare:
            raise RunRefused(f"{bare[0]} would be released without noise: a search is private only if its trials are. Use "
                             "private parts (PrivateMean, Binned), or remove private from [tune].")
        if self.budget.delta is None:
            raise RunRefused("a private search needs [privacy] and below it delta, below one over the number of clients.")
        if settings.noise is not None and settings.metric != "error":
            raise RunRefused(f"noise in [tune] is for the error, of which the range is known, not for {settings.metric}. Choose "
                             "by the error, or remove noise: the held-out clients are then not covered.")
        for name, field in self.search.space.items():
            for value in field.ends():
                self.check_trial(self.search.experiment({name: value}), f"{name} = {value!r}")
        spent, most = self.epsilon(settings.trials), first.privacy.epsilon
        if most is not None and spent > most:
            raise RunRefused(f"this search would cost epsilon {spent:.4g} at delta {self.budget.delta:g}, more than epsilon = "
                             f"{most:g}. Make fewer trials, or add noise.")

    def check_trial(self, experiment: Experiment, settings: str) -> None:
        """Refuse a trial that does not cost what every trial costs: its price would tell which was chosen."""
        if (self.planned(experiment), experiment.rounds) != (self.trial, self.rounds):
            raise RunRefused(f"{settings} changes what a trial costs, and the trials of a private search must all cost the same. "
                             "Search other fields, or fix it.")

    def check_spent(self, trained: Trained) -> None:
        """Refuse a trial that released more than was planned."""
        rounds = trained.ledger.rounds
        more = [event for event, _ in rounds if event.sampling != self.trial.sampling
                or Counter(event.releases) - Counter(self.trial.releases)]
        if more or sum(count for _, count in rounds) > self.rounds:
            raise RunError("a trial released more than was planned, so that the search has no price. Nothing was chosen.")

    def draw(self, seed: int) -> int:
        """How many trials to make."""
        random: Randomness = SeededRandomness(seed, "trials") if self.budget.replayable else SystemRandomness()
        return draw_number_of_trials(self.stopping, self.search.settings.trials, random)

    def judged(self, trained: Trained, seed: int) -> Any:
        """What held-out clients release about the error of a trial's model: a noisy histogram."""
        assert self.evaluation is not None
        [method], first = trained.algorithm.members, self.search.first()
        judging: Any = self.evaluation.round(replace(method, sample=Everyone()), only=True)
        with LocalFleet(self.held, trained.task, first.device, trained.state.params.dtype) as fleet:
            _, found = run_round(judging, trained.state, fleet, first.channel, seed, Ledger(self.budget))
        if found is None:
            raise RunError(f"{len(self.held)} held-out clients are too few for the noise of [tune]. Plan it for fewer.")
        return found[0]["error"]

    def statement(self, begun: int) -> dict[str, Any]:
        """The privacy statement of the search as plain values, for privacy.json."""
        fixed, trials = self.stopping == "composition", self.search.settings.trials
        trials = max(begun, trials) if fixed else trials
        epsilon, delta, adjacency = self.epsilon(trials), self.budget.delta, self.budget.adjacency
        how = f"{trials} trials, composed" if fixed else \
            f"the best of a random number of trials, {self.stopping}, {trials} on average"
        observer = OBSERVER if fixed else CHOSEN_ONLY
        floating = any(isinstance(release, GaussianRelease) for event, _ in ((self.trial, 1), *self.score)
                       for release in event.releases)
        problems = [text for text, holds in ((SIMULATED, self.budget.replayable), (FLOATING, floating)) if holds]
        not_charged = [] if self.evaluation else [HELD_OUT]
        line = (f"epsilon {epsilon:.4g} at delta {delta:g} ({UNIT}-level, {NEIGHBOURS[adjacency]}; {how}), against {observer}"
                f"{''.join(f'; {text}' for text in not_charged)}")
        return {"private": True, "statement": line, "epsilon": epsilon, "delta": delta, "unit": UNIT, "adjacency": adjacency,
                "neighbours": NEIGHBOURS[adjacency], "observer": observer, "trials": how, "rounds": self.rounds,
                "guarantee": "; ".join(problems or [REAL]), "not_charged": not_charged}
