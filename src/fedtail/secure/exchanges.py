"""Rounds of secure aggregation over exchanges of bytes: which messages of client and server share an exchange.

The steps of a server are written as generators that yield what goes to each client and are sent what came back, so that two of
them can share their exchanges. A round of two queries whose keys travelled with the round before takes four exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

from fedtail.secure.all_or_nothing import AllOrNothingServer
from fedtail.secure.encoding import Refused, TooFew
from fedtail.secure.frames import bundled, peek, unbundled
from fedtail.secure.messages import Run, Session
from fedtail.secure.sum_server import Contents, Server, Sum

T = TypeVar("T")
Exchange = Callable[[Contents], Mapping[int, bytes]]      # messages for clients -> the answers of those who answered
Messages = dict[int, list[bytes]]
Steps = Generator[Messages, Messages, T]
Check = Callable[[tuple[int, ...]], None]                 # refuses a sum over these members, before it is unmasked


def set_up(server: Server) -> Steps[None]:
    """Make a session ready for queries, in two exchanges: all clients' public keys; their list, and encrypted shares."""
    take(server, server.session.id, (yield one_message_each(server.invite())))
    take(server, server.session.id, (yield one_message_each(server.key_list())))


def accept_any(members: tuple[int, ...]) -> None:
    """Unmask the sum over whichever members answered; the session's threshold holds besides."""


def refuse_few(clients: Mapping[int, int], needed: int, members: tuple[int, ...]) -> None:
    """Raise `TooFew` where the members that answered hold fewer clients than are needed; `clients` is how many each holds."""
    held = sum(clients[one] for one in members)
    if held < needed:
        raise TooFew(f"{held} of {sum(clients.values())} clients answered, and {needed} are needed: nothing is unmasked.")


def query(server: Server, width: int, modulus_bits: int, context: bytes, check: Check = accept_any) -> Steps[Sum]:
    """Rows, then shares to unmask their sum: two exchanges, three where lists are signed.

    `check` is called in between, with the members whose rows came: what it raises leaves the sum masked for good.
    """
    take(server, server.session.id, (yield one_message_each(server.ask(width, modulus_bits, context))))
    check(server.answered_members)
    if server.session.signed:
        take(server, server.session.id, (yield one_message_each(server.confirm())))
    take(server, server.session.id, (yield one_message_each(server.unmask())))
    return server.total()


def one_message_each(contents: Contents) -> Messages:
    """Each message as the only one of its exchange."""
    return {one: [message] for one, message in contents.items()}


def take(server: Server | AllOrNothingServer, session: bytes, answers: Messages) -> None:
    """Give a server the answers of its session; a client whose message is refused has not answered (`server.refused`)."""
    for sender, messages in answers.items():
        for message in messages:
            try:
                if peek(message)[1] == session:
                    server.receive(sender, message)
            except Refused as why:
                server.refused.append((sender, why))


def with_refusal_as_result(steps: Steps[T]) -> Steps[T | Refused]:
    """Steps whose refusal is their result, so that it does not end what runs beside them."""
    try:
        return (yield from steps)
    except Refused as why:
        return why


def side_by_side(*running: Steps[Any]) -> Steps[list[Any]]:
    """Several conversations at once, in as many exchanges as the longest takes."""
    results: dict[int, Any] = {}
    answers: Any = None
    while True:
        contents: Messages = {}
        for place, steps in enumerate(running):
            try:
                for one, messages in (steps.send(answers).items() if place not in results else ()):
                    contents.setdefault(one, []).extend(messages)
            except StopIteration as end:
                results[place] = end.value
        if len(results) == len(running):
            return [results[place] for place in range(len(running))]
        answers = yield contents


def carry(steps: Steps[T], exchange: Exchange) -> T:
    """Run steps to their end over an exchange. An answer that is no bundle of messages is ignored."""
    try:
        contents = next(steps)
        while True:
            answers: Messages = {}
            for sender, content in exchange({one: bundled(messages) for one, messages in contents.items()}).items():
                try:
                    answers[sender] = list(unbundled(content))
                except Refused:
                    continue
            contents = steps.send(answers)
    except StopIteration as end:
        return end.value


class Rounds:
    """Dropout-tolerant secure sums over an exchange, round after round.

    rounds.open(session)                                two exchanges, none if it was set up ahead
    rounds.sum(width, bits, context)                    two exchanges
    rounds.sum(width, bits, context, ahead=session)     two exchanges, in which the next session is set up too
    """

    def __init__(self, exchange: Exchange):
        self.server: Server | None = None
        self._exchange, self._ahead = exchange, dict[bytes, tuple[Server, Refused | None]]()

    def open(self, session: Session) -> None:
        """Begin a round, which ends the one before. `TooFew` where fewer keys or shares than the threshold came."""
        prepared = self._ahead.pop(session.id, None)
        self.server, refused = prepared or (Server(session), None)
        if refused is not None:
            raise refused
        if prepared is None:
            carry(set_up(self.server), self._exchange)

    def sum(self, width: int, modulus_bits: int, context: bytes = b"", ahead: Session | None = None,
            check: Check = accept_any) -> Sum:
        """The sum over the clients that stay, as the session's next query; `TooFew` where fewer than the threshold stay.

        `check` may refuse the sum over those whose rows came, before any of it is unmasked.
        """
        if self.server is None:
            raise Refused("no round is open. Write rounds.open(session) first.")
        steps = query(self.server, width, modulus_bits, context, check)
        if ahead is None:
            return carry(steps, self._exchange)
        server = Server(ahead)
        both = side_by_side(with_refusal_as_result(steps), with_refusal_as_result(set_up(server)))
        total, refused = carry(both, self._exchange)
        self._ahead = {ahead.id: (server, refused)}
        if isinstance(total, Refused):
            raise total
        return total


class AllOrNothingRounds:
    """All-or-nothing secure sums over an exchange: one exchange for each query, and one before the first.

    Where a member is missing, `sum` raises `Missing`. Where rows carry noise, `again` then asks the rest for rows with fresh
    noise; without noise the late row would be the difference of the two sums, and clients refuse.
    """

    def __init__(self, exchange: Exchange, run: Run):
        self.server, self._exchange, self._unheard = AllOrNothingServer(run), exchange, Messages()
        carry(self._exchange_keys(), exchange)

    def sum(self, round: int, query: int, width: int, modulus_bits: int, context: bytes = b"",
            members: tuple[int, ...] | None = None) -> Sum:
        """The sum over all clients that sent keys, or over `members`."""
        return carry(self._exchange_rows(self.server.ask(round, query, width, modulus_bits, context, members)), self._exchange)

    def again(self, context: bytes = b"") -> Sum:
        """Retry the query with the members that answered, whose rows must have fresh noise."""
        return carry(self._exchange_rows(self.server.again(context)), self._exchange)

    def _exchange_keys(self) -> Steps[None]:
        """Invite the members and take their keys; the list of them travels with the first query."""
        take(self.server, self.server.run.id, (yield one_message_each(self.server.invite())))
        self._unheard = one_message_each(self.server.key_list())

    def _exchange_rows(self, contents: Contents) -> Steps[Sum]:
        """Ask for rows and add them up; `Missing` where one does not come.

        The list of keys travels along until a client has answered.
        """
        answers = yield {one: [*self._unheard.get(one, []), message] for one, message in contents.items()}
        take(self.server, self.server.run.id, answers)
        self._unheard = {one: unheard for one, unheard in self._unheard.items() if one not in answers}
        return self.server.total()
