"""What every channel does: open a round, carry questions out and sums back, close it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, ClassVar, Protocol

from torch import Tensor

from fedtail.fleet import Broadcast, Fleet, SimulatedPopulation
from fedtail.privacy.events import FixedSampling, Release, RoundEvent, Sampling, with_constant_noise
from fedtail.privacy.ledger import Ledger
from fedtail.privacy.mechanisms import Mechanism
from fedtail.privacy.randomness import Randomness, SeededRandomness, SystemRandomness
from fedtail.questions import (
    Encoding,
    Joint,
    Question,
    arrange_answers,
    refuse_rounding_after_noise,
    row_bound_for,
    single_questions,
)
from fedtail.sampling import Cohort

ROUNDING = 1e-6      # of a number of clients that was computed from masses


class Encoder(Encoding, Protocol):
    """Both ends of a code: clients encode, workers add, the server decodes."""

    def sum(self, rows: Tensor) -> Tensor:
        """The sum over axis 0 of rows, or of partial sums."""
        ...

    def decode(self, total: Tensor, bound: Tensor) -> Tensor:
        """The sum as float64 numbers; `bound` is what its rows were encoded with."""
        ...

    def resolves(self, sums: Tensor, bound: Tensor, divisor: int) -> bool:
        """Whether decoded sums, divided by the positive one at `divisor`, are more than rounding."""
        ...


class RoundLost(Exception):
    """Too few stayed, or contribute: what was asked stays charged, nothing of it is used, and the model stays as it was."""


class Channel:
    """Opens a round over a fleet. `reveals_rows` says whether single rows may be sent."""

    reveals_rows: ClassVar[bool] = True

    @property
    def minimum_contributors(self) -> int:
        """How many clients must contribute (have a row other than zero) to a sum; 0 where single clients are not hidden."""
        return 0

    @property
    def minimum(self) -> int:
        """The smallest cohort of a round that is held."""
        return 1

    @property
    def label(self) -> str:
        """What the server sees, for what is recorded."""
        return type(self).__name__

    def described(self, fleet: Fleet) -> str:
        """What the server sees of a round over this fleet, in words for the ledger: the `label`, unless the fleet matters."""
        return self.label

    def all_answer(self, fleet: Fleet | SimulatedPopulation) -> bool:
        """Whether every client that is sampled answers: then integer noise can be the same for every size of the cohort.

        A fleet of one's own that does not say so may lose clients.
        """
        return not getattr(fleet, "loses_clients", True)

    def encoding(self, clients: int, mass: float) -> Encoder:
        """The code for one round: so many clients, of at most so much mass each."""
        raise TypeError(f"{type(self).__name__} has no encoding.")

    @contextmanager
    def open(self, fleet: Fleet, cohort: Cohort, broadcast: Broadcast, ledger: Ledger,
             planned: RoundEvent) -> Iterator[Callable[[Any], Any]]:
        """Send the broadcast to the cohort; yields `ask(question) -> sums`; closes the round whatever happens.

        What a question reveals is on the ledger before it is asked.
        """
        encoding, dim = self.encoding(len(cohort.ids), cohort.mass_bound), broadcast.params.shape[-1]
        ledger.open(broadcast.round, planned, self.described(fleet))
        number, constant = count(), self.all_answer(fleet)

        def ask(question: Any) -> Any:
            """Charge for a question, or a joint one, and ask it: its sums, arranged as its questions are."""
            questions: tuple[Any, ...] = tuple(map(with_number, single_questions(question), number))
            if self.minimum_contributors:
                hidden = partial(hide_small_groups, cohort=cohort, population=fleet.population, minimum=self.minimum_contributors)
                questions = tuple(map(hidden, questions))
            for one in questions:
                refuse_release(self, one.mechanism, one.gather, one.name)
                if adds_shares(one.mechanism):
                    most = self.encoding(largest_cohort(planned.sampling, fleet.population), cohort.mass_bound)
                    refuse_rounding_after_noise(one, one.width(dim), most)      # the largest cohort: this one's size is not told
                lose_thin_noise(one, fleet, cohort)
            needed = self.answers_needed(questions, cohort, ask)
            releases = [one.release(dim) for one in questions]
            if constant:
                shared = zip(questions, releases, strict=True)
                questions = tuple(with_fixed_shares(one, cohort, release) for one, release in shared)
                releases = list(map(with_constant_noise, releases))
            charge = partial(ledger.charge, releases)
            charge()
            found = self.collect(questions, encoding, fleet, cohort, broadcast, charge, needed)
            self.lose_few(questions, fleet, needed)
            totals = zip(questions, found, strict=True)
            return arrange_answers(question, iter([read(one, total) for one, total in totals]))

        def read(question: Any, total: Tensor) -> Tensor:
            """The decoded sum, with the server's noise where the mechanism adds some; lost where it is mostly rounding."""
            bound = row_bound_for(question, total.shape[-1], encoding)
            sums = encoding.decode(total, bound)
            lose_rounding(question, sums, bound, encoding)
            return question.mechanism.on_server(sums, server_noise(broadcast, question.number))

        finished = False
        try:
            fleet.open(cohort, broadcast)
            yield ask
            finished = True
        finally:
            fleet.close(finished)
            ledger.close()

    def collect(self, questions: tuple[Any, ...], encoding: Encoder, fleet: Fleet, cohort: Cohort, broadcast: Broadcast,
                again: Callable[[], None], needed: int = 0) -> list[Tensor]:
        """For each question the encoded sum, or the encoded rows where it gathers; `again` charges for asking once more.

        A channel that hides single clients unmasks nothing where fewer than `needed` of them answered.
        """
        return fleet.collect(questions, encoding)

    def lose_few(self, questions: tuple[Any, ...], fleet: Fleet, needed: int = 0) -> None:
        """Lose the round where fewer clients answered than it takes. What was asked stays charged, at the planned noise.

        Integer noise relies on clients beside those of any one node, which knows its own clients' shares.
        """
        answered, needed = fleet.answer_count, max(needed, self.minimum, *(one.mechanism.minimum for one in questions))
        if answered is not None and answered < needed:
            raise RoundLost(f"{answered} clients answered, and {needed} are needed.")
        shares = max((one.mechanism.minimum for one in questions if adds_shares(one.mechanism)), default=0)
        beside = fleet.answered_beside_largest
        if beside is not None and beside < shares:
            raise RoundLost(f"{beside} clients answered beside those of the node that holds most, which knows their shares of "
                            f"the noise, and {shares} are needed.")

    def refuse_fleet(self, cohort_size: float, fleet: Fleet) -> Iterator[str]:
        """Why this channel cannot serve a fleet of which so many clients are expected in a round: texts, none where it can."""
        return iter(())

    def answers_needed(self, questions: tuple[Question, ...], cohort: Cohort, ask: Callable[[Any], Any]) -> int:
        """How many of a cohort must answer before a sum is unmasked, so that `minimum_contributors` surely contribute to it.

        Whoever drops out may be one of the contributors: of as many as there are at least, only those beyond the minimum may.
        Where fewer than the minimum contribute, the round is lost before anybody trains. Where nothing tells that enough do,
        they are counted first, by a sum over the whole cohort. Sums with noise are not counted: the count itself would be
        exact, and their noise hides each client whoever else contributes. 0 where no sum without noise hides single clients.
        """
        hidden = [one for one in questions if not one.mechanism.private] if self.minimum_contributors else []
        if not hidden:
            return 0
        clients, minimum = len(cohort.ids), self.minimum_contributors
        fewest = [whole_clients(one.fewest_contributors(cohort.mass_bound), clients) for one in hidden]
        unsure = tuple(one.count_question() for one, least in zip(hidden, fewest, strict=True) if least < min(minimum, clients))
        counted = [round(float(sums[0])) for sums in ask(Joint(unsure))] if unsure else []
        least = min([clients, *counted, *(one for one in fewest if one >= minimum)])
        if least < minimum:
            raise RoundLost(f"as few as {least} clients may contribute, and minimum_contributors is {minimum}.")
        return clients - least + minimum


def whole_clients(fewest: float | None, clients: int) -> int:
    """At least how many of so many clients contribute, as a whole number; 0 where nobody knows.

    A mass of 9.2 times one client's is that of 10 clients or more; what is above a whole number by rounding only is that number.
    """
    return 0 if fewest is None else math.ceil(min(fewest, clients) - ROUNDING)


def hide_small_groups(question: Any, cohort: Cohort, population: Any, minimum: int) -> Any:
    """A question by group, without noise, about those groups only of which `minimum` clients or more were sampled.

    Clients of the others answer zeros. The round is lost where no group has as many; other questions are returned as they are.
    """
    if not minimum or not question.by_group or question.mechanism.private:
        return question
    sizes = population.group[cohort.ids].bincount()
    large = sizes >= minimum
    if not bool(large.any()):
        raise RoundLost(f"of no group {minimum} clients were sampled (minimum_contributors), and {question.name} asks by group.")
    small = (~large & (sizes > 0)).nonzero().flatten()
    return replace(question, left_out_groups=tuple(small.tolist()), smallest_group=int(sizes[large].min()))


def refuse_release(channel: Channel, mechanism: Mechanism, gathers: bool, name: str) -> None:
    """Refuse, by name, what needs single rows where only sums are sent, or noise where nobody may see the exact sum."""
    kind = type(channel).__name__
    if mechanism.private and mechanism.reveals_exact_sum and not channel.reveals_rows:
        raise ValueError(f"{name} adds GaussianNoise on the server, to the exact sum, which {kind} is there to hide. Use "
                         "DiscreteNoise, whose shares are added by the clients, or PlainChannel.")
    if gathers and not channel.reveals_rows:
        raise ValueError(f"{name} looks at single rows, but {kind} reveals only sums. Use an aggregator that needs only sums "
                         "(WeightedMean), or PlainChannel.")
    if channel.minimum > 1 and mechanism.minimum > channel.minimum:
        raise ValueError(f"{name} relies on the noise of {mechanism.minimum} clients, but {kind} releases sums over "
                         f"{channel.minimum}. Write threshold={mechanism.minimum}, or plan for fewer clients.")


def adds_shares(mechanism: Mechanism) -> bool:
    """Whether clients add the noise, a share each, before anything is sent."""
    return mechanism.private and not mechanism.reveals_exact_sum


def lose_thin_noise(question: Question, fleet: Fleet, cohort: Cohort) -> None:
    """Lose the round where the noise relies on more clients than were sampled beside those of any one node."""
    nodes = fleet.population.node if adds_shares(question.mechanism) else None
    known = int(nodes[cohort.ids].unique(return_counts=True)[1].max()) if nodes is not None and len(cohort.ids) else 0
    if len(cohort.ids) - known < question.mechanism.minimum:
        beside = f" beside those of the node that holds most, {known}, which knows their shares" if known else ""
        raise RoundLost(f"{len(cohort.ids) - known} clients were sampled{beside}, and the noise of {question.name} relies on "
                        f"{question.mechanism.minimum}.")


def with_fixed_shares(question: Any, cohort: Cohort, release: Release) -> Any:
    """A question to which exactly as many clients as its noise relies on add a share of it: those with the smallest keys.

    The noise of the sum then has the same distribution for every cohort that is large enough.
    """
    if with_constant_noise(release) == release:
        return question
    keys, shares = cohort.key.sort().values, question.mechanism.minimum
    if len(keys) > shares and keys[shares] == keys[shares - 1]:
        raise ValueError("two clients of the cohort have the same key, and would draw the same noise. Give each client of the "
                         "population a key of its own.")
    return replace(question, last_share=int(keys[shares - 1]))


def largest_cohort(sampling: Sampling, population: Any) -> int:
    """How many clients a cohort may have: all of them, unless its size is fixed."""
    return sampling.cohort if isinstance(sampling, FixedSampling) else len(population)


def lose_rounding(question: Question, sums: Tensor, bound: Tensor, encoding: Encoder) -> None:
    """Lose the round where the sums would be divided by a weight that the encoding hardly resolves; zero is nobody's weight."""
    if question.divisor is None or encoding.resolves(sums, bound, question.divisor):      # floats always do, so be quick
        return
    if sums[question.divisor] > 0:
        weight, most = float(sums[question.divisor]), float(bound.expand(len(sums))[question.divisor])
        raise RoundLost(f"the weights of all who stayed sum to {weight:.3g} where one client may weigh {most:.3g}, and the step "
                        "would be mostly rounding. Raise modulus_bits or tighten update_bound; lower tilt, or even out masses, "
                        "where some clients weigh far more than others.")


def with_number(question: Any, number: int) -> Any:
    """The question with its number in the round, by which its noise is drawn."""
    return replace(question, number=number)


def server_noise(broadcast: Broadcast, number: int) -> Randomness:
    """The server's noise for one of the round's questions: from a seed where that is simulated, else the operating system's."""
    if broadcast.noise_seed is None:
        return SystemRandomness()
    return SeededRandomness(broadcast.noise_seed, "server noise", broadcast.round, number)
