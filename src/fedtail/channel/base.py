"""What every channel does: open a round, carry questions out and sums back, close it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fedtail.answering import Encoding, refuse_rounding_after_noise, row_bound_for
from fedtail.conversations import Joint, arrange_answers, single_questions
from fedtail.deprecated import with_old_names
from fedtail.fleet import Broadcast, Fleet, SimulatedPopulation
from fedtail.privacy.correlated_noise import CorrelatedSum
from fedtail.privacy.events import FixedSampling, Release, RoundEvent, Sampling, with_constant_noise
from fedtail.privacy.ledger import Ledger
from fedtail.privacy.mechanisms import Mechanism
from fedtail.privacy.randomness import Randomness, SeededRandomness, SystemRandomness
from fedtail.questions import Question
from fedtail.sampling import Cohort

SLACK = 1 + 1e-6     # how far beyond its bound an entry may be by rounding to float32
AT_ONCE = 2**22      # numbers of gathered rows that are checked at once
ROUNDING = 0.05      # clients: what masses that were rounded to few bits may add to a number of clients computed from them


class Encoder(Encoding, Protocol):
    """How rows are sent: clients encode them, worker processes add them, and the server decodes the sum."""

    def sum(self, rows: Tensor) -> Tensor:
        """The encoded sum, (width,), over axis 0 of encoded rows, (clients, width), or of encoded sums, (parts, width)."""
        ...

    def add(self, total: Tensor, rows: Tensor) -> None:
        """Add encoded rows or sums, (rows, width), to the encoded sum `total`, (width,), in place: `sum` of all of them."""
        ...

    def decode(self, total: Tensor, bound: Tensor) -> Tensor:
        """The real numbers, float64, (width,), that the encoded sum `total` stands for.

        `bound` is the bound on absolute entries with which the rows were encoded: the scale of the encoding follows from it.
        """
        ...

    def resolves_ratios(self, sums: Tensor, bound: Tensor, divisor: int) -> bool:
        """Whether the decoded `sums`, divided by the weight sums[divisor], are more than rounding errors of the encoding.

        `bound`, (width,) or (1,), is the bound on absolute entries with which the rows were encoded.
        """
        ...


class RowsLeftOutWarning(UserWarning):
    """Rows of single clients were not finite, or beyond the bound that the aggregator states, and are left out of the round."""


class RoundLost(Exception):
    """Too few clients answered or contribute: the round is given up and the model stays as it was.

    What was asked stays charged to the privacy ledger, and none of it is used.
    """


@with_old_names
class Channel:
    """How a round's questions reach the clients of a fleet, and their sums the server; `reveals_rows`: it may see single rows."""

    reveals_rows: ClassVar[bool] = True

    @property
    def minimum_contributors(self) -> int:
        """The fewest clients that must contribute a non-zero row to a sum without noise; 0, the default, is no such rule.

        Channels that hide single clients override it.
        """
        return 0

    @property
    def minimum(self) -> int:
        """The smallest cohort with which this channel holds a round; a round with a smaller one is skipped. By default 0.

        The method's noise, or that it has none, may demand more.
        """
        return 0

    @property
    def label(self) -> str:
        """A text that says what the server sees, for ledgers and reports; by default the name of the class."""
        return type(self).__name__

    def label_for_fleet(self, fleet: Fleet) -> str:
        """A text that says what the server sees in a round over this fleet, for the ledger; by default the `label`."""
        return self.label

    def all_answer(self, fleet: Fleet | SimulatedPopulation) -> bool:
        """Whether every client that is sampled from `fleet` is certain to answer; False for a fleet without `loses_clients`.

        If True, a fixed number of clients add shares of integer noise, so that the noise does not depend on the size of the
        cohort and Poisson sampling earns amplification. If False, every client of the cohort adds a share, and no amplification
        is claimed.
        """
        return not getattr(fleet, "loses_clients", True)

    def encoding(self, clients: int, mass: float) -> Encoder:
        """The encoding of the rows of one round, for at most `clients` clients with a mass of at most `mass` each.

        Every channel defines its own; here it raises TypeError.
        """
        raise TypeError(f"{type(self).__name__} has no encoding.")

    @contextmanager
    def open(self, fleet: Fleet, cohort: Cohort, broadcast: Broadcast, ledger: Ledger,
             planned: RoundEvent) -> Iterator[Callable[[Any], Any]]:
        """A context manager for one round: sends `broadcast` to the cohort, and yields a function `ask(question) -> sums`.

        It opens the round on the ledger, with `planned` as its planned cost, and on the fleet. At its end, also after an
        exception, it closes both; clients keep what they stored in the round only if there was no exception. `ask` takes a
        question or a `Joint` of several. It charges the ledger for what the answer reveals before it asks, and raises `RoundLost`
        where too few clients take part. With an empty cohort nobody is sent anything, and what is released is noise alone.
        """
        encoding, dim = self.encoding(len(cohort.ids), cohort.mass_bound), broadcast.params.shape[-1]
        ledger.open(broadcast.round, planned, self.label_for_fleet(fleet))
        number, constant, is_empty = count(), self.all_answer(fleet), not len(cohort.ids)

        def ask(question: Any) -> Any:
            """Check a question, charge the ledger for it, ask the cohort, and return the decoded sum, (width,) float64.

            A `Joint` of questions returns a tuple of sums, nested as the questions are. A question that asks for single rows
            returns these, (clients, width). Raises ValueError for a question that this channel refuses, and `RoundLost` where too
            few clients were sampled, contribute or answered.
            """
            questions: tuple[Any, ...] = tuple(map(with_question_number, single_questions(question), number))
            if self.minimum_contributors:
                hidden = partial(leave_out_small_groups, cohort=cohort, population=fleet.population,
                                 minimum=self.minimum_contributors)
                questions = tuple(map(hidden, questions))
            for one in questions:
                refuse_mechanism(self, one.mechanism, one.gather, one.name)
                if clients_add_noise(one.mechanism):
                    most = self.encoding(largest_cohort_size(planned.sampling, fleet.population), cohort.mass_bound)
                    refuse_rounding_after_noise(one, one.width(dim), most)      # the largest cohort: this one's size is not told
                check_enough_for_noise(one, fleet, cohort)
            needed = self.answers_needed(questions, cohort, ask)
            releases = [one.release(dim) for one in questions]
            if constant:
                shared = zip(questions, releases, strict=True)
                questions = tuple(with_fixed_noise_shares(one, cohort, release) for one, release in shared)
                releases = list(map(with_constant_noise, releases))
            charge = partial(ledger.charge, releases)
            charge()
            if is_empty:
                found = [encoding.sum(torch.zeros(0, one.width(dim), dtype=torch.float64)) for one in questions]
            else:
                found = self.collect(questions, encoding, fleet, cohort, broadcast, charge, needed)
                self.check_enough_answers(questions, fleet)
            totals = zip(questions, found, strict=True)
            return arrange_answers(question, iter([decoded_sum(one, total) for one, total in totals]))

        def decoded_sum(question: Any, total: Tensor) -> Tensor:
            """The released sum of one question, float64: `total`, the encoded sum, decoded by the encoding of the round.

            Adds the server's noise where the mechanism of the question has some. Raises `RoundLost` where a sum of updates is not
            finite, or would be divided by a weight that no cohort can have or that is mostly rounding error. Of gathered rows,
            those that are not finite or beyond their bound are zero.
            """
            bound = row_bound_for(question, total.shape[-1], encoding)
            sums = encoding.decode(total, bound)
            if question.gather:
                return without_invalid_rows(question, sums, question.width(dim), encoding)
            check_sum_of_updates(question, sums)
            check_sum_of_weights(question, sums, encoding)
            check_divisor_resolved(question, sums, bound, encoding)
            return question.mechanism.on_server(sums, server_noise_source(broadcast, question.number))

        finished = False
        try:
            if not is_empty:
                fleet.open_round(cohort, broadcast)
            yield ask
            finished = not is_empty
        finally:
            fleet.close_round(finished)
            ledger.close()

    def collect(self, questions: tuple[Any, ...], encoding: Encoder, fleet: Fleet, cohort: Cohort, broadcast: Broadcast,
                again: Callable[[], None], needed: int = 0) -> list[Tensor]:
        """One encoded tensor per question: the sum over the cohort, (width,), or the rows, (clients, width), if it gathers rows.

        Here `fleet.collect` is called with `questions` and `encoding`, by which rows are encoded, and the other arguments are not
        used. A subclass that hides single clients raises `RoundLost` where fewer than `needed` clients of `cohort` answered,
        binds masks to `broadcast`, and calls `again`, which charges the ledger, before it asks a second time.
        """
        return fleet.collect(questions, encoding)

    def check_enough_answers(self, questions: tuple[Any, ...], fleet: Fleet) -> None:
        """Raise `RoundLost` where too few clients of `fleet` answered these questions; the ledger stays charged for them.

        At least `minimum` clients must have answered, and as many as the noise of each question relies on. Where clients add
        shares of integer noise, that many must be outside the node with most clients, since a node knows the shares of its own
        clients.
        """
        answered, needed = fleet.answer_count, max(self.minimum, *(one.mechanism.minimum for one in questions))
        if answered is not None and answered < needed:
            raise RoundLost(f"{answered} clients answered, and {needed} are needed.")
        shares = max((one.mechanism.minimum for one in questions if clients_add_noise(one.mechanism)), default=0)
        beside = fleet.answers_outside_largest_node
        if beside is not None and beside < shares:
            raise RoundLost(f"{beside} clients answered beside those of the node that holds most, which knows their shares of "
                            f"the noise, and {shares} are needed.")

    def fleet_refusals(self, cohort_size: float, fleet: Fleet) -> Iterator[str]:
        """Yields texts, each a reason why this channel cannot be used with `fleet`; here none, for subclasses to override.

        `cohort_size` is the expected number of clients in a round.
        """
        return iter(())

    def answers_needed(self, questions: tuple[Question, ...], cohort: Cohort, ask: Callable[[Any], Any]) -> int:
        """How many clients must answer before a sum is unmasked, so that at least `minimum_contributors` contribute to it.

        If at least `least` of n clients contribute to each sum, this is n - least + minimum_contributors, since any of the
        contributors may drop out. Only sums without noise are considered. Where a question cannot say that enough clients
        contribute, they are counted first by a question of its own, through `ask`, which is charged. Returns 0 where
        `minimum_contributors` is 0 or all sums have noise. Raises `RoundLost` where `least` is below the minimum, and ValueError
        where a client has an importance of zero. n is the size of `cohort`.
        """
        hidden = [one for one in questions if not one.mechanism.private] if self.minimum_contributors else []
        if not hidden:
            return 0
        if not bool((cohort.importance > 0).all()):
            raise ValueError("a client of the cohort has an importance of zero: it would be taken to contribute and would not. "
                             "Give every sampled client a positive importance, or leave it out of the cohort.")
        clients, minimum = len(cohort.ids), self.minimum_contributors
        fewest = [whole_number_of_clients(one.fewest_contributors(cohort.mass_bound), clients) for one in hidden]
        unsure = tuple(one.count_question() for one, least in zip(hidden, fewest, strict=True) if least < min(minimum, clients))
        counted = [round(float(sums[0])) for sums in ask(Joint(unsure))] if unsure else []
        least = min([clients, *counted, *(one for one in fewest if one >= minimum)])
        if least < minimum:
            raise RoundLost(f"as few as {least} clients may contribute, and minimum_contributors is {minimum}.")
        return clients - least + minimum


def whole_number_of_clients(fewest: float | None, clients: int) -> int:
    """`fewest`, a lower bound on the number of contributing clients, rounded up and limited to `clients`; 0 where it is None.

    `fewest` may be a ratio of masses: 9.2 times the largest mass of one client takes 10 clients. An excess of up to 0.05 over a
    whole number is taken as a rounding error and not rounded up.
    """
    return 0 if fewest is None else math.ceil(min(fewest, clients) - ROUNDING)


def leave_out_small_groups(question: Any, cohort: Cohort, population: Any, minimum: int) -> Any:
    """A copy of `question` to which clients of small groups, with fewer than `minimum` clients in the cohort, answer zeros.

    The copy also holds the size of the smallest remaining group. Only a question without noise whose rows are read group by group
    is changed; any other is returned as it is, and so are all if `minimum` is 0. Raises `RoundLost` where no group has `minimum`
    clients in the cohort. `population` has the group of each client.
    """
    if not minimum or not question.by_group or question.mechanism.private:
        return question
    sizes = population.group[cohort.ids].bincount()
    large = sizes >= minimum
    if not bool(large.any()):
        raise RoundLost(f"of no group {minimum} clients were sampled (minimum_contributors), and {question.name} asks by group.")
    small = (~large & (sizes > 0)).nonzero().flatten()
    return replace(question, left_out_groups=tuple(small.tolist()), smallest_group=int(sizes[large].min()))


def refuse_mechanism(channel: Channel, mechanism: Mechanism, gathers: bool, name: str) -> None:
    """Raise a ValueError where `channel` does not allow a question with this mechanism; `name` words the error.

    A channel that reveals only sums refuses noise that the server adds to the exact sum, and questions for single rows
    (`gathers`). A channel with a `minimum` above 1 refuses noise that relies on more clients than that.
    """
    kind = type(channel).__name__
    if mechanism.private and mechanism.reveals_exact_sum and not channel.reveals_rows:
        correlated = isinstance(mechanism, CorrelatedSum)
        raise ValueError(f"{name} adds {'correlated noise' if correlated else 'GaussianNoise'} on the server, to the exact sum, "
                         f"which {kind} is there to hide. Use {'PrivateMean with ' if correlated else ''}DiscreteNoise, whose "
                         "shares are added by the clients, or PlainChannel.")
    if gathers and not channel.reveals_rows:
        raise ValueError(f"{name} looks at single rows, but {kind} reveals only sums. Use an aggregator that needs only sums "
                         "(WeightedMean, GeometricMedian), or PlainChannel.")
    if channel.minimum > 1 and mechanism.minimum > channel.minimum:
        raise ValueError(f"{name} relies on the noise of {mechanism.minimum} clients, but {kind} releases sums over "
                         f"{channel.minimum}. Write threshold={mechanism.minimum}, or plan for fewer clients.")


def clients_add_noise(mechanism: Mechanism) -> bool:
    """Whether each client adds a share of the noise of `mechanism`; False where the server adds it, or there is no noise."""
    return mechanism.private and not mechanism.reveals_exact_sum


def check_enough_for_noise(question: Question, fleet: Fleet, cohort: Cohort) -> None:
    """Raise `RoundLost` where fewer clients were sampled than the noise of this question relies on (`mechanism.minimum`).

    If clients add the noise, those of the node with most of the cohort are not included, since that node knows their shares.
    `fleet` says which node each client of `cohort` is at.
    """
    nodes = fleet.population.node if clients_add_noise(question.mechanism) else None
    known = int(nodes[cohort.ids].unique(return_counts=True)[1].max()) if nodes is not None and len(cohort.ids) else 0
    if len(cohort.ids) - known < question.mechanism.minimum:
        beside = f" beside those of the node that holds most, {known}, which knows their shares" if known else ""
        raise RoundLost(f"{len(cohort.ids) - known} clients were sampled{beside}, and the noise of {question.name} relies on "
                        f"{question.mechanism.minimum}.")


def with_fixed_noise_shares(question: Any, cohort: Cohort, release: Release) -> Any:
    """A copy of `question` for which exactly `mechanism.minimum` clients of the cohort add noise: those with the smallest keys.

    The noise of the sum then has the same distribution for every cohort; it must have at least so many clients. The question is
    returned as it is where the noise that `release` describes has no shares, or a fixed number of them already. Raises ValueError
    where the next client has the same key as the last of those that add noise.
    """
    if with_constant_noise(release) == release:
        return question
    keys, shares = cohort.key.sort().values, question.mechanism.minimum
    if len(keys) > shares and keys[shares] == keys[shares - 1]:
        raise ValueError("two clients of the cohort have the same key, and would draw the same noise. Give each client of the "
                         "population a key of its own.")
    return replace(question, last_share=int(keys[shares - 1]))


def largest_cohort_size(sampling: Sampling, population: Any) -> int:
    """The largest number of clients a cohort can have under `sampling`: that of a `FixedSampling`, else the population's size."""
    return sampling.cohort if isinstance(sampling, FixedSampling) else len(population)


def check_sum_of_updates(question: Question, sums: Tensor) -> None:
    """Raise `RoundLost` where a sum of updates holds a number that is not finite: it would end in the model."""
    if question.trains and not bool(sums.sum().isfinite()) and not bool(sums.isfinite().all()):
        raise RoundLost(f"the sum that {question.name} asked for is not finite: a client or a node sent numbers that are not.")


def check_sum_of_weights(question: Question, sums: Tensor, encoding: Encoder) -> None:
    """Raise `RoundLost` where sums would be divided by a weight that the cohort cannot have: negative, or beyond all of theirs.

    Then a client sent a row that no honest one sends, and the quotient would be its choice. The weight is sums[question.divisor];
    nothing is checked where that divisor is None.
    """
    if question.divisor is None:
        return
    one = float(question.bound(question.divisor + 1, encoding.clients, encoding.mass)[-1])
    weight, most = float(sums[question.divisor]), encoding.clients * one
    if not 0 <= weight <= most * SLACK:
        raise RoundLost(f"the weights that {question.name} asked for sum to {weight:.3g}, and those of {encoding.clients} "
                        f"clients are from 0 to {most:.3g}: a client or a node sent what no honest one does. An aggregator over "
                        "rows, such as CoordinateMedian, leaves such rows out.")


def without_invalid_rows(question: Question, rows: Tensor, width: int, encoding: Encoder) -> Tensor:
    """The gathered rows, (clients, width), with zeros for those that are not finite or have an entry beyond its bound.

    So no such row reaches an aggregator, whoever sent it; who is left out has no weight. Warns (`RowsLeftOutWarning`) of how many
    are. Raises `RoundLost` where rows have another shape than (clients, width).
    """
    if rows.ndim != 2 or rows.shape[1] != width:
        raise RoundLost(f"rows of shape {tuple(rows.shape)} came for {question.name}, and each must have {width} numbers.")
    limit = (question.bound(width, encoding.clients, encoding.mass) * SLACK).to(rows)
    invalid = torch.cat([~(few.abs() <= limit).all(1) for few in rows.split(max(1, AT_ONCE // width))])
    if not bool(invalid.any()):
        return rows
    warnings.warn(f"{int(invalid.sum())} of {len(rows)} rows for {question.name} are not finite or beyond their bound, and are "
                  "left out. Where clients are honest, lower the learning rate or raise update_bound.", RowsLeftOutWarning,
                  stacklevel=2)
    return rows.masked_fill(invalid[:, None], 0.0)


def check_divisor_resolved(question: Question, sums: Tensor, bound: Tensor, encoding: Encoder) -> None:
    """Raise `RoundLost` where the sums would be divided by a positive weight that is mostly rounding error of the encoding.

    The weight is sums[question.divisor]; nothing is checked where that divisor is None. A weight of zero means that no client
    contributed, and is accepted. `bound` is the bound on absolute entries with which the rows were encoded.
    """
    if question.divisor is None or encoding.resolves_ratios(sums, bound, question.divisor):      # floats always do, so be quick
        return
    if sums[question.divisor] > 0:
        weight, most = float(sums[question.divisor]), float(bound.expand(len(sums))[question.divisor])
        raise RoundLost(f"the weights of all who stayed sum to {weight:.3g} where one client may weigh {most:.3g}, and the step "
                        "would be mostly rounding. Raise modulus_bits or tighten update_bound; lower tilt, or even out masses, "
                        "where some clients weigh far more than others.")


def with_question_number(question: Any, number: int) -> Any:
    """A copy of `question` with `number`, its position in the round; the noise of its answer is drawn by that number."""
    return replace(question, number=number)


def server_noise_source(broadcast: Broadcast, number: int) -> Randomness:
    """The random source from which the server draws its noise for question `number` of the round.

    With a `broadcast.noise_seed` it is a stream seeded by that, the round and the number; without one, the operating system.
    """
    if broadcast.noise_seed is None:
        return SystemRandomness()
    return SeededRandomness(broadcast.noise_seed, "server noise", broadcast.round, number)
