"""The cost of rounds: the releases of a round composed into one mechanism, amplified once by how its cohort was sampled.

`compose_rounds` makes of rounds one `ComposedMechanism`, which accountants price; what no accountant can price is set aside.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from fedtail.privacy.accountants import (
    Accountant,
    Concentrated,
    PrivacyLosses,
    RenyiDivergences,
    Step,
    Steps,
    composed_noise_multiplier,
)
from fedtail.privacy.events import (
    Adjacency,
    CorrelatedRelease,
    CyclicSampling,
    FixedSampling,
    GaussianRelease,
    LatticeRelease,
    NonPrivateRelease,
    NoSampling,
    PoissonSampling,
    Release,
    RoundEvent,
    Sampling,
    Unit,
    common_unit,
)

AccountantName = Literal["pld", "rdp", "zcdp"]
NAMES = {PoissonSampling: "poisson", FixedSampling: "fixed", NoSampling: "none", CyclicSampling: "cyclic"}
UNRECORDED = ("priced again without amplification: this ledger does not say that the shares of integer noise were as many for "
              "every cohort, and earlier versions, in which they were not, claimed too much")
VARYING = ("no amplification is claimed for integer noise where clients may drop out: all of them add a share, and the variance "
           "of a long sum reveals the size of the cohort")
UNBOUNDED = ("no amplification is claimed where a round may hang on one client and nobody can say how often: over nodes, which "
             "may fail to answer")
TRUSTED = ("the server is trusted: it sees the exact sums, adds noise that is correlated over rounds, and keeps that of the "
           "last rounds secret, in the checkpoints too; cohorts take turns and are not secret; the first round is charged for "
           "the whole plan of {rounds} rounds")
UNTRUSTED = 1e-12               # a delta below which rounding shows in convolutions by Fourier transforms
NEGLIGIBLE = 1e-3               # of delta: the probability up to which a minimum cohort that reveals participation is ignored


@dataclass(frozen=True)
class ComposedMechanism:
    """All rounds as one mechanism: steps that accountants compose, and what they cannot price."""

    steps: Steps                                    # amplified
    full: Steps                                     # without amplification: every client in every round
    whole: bool                                     # whether any noise is in integers
    error: float                                    # total variation distance of all draws from exact ones
    errors: tuple[float, ...]                       # that distance for one round of each of `full`
    sampling: str
    non_private: tuple[str, ...]
    notes: tuple[str, ...]
    unit: Unit = "client"                           # whom the rounds protect

    def accountant(self, wanted: AccountantName | None = None, delta: float = 1.0) -> Accountant:
        """An accountant over the amplified steps: the one named `wanted`, or by default the one that suits the rounds best.

        Names are "pld" (privacy loss distributions), "rdp" (Rényi divergences) and "zcdp" (concentrated privacy). The default
        for integer noise is zcdp, or rdp where rounds are sampled; for continuous noise pld, or rdp where rounds are sampled
        and `delta` is below 1e-12 or below 1000 times the probability that the minimum-cohort rule reveals participation. A
        ValueError for an unknown name, for pld with integer noise, and for zcdp with sampled rounds.
        """
        sampled = any(step.scheme != "none" for step, _ in self.steps)
        if wanted is None:
            coarse = sampled and (delta < UNTRUSTED or PrivacyLosses(self.steps).reveal_probability > NEGLIGIBLE * delta)
            wanted = ("rdp" if sampled else "zcdp") if self.whole else "rdp" if coarse else "pld"
        if wanted == "pld" and self.whole:
            raise ValueError("privacy loss distributions (pld) are for continuous noise: integer noise in several coordinates "
                             "does not reduce to one. Use rdp, or zcdp without sampling.")
        if wanted == "zcdp" and sampled:
            raise ValueError("sampling does not amplify concentrated privacy (zcdp). Use pld or rdp, or price every round "
                             "without amplification, with NoSampling.")
        if wanted == "rdp":
            return RenyiDivergences(self.steps, self.whole)
        if wanted not in ("pld", "zcdp"):
            raise ValueError(f"accountant must be pld, rdp or zcdp, got {wanted!r}.")
        return PrivacyLosses(self.steps) if wanted == "pld" else Concentrated(self.steps)

    def second_accountant(self, first: str) -> Accountant | None:
        """An accountant of another kind than the one named `first`, to compare with: "rdp", or "pld" where `first` is "rdp".

        None where `first` is "rdp" and some noise is in integers, for which "pld" is not valid.
        """
        if first != "rdp":
            return RenyiDivergences(self.steps, self.whole)
        return None if self.whole else PrivacyLosses(self.steps)

    @property
    def unamplified_accountant(self) -> Accountant:
        """The accountant of the rounds without amplification by sampling: against an observer who knows the cohorts.

        It is `Concentrated` (zCDP) where some noise is in integers, otherwise `PrivacyLosses`.
        """
        return Concentrated(self.full) if self.whole else PrivacyLosses(self.full)

    def worst_round_epsilon(self, delta: float) -> float:
        """Epsilon at `delta` of the most expensive single round, against an observer who knows that the client participated.

        Infinite where something was released without noise, or where inexact draws of noise alone exceed `delta`; 0 without
        rounds.
        """
        once = [ComposedMechanism(((step, 1),), ((step, 1),), self.whole, error, (error,), "none", self.non_private, ())
                for (step, _), error in zip(self.full, self.errors, strict=True)]
        epsilons = [one.epsilon(one.unamplified_accountant, delta, math.inf) for one in once]
        return max(epsilons, default=math.inf if self.non_private else 0.0)

    def epsilon(self, accountant: Accountant, delta: float, if_none: float | None = None) -> float:
        """Epsilon at `delta` of this mechanism by `accountant`; inexact draws of integer noise are charged to `delta`.

        At epsilon that charge is (1 + e^epsilon) times `error`, the total variation distance of the draws from exact ones.
        Where it exceeds `delta` at every epsilon that would be enough, returns `if_none` or, if that is None, raises a
        ValueError. Infinite where something was released without noise; 0 where the accountant has no steps.
        """
        if self.non_private:
            return math.inf
        if not accountant.steps:
            return 0.0
        if not self.error:
            return accountant.epsilon(delta)
        epsilon, slack = 0.0, 1e-9
        while (left := delta - self._delta_of_inexact_draws(epsilon)) > 0:      # to the first epsilon that pays for its own error
            if (needed := accountant.epsilon(left)) <= epsilon:
                return epsilon
            epsilon, slack = needed + slack, 2 * slack
        if if_none is not None:
            return if_none
        raise ValueError(f"the draws of integer noise are {self.error:.2g} from exact, in all, and (1 + e^epsilon) times "
                         f"that leaves nothing of delta = {delta:g}. Draw exactly, draw less, or allow a larger delta.")

    def delta(self, accountant: Accountant, epsilon: float) -> float:
        """Delta at `epsilon` of this mechanism by `accountant`, at most 1; the error of inexact integer noise is added.

        It is 0 for an infinite `epsilon`, otherwise 1 where something was released without noise.
        """
        if math.isinf(epsilon) or self.non_private:
            return 0.0 if math.isinf(epsilon) else 1.0
        exact = accountant.delta(epsilon) if accountant.steps else 0.0
        return min(1.0, exact + self._delta_of_inexact_draws(epsilon))

    def _delta_of_inexact_draws(self, epsilon: float) -> float:
        """What inexact draws of integer noise add to delta at `epsilon`: (1 + e^epsilon) times their total variation distance."""
        return (1 + math.exp(min(epsilon, 700.0))) * self.error


@lru_cache(maxsize=256)
def compose_rounds(rounds: tuple[tuple[RoundEvent, int], ...], adjacency: Adjacency) -> ComposedMechanism:
    """One `ComposedMechanism` from `rounds`, which are pairs of a round and its count. Cached.

    The releases of a round are composed, then amplified once by its sampling. A round with a release without noise is not
    priced: `non_private` names that release. Rounds of count 0 or without releases are left out. A ValueError for an unknown
    adjacency and for rounds of two units of privacy, and a TypeError or ValueError for a round, release or sampling that no
    accountant can price. Without rounds the unit is "client".
    """
    if adjacency not in ("zero-out", "replace-one"):
        raise ValueError(f"adjacency must be zero-out or replace-one, got {adjacency!r}.")
    kept = [(event, count) for event, count in map(_checked_round, rounds) if count and event.releases]
    steps: Counter[Step] = Counter()
    full: Counter[Step] = Counter()
    errors: dict[Step, float] = {}
    for event, count in kept:
        event = without_correlated(event)
        if any(map(_lacks_noise, event.releases)) or not event.releases:
            continue
        steps[amplified_step(event, adjacency)] += count
        whole_step = Step(round_noise_multiplier(event.releases, adjacency))
        full[whole_step] += count
        errors[whole_step] = max(errors.get(whole_step, 0.0), _noise_draw_error(event))
    releases = [release for event, _ in kept for release in event.releases]
    for step, count in correlated_steps(kept, adjacency).items():
        steps[step] += count
        full[step] += count
        errors.setdefault(step, 0.0)
    return ComposedMechanism(
        steps=_costly_steps(steps), full=_costly_steps(full),
        whole=any(isinstance(release, LatticeRelease) for release in releases),
        error=math.fsum(count * _noise_draw_error(event) for event, count in kept),
        errors=tuple(errors[step] for step, _ in _costly_steps(full)),
        sampling=" and ".join(sorted({NAMES[type(event.sampling)] for event, _ in kept})) or "none",
        non_private=tuple(dict.fromkeys(release.what for release in releases if _lacks_noise(release))),
        notes=tuple(dict.fromkeys(note for event, _ in kept if (note := _amplification_note(event, adjacency)))),
        unit=common_unit(kept) or "client")


def without_correlated(event: RoundEvent) -> RoundEvent:
    """The round `event` without releases whose noise is correlated over rounds, which are priced together."""
    return replace(event, releases=tuple(one for one in event.releases if not isinstance(one, CorrelatedRelease)))


def correlated_steps(rounds: Iterable[tuple[RoundEvent, int]], adjacency: Adjacency) -> Counter[Step]:
    """The cost of all releases with correlated noise in `rounds`, pairs of a round and its count: steps without amplification.

    All rounds of a plan are together one Gaussian sum, which is charged for each round that begins them, and once where none is
    known to. A release without noise costs nothing here: it is not priced.
    """
    begun: Counter[CorrelatedRelease] = Counter()
    for event, count in rounds:
        for release in event.releases:
            if isinstance(release, CorrelatedRelease) and not _lacks_noise(release):
                begun[replace(release, begins=True)] += count if release.begins else 0
    steps: Counter[Step] = Counter()
    for plan, times in begun.items():
        steps[Step(plan.multiplier(adjacency))] += max(1, times)
    return steps


def round_noise_multiplier(releases: Iterable[Release], adjacency: Adjacency) -> float:
    """The noise multiplier of all `releases` of one round composed: (sum of 1/z^2)^(-1/2) for multipliers z.

    Infinite without releases. `adjacency` is the neighbouring relation. Every release must have noise.
    """
    return composed_noise_multiplier(tuple((Step(_noise_multiplier(release, adjacency)), 1) for release in releases))


def amplified_step(event: RoundEvent, adjacency: Adjacency) -> Step:
    """The round `event` as one `Step` for accountants, with the amplification that its sampling provably earns, and no more.

    Poisson sampling amplifies, unless integer noise may depend on the size of the cohort or `sampling.revealed` is 1. Cohorts
    of fixed size amplify only under replace-one adjacency with continuous noise. Any other round becomes a step with rate 1,
    that is, without amplification. Every release must have noise.
    """
    sampling, full = event.sampling, Step(round_noise_multiplier(event.releases, adjacency))
    rate = sampling_rate(sampling)
    if rate == 1 or _amplification_obstacle(event):
        return full
    if isinstance(sampling, PoissonSampling) and adjacency == "zero-out":
        return Step(full.multiplier, rate, "poisson", sampling.revealed)
    if isinstance(sampling, PoissonSampling):       # a sampled client sends x or x', one that is not sampled nothing
        return Step(min(round_noise_multiplier(event.releases, "zero-out"), 2 * full.multiplier), rate, "poisson-exchange",
                    sampling.revealed)
    if adjacency == "replace-one" and not _has_integer_noise(event):
        return Step(full.multiplier, rate, "fixed")
    return full


def sampling_rate(sampling: Sampling) -> float:
    """The probability (q) that a client participates in a round: the Poisson rate, cohort / population, or 1 without sampling."""
    if isinstance(sampling, PoissonSampling):
        return sampling.rate
    return sampling.cohort / sampling.population if isinstance(sampling, FixedSampling) else 1.0


def _amplification_obstacle(event: RoundEvent) -> str | None:
    """Why Poisson sampling does not amplify the round `event`, as a text for users; None where it does.

    None also where the round has another kind of sampling.
    """
    if not isinstance(event.sampling, PoissonSampling):
        return None
    varying = {release.constant for release in event.releases if isinstance(release, LatticeRelease) and not release.constant}
    return UNRECORDED if None in varying else VARYING if varying else UNBOUNDED if event.sampling.revealed == 1 else None


def _amplification_note(event: RoundEvent, adjacency: Adjacency) -> str | None:
    """A text for `Guarantee.notes`: why the round `event` is not amplified, or that its amplification is experimental.

    `adjacency` is the neighbouring relation. None where there is nothing to say.
    """
    plans = [release.rounds for release in event.releases if isinstance(release, CorrelatedRelease)]
    if plans:
        return TRUSTED.format(rounds=plans[0])
    if isinstance(event.sampling, PoissonSampling):
        return _amplification_obstacle(event) if event.sampling.rate < 1 else None
    if not isinstance(event.sampling, FixedSampling) or event.sampling.cohort == event.sampling.population:
        return None
    if adjacency == "zero-out":
        return ("cohorts of fixed size earn no amplification under zero-out adjacency, and none is claimed: use Poisson "
                "sampling, or use replace-one adjacency")
    if _has_integer_noise(event):
        return "no amplification by cohorts of fixed size is claimed for integer noise: use Poisson sampling"
    return "experimental: the amplification of cohorts of fixed size"


def _checked_round(entry: tuple[RoundEvent, int]) -> tuple[RoundEvent, int]:
    """Return `entry`, a pair of a round and its count, unchanged; a TypeError or ValueError where accountants cannot price it."""
    event, count = entry
    if not isinstance(event, RoundEvent):
        raise TypeError(f"rounds are pairs of a RoundEvent and a count, got {event!r}.")
    if not isinstance(count, int) or count < 0:
        raise ValueError(f"a round happens a whole number of times, got {count!r}.")
    for release in event.releases:
        if not isinstance(release, (GaussianRelease, LatticeRelease, NonPrivateRelease, CorrelatedRelease)):
            raise TypeError(f"no accountant can price {release!r}. Releases are GaussianRelease, LatticeRelease or "
                            "NonPrivateRelease.")
        if isinstance(release, CorrelatedRelease):
            _check_turns(release, event.sampling)
        if isinstance(release, (GaussianRelease, CorrelatedRelease)) and not (
                release.noise_multiplier >= 0 and release.exchange > 0):
            raise ValueError(f"noise_multiplier (z) must not be negative, and exchange must be positive, got {release!r}.")
    _check_sampling(event.sampling)
    return event, count


def _check_turns(release: CorrelatedRelease, sampling: Sampling) -> None:
    """Raise a ValueError unless clients sampled by `sampling` participate as seldom as the price of `release` assumes.

    With a separation of 1, a client in every round, any sampling will do.
    """
    if release.separation > 1 and not (isinstance(sampling, CyclicSampling) and sampling.separation >= release.separation):
        raise ValueError(f"noise that is correlated over rounds is priced for clients that participate at most once in "
                         f"{release.separation} rounds, got {sampling!r}. Use sample=CyclicCohorts({release.separation}).")


def _check_sampling(sampling: Sampling) -> None:
    """Raise a TypeError for an unknown kind of sampling, a ValueError for a rate or `revealed` outside [0, 1].

    A ValueError also for a fixed cohort that is empty or larger than the population.
    """
    if type(sampling) not in NAMES:
        raise TypeError(f"no accountant knows {sampling!r}. Cohorts are sampled by PoissonSampling, FixedSampling or NoSampling.")
    if isinstance(sampling, PoissonSampling) and not 0 <= sampling.rate <= 1:
        raise ValueError(f"the rate of Poisson sampling must be in [0, 1], got {sampling.rate:g}.")
    if isinstance(sampling, PoissonSampling) and not 0 <= sampling.revealed <= 1:
        raise ValueError("revealed, the probability that the minimum-cohort rule reveals participation, must be in [0, 1], got "
                         f"{sampling.revealed:g}.")
    if isinstance(sampling, FixedSampling) and not 1 <= sampling.cohort <= sampling.population:
        raise ValueError(f"a cohort must be between 1 and the population, got {sampling.cohort} of {sampling.population}.")


def _lacks_noise(release: Release) -> bool:
    """Whether a release has no noise at all (non-private, or noise multiplier 0), so that no epsilon covers it."""
    return isinstance(release, NonPrivateRelease) or (
        isinstance(release, (GaussianRelease, CorrelatedRelease)) and release.noise_multiplier == 0)


def _noise_multiplier(release: Release, adjacency: Adjacency) -> float:
    """The noise multiplier (z) of a release under the neighbouring relation `adjacency`.

    An AssertionError for a `NonPrivateRelease`, which has none.
    """
    assert not isinstance(release, NonPrivateRelease)
    return release.multiplier(adjacency)


def _has_integer_noise(event: RoundEvent) -> bool:
    """Whether any release of the round `event` has discrete Gaussian noise."""
    return any(isinstance(release, LatticeRelease) for release in event.releases)


def _noise_draw_error(event: RoundEvent) -> float:
    """Total variation distance of draws from exact ones, added over the integer releases of the round `event`; 0 without any."""
    return math.fsum(release.error for release in event.releases if isinstance(release, LatticeRelease))


def _costly_steps(steps: Counter[Step]) -> Steps:
    """Pairs (step, count) of the steps that cost something: those with a positive sampling rate and finite noise."""
    return tuple((step, count) for step, count in steps.items() if step.rate > 0 and math.isfinite(step.multiplier))
