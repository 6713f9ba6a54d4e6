"""What every channel does: open a round, carry questions out and sums back, close it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

from torch import Tensor

from fedtail.clients import Broadcast, ClientMemory, RoundView
from fedtail.questions import Encoding, Question, arranged, bound_for, single_questions
from fedtail.sampling import Cohort


class Encoder(Encoding, Protocol):
    """Both ends of a code: clients encode, workers add, the server decodes."""

    def sum(self, rows: Tensor) -> Tensor:
        """The sum over axis 0 of rows, or of partial sums."""
        ...

    def decode(self, total: Tensor, bound: Tensor) -> Tensor: ...


class Fleet(Protocol):
    """Who computes: a shard of clients returns one partial sum for each question."""

    population: Any                     # who exists: at least `key`, `mass`, `group` and a length
    forgets: bool                       # clients may lose what they remember between rounds

    def open(self, cohort: Cohort, broadcast: Broadcast) -> None:
        """A round begins; in round 0 nobody remembers anything."""
        ...

    def collect(self, questions: tuple[Question, ...], encoding: Encoder) -> list[Tensor]:
        """For each question the encoded sum, or the encoded rows where it gathers."""
        ...

    def close(self, finished: bool) -> None:
        """The round is over; what clients remember takes effect if it was held to its end."""
        ...

    def view(self) -> RoundView | None:
        """What only a simulator can see of the last round; None elsewhere."""
        ...

    def memory(self) -> ClientMemory:
        """What clients keep between rounds, as far as it can be seen here."""
        ...

    def recall(self, memory: ClientMemory) -> None:
        """Give clients back what they kept."""
        ...


class Channel:
    """Opens a round over a fleet. `minimum` is the smallest cohort it asks; `reveals_rows` whether single rows may cross."""

    minimum: ClassVar[int] = 1
    reveals_rows: ClassVar[bool] = True

    def encoding(self, clients: int, mass: float) -> Encoder:
        """The code for one round: so many clients, of at most so much mass each."""
        raise TypeError(f"{type(self).__name__} has no encoding.")

    @contextmanager
    def open(self, fleet: Fleet, cohort: Cohort, broadcast: Broadcast) -> Iterator[Callable[[Any], Any]]:
        """Tell the cohort the broadcast; yields `ask(question) -> sums`; closes the round whatever happens."""
        encoding = self.encoding(len(cohort.ids), cohort.mass_bound)
        fleet.open(cohort, broadcast)

        def ask(question: Any) -> Any:
            questions = tuple(single_questions(question))
            for one in questions:
                self.refuse_rows(one.gather, type(getattr(one, "aggregate", one)).__name__)
            totals = zip(questions, fleet.collect(questions, encoding), strict=True)
            return arranged(question, iter([
                encoding.decode(total, bound_for(one, total.shape[-1], encoding)) for one, total in totals]))

        finished = False
        try:
            yield ask
            finished = True
        finally:
            fleet.close(finished)

    def refuse_rows(self, gathers: bool, name: str) -> None:
        """Refuse, by name, what needs single rows where only sums cross."""
        if gathers and not self.reveals_rows:
            raise ValueError(f"{name} looks at single rows, but {type(self).__name__} reveals only sums. "
                             "Use an aggregator that needs only sums (WeightedMean), or PlainChannel.")
