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
from fedtail.privacy.accounting import SAMPLES, neighbouring_relation
from fedtail.privacy.events import GaussianRelease, NonPrivateRelease, NoSampling, RoundEvent, with_beginning
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
    """A hyperparameter search whose trials are differentially private and all cost the same.

    It computes what the search costs as a whole, and has held-out clients judge the trials.
    """

    search: Search
    population: Population          # who train
    held: Population                # who judge

    @property
    def stopping_rule(self) -> Stopping:
        """How the number of trials is determined: "composition" for a fixed number, else the distribution it is drawn from.

        That is "poisson", "geometric" or "logarithmic".
        """
        assert self.search.settings.private is not None
        return self.search.settings.private

    @property
    def trial_budget(self) -> PrivacyBudget:
        """The privacy budget of one trial: that of the experiment without its epsilon, so that no trial stops early.

        The epsilon of the experiment limits the search as a whole; `check_epsilon` compares them before training.
        """
        return replace(self.search.first_experiment().privacy, epsilon=None)

    @cached_property
    def trial_round_event(self) -> RoundEvent:
        """The ledger's event of one round of a trial: the most that it releases, and how its cohort is sampled; cached.

        It is computed for the first experiment of the search; a search whose trials differ in it is refused.
        """
        return self.planned_round_event(self.search.first_experiment())

    @cached_property
    def rounds_per_trial(self) -> int:
        """The number of rounds of a trial, as in the first experiment of the search; trials that differ in it are refused."""
        return self.search.first_experiment().rounds

    @property
    def judging_events(self) -> tuple[tuple[RoundEvent, int], ...]:
        """What the held-out clients release for each trial, as pairs (event, how many times): one pair.

        Empty where `[tune]` has no noise: the trials are then judged by exact results, which are not charged.
        """
        if self.held_out_evaluation is None:
            return ()
        asked = self.held_out_evaluation.questions(0, 1)
        return ((RoundEvent(tuple(one.release(1) for one in asked), NoSampling()), 1),)

    @cached_property
    def held_out_evaluation(self) -> FederatedEvaluation | None:
        """The evaluation of a trial by the held-out clients: a noisy histogram of their errors, with the noise of `[tune]`.

        None where `[tune]` has no noise: the held-out clients are then evaluated exactly.
        """
        noise = self.search.settings.noise
        return None if noise is None else FederatedEvaluation("train", noise=noise)

    def planned_round_event(self, experiment: Experiment) -> RoundEvent:
        """The ledger's event of one round of `experiment` on the training clients.

        It holds the most that the round releases, and how its cohort is sampled.
        """
        return planned_round(experiment.algorithm, SimulatedPopulation(self.population), experiment.channel,
                             len(experiment.task.make(0).params()))

    def search_epsilon(self, trials: int) -> float:
        """The epsilon of the whole search, judging included, at the delta of the budget.

        `trials` is the number of trials, or its mean where the number is random. The budget must have a delta.
        """
        assert self.trial_budget.delta is not None
        first, later = (replace(self.trial_round_event, releases=with_beginning(self.trial_round_event.releases, begins))
                        for begins in (True, False))
        return epsilon_of_search([(first, 1), (later, self.rounds_per_trial - 1)], self.judging_events, self.stopping_rule,
                                 trials, self.trial_budget.delta, self.trial_budget.adjacency)

    def check_epsilon(self) -> None:
        """Raise RunRefused, before anything is trained, where the epsilon of the search cannot be stated or is too large.

        Refused are: a release without noise, no delta, noise for a metric other than the error, a searched field whose values
        change what a trial costs, and a total epsilon above that of the experiment.
        """
        first, settings = self.search.first_experiment(), self.search.settings
        bare = [release.what for release in self.trial_round_event.releases if isinstance(release, NonPrivateRelease)]
        if bare:
            raise RunRefused(f"{bare[0]} would be released without noise: a search is private only if its trials are. Use "
                             "private parts (PrivateMean, Binned), or remove private from [tune].")
        if self.trial_budget.delta is None:
            raise RunRefused("a private search needs [privacy] and below it delta, below one over the number of clients.")
        if settings.noise is not None and settings.metric != "error":
            raise RunRefused(f"noise in [tune] is for the error, of which the range is known, not for {settings.metric}. Choose "
                             "by the error, or remove noise: the held-out clients are then not covered.")
        for name, field in self.search.space.items():
            for value in field.values_to_test():
                self.check_trial_cost(self.search.experiment_with({name: value}), f"{name} = {value!r}")
        spent, most = self.search_epsilon(settings.trials), first.privacy.epsilon
        if most is not None and spent > most:
            raise RunRefused(f"this search would cost epsilon {spent:.4g} at delta {self.trial_budget.delta:g}, more than "
                             f"epsilon = {most:g}. Make fewer trials, or add noise.")

    def check_trial_cost(self, experiment: Experiment, settings: str) -> None:
        """Raise RunRefused where `experiment` has another planned round or number of rounds than every trial must have.

        With trials of different cost, the stated epsilon would reveal which one was chosen. `settings` only names the trial
        in the text.
        """
        if (self.planned_round_event(experiment), experiment.rounds) != (self.trial_round_event, self.rounds_per_trial):
            raise RunRefused(f"{settings} changes what a trial costs, and the trials of a private search must all cost the same. "
                             "Search other fields, or fix it.")

    def check_spent_privacy(self, trained: Trained) -> None:
        """Raise RunError where the ledger of a trained trial has more releases or rounds than planned, or another sampling."""
        rounds = trained.ledger.rounds
        more = [event for event, _ in rounds if event.sampling != self.trial_round_event.sampling
                or Counter(with_beginning(event.releases, True)) - Counter(self.trial_round_event.releases)]
        if more or sum(count for _, count in rounds) > self.rounds_per_trial:
            raise RunError("a trial released more than was planned, so that the search has no price. Nothing was chosen.")

    def draw_number_of_trials(self, seed: int) -> int:
        """The number of trials to make, drawn from the distribution `stopping_rule` with mean `trials` of `[tune]`; may be 0.

        Drawn from `seed` where the budget is replayable, else from the operating system's generator. For "composition" it is
        `trials` itself.
        """
        random: Randomness = SeededRandomness(seed, "trials") if self.trial_budget.replayable else SystemRandomness()
        return draw_number_of_trials(self.stopping_rule, self.search.settings.trials, random)

    def release_held_out_histogram(self, trained: Trained, seed: int) -> Any:
        """Have the held-out clients release a noisy histogram of their errors under the model of `trained`, a trial.

        Returns it as a `ClientHistogram`, whose `statistic(name)` gives "worst10" and others. `seed` drives the noise where the
        budget is replayable. Requires noise in `[tune]`. Raises RunError where the held-out clients are too few for the planned
        noise.
        """
        assert self.held_out_evaluation is not None
        [method], first = trained.algorithm.members, self.search.first_experiment()
        judging: Any = self.held_out_evaluation.round_with_evaluation(replace(method, sample=Everyone()), only=True)
        with LocalFleet(self.held, trained.task, first.device, trained.state.params.dtype) as fleet:
            _, found = run_round(judging, trained.state, fleet, first.channel, seed, Ledger(self.trial_budget))
        if found is None:
            raise RunError(f"{len(self.held)} held-out clients are too few for the noise of [tune]. Plan it for fewer.")
        return found[0]["error"]

    def privacy_statement(self, begun: int) -> dict[str, Any]:
        """The privacy statement of the search as a dict of plain values, for `privacy.json`.

        It has epsilon, delta, the neighbouring relation, the observer it holds against, what is not charged, and a sentence
        with all of this. `begun` is the number of trials begun. With a fixed number of trials, epsilon is for the larger of
        `begun` and the planned number; with a random one `begun` is ignored.
        """
        fixed, trials = self.stopping_rule == "composition", self.search.settings.trials
        trials = max(begun, trials) if fixed else trials
        epsilon, delta, adjacency = self.search_epsilon(trials), self.trial_budget.delta, self.trial_budget.adjacency
        how = f"{trials} trials, composed" if fixed else \
            f"the best of a random number of trials, {self.stopping_rule}, {trials} on average"
        unit = self.trial_round_event.unit
        observer = OBSERVER.format(samples=SAMPLES[unit]) if fixed else CHOSEN_ONLY
        relation = neighbouring_relation(adjacency, unit)
        floating = any(isinstance(release, GaussianRelease) for event, _ in ((self.trial_round_event, 1), *self.judging_events)
                       for release in event.releases)
        problems = [text for text, holds in ((SIMULATED, self.trial_budget.replayable), (FLOATING, floating)) if holds]
        not_charged = [] if self.held_out_evaluation else [HELD_OUT]
        line = (f"epsilon {epsilon:.4g} at delta {delta:g} ({unit}-level, {relation}; {how}), against {observer}"
                f"{''.join(f'; {text}' for text in not_charged)}")
        return {"private": True, "statement": line, "epsilon": epsilon, "delta": delta, "unit": unit, "adjacency": adjacency,
                "neighbours": relation, "observer": observer, "trials": how, "rounds": self.rounds_per_trial,
                "guarantee": "; ".join(problems or [REAL]), "not_charged": not_charged}
