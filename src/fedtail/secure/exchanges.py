"""Rounds of secure aggregation over exchanges of bytes: which messages of client and server share an exchange.

The steps of a server are written as generators that yield what goes to each client and are sent what came back, so that two of
them can share their exchanges. A round of two queries whose keys travelled with the round before takes four exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

from fedtail.deprecated import with_old_names
from fedtail.secure.all_or_nothing import AllOrNothingServer
from fedtail.secure.encoding import Refused, TooFew
from fedtail.secure.frames import decode_bundle, encode_bundle, frame_class_and_session
from fedtail.secure.messages import Run, Session
from fedtail.secure.sum_server import Contents, Server, Sum

T = TypeVar("T")
Exchange = Callable[[Contents], Mapping[int, bytes]]      # messages for clients -> the answers of those who answered
Messages = dict[int, list[bytes]]
Steps = Generator[Messages, Messages, T]
Check = Callable[[tuple[int, ...]], None]                 # refuses a sum over these members, before it is unmasked


def set_up_session(server: Server) -> Steps[None]:
    """A generator that runs on the server and makes the session of `server` ready for queries, in two exchanges.

    It yields the messages for each client and is sent the clients' answers: first their public keys, then sealed shares of
    their secrets, which are both stored in `server`. Raises `TooFew` where fewer clients than the threshold send keys.
    """
    pass_answers_to_server(server, server.session.id, (yield as_message_lists(server.invite())))
    pass_answers_to_server(server, server.session.id, (yield as_message_lists(server.key_list())))


def accept_any_members(members: tuple[int, ...]) -> None:
    """Accept the sum over any `members`: a `check` for `hold_query` that never raises. The session's threshold still applies."""


def refuse_few_clients(clients: Mapping[int, int], needed: int, members: tuple[int, ...]) -> None:
    """Raise `TooFew` where the `members` whose rows arrived hold fewer than `needed` clients in all.

    `clients` is how many clients each member holds: a node masks the sum of several.
    """
    held = sum(clients[one] for one in members)
    if held < needed:
        raise TooFew(f"{held} of {sum(clients.values())} clients answered, and {needed} are needed: nothing is unmasked.")


def hold_query(server: Server, width: int, modulus_bits: int, context: bytes, check: Check = accept_any_members) -> Steps[Sum]:
    """A generator that runs on the server: it asks for rows, then for the shares that unmask their sum, and returns the `Sum`.

    It yields the messages for each client and is sent the clients' answers: two exchanges, three in a signed session. Rows have
    `width` entries modulo 2^modulus_bits, and the sum is over the members whose rows arrived. `check` is called with those
    members before anything is unmasked: if it raises, the sum stays masked for good. Raises `TooFew` where fewer clients than the
    threshold answer. `context` is what was broadcast with the query.
    """
    pass_answers_to_server(server, server.session.id, (yield as_message_lists(server.ask(width, modulus_bits, context))))
    check(server.answered_members)
    if server.session.signed:
        pass_answers_to_server(server, server.session.id, (yield as_message_lists(server.confirm())))
    pass_answers_to_server(server, server.session.id, (yield as_message_lists(server.unmask())))
    return server.total()


def as_message_lists(contents: Contents) -> Messages:
    """A copy of `contents`, which has one message for each client, with each message as a list of one."""
    return {one: [message] for one, message in contents.items()}


def pass_answers_to_server(server: Server | AllOrNothingServer, session: bytes, answers: Messages) -> None:
    """Give `server` those `answers` (lists of messages, by sender) that belong to the session with digest `session`.

    A message that the server refuses counts as not sent; it is added to `server.refused`, with its sender.
    """
    for sender, messages in answers.items():
        for message in messages:
            try:
                if frame_class_and_session(message)[1] == session:
                    server.receive(sender, message)
            except Refused as why:
                server.refused.append((sender, why))


def with_refusal_as_result(steps: Steps[T]) -> Steps[T | Refused]:
    """A generator that runs the generator `steps` and returns its result, or the `Refused` that it raises, instead of raising it.

    So the refusal of one does not end the other generators of `run_generators_together`.
    """
    try:
        return (yield from steps)
    except Refused as why:
        return why


def run_generators_together(*running: Steps[Any]) -> Steps[list[Any]]:
    """A generator that runs several generators in the same exchanges; returns the list of their results, in the order given.

    Each of `running` yields messages by client and is sent answers by client, as `hold_query` does. The messages of all of them
    for a client go into one exchange, so there are as many exchanges as the longest needs. Each is sent all answers and must
    pick its own, as `pass_answers_to_server` does by session. What one raises is raised.
    """
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


def run_over_exchange(steps: Steps[T], exchange: Exchange) -> T:
    """Run the generator `steps`, which yields messages by client, to its end over `exchange`; returns its result.

    What it raises is raised. The messages for a client are sent as one bundle, and its answer is unbundled; an answer that is
    not a bundle is ignored.
    """
    try:
        contents = next(steps)
        while True:
            answers: Messages = {}
            for sender, content in exchange({one: encode_bundle(messages) for one, messages in contents.items()}).items():
                try:
                    answers[sender] = list(decode_bundle(content))
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
        """Use `exchange` to reach the clients: it takes a bundle of messages for each, and returns the bundles that answer.

        Nothing is sent yet, and no round is open.
        """
        self.server: Server | None = None
        self._exchange, self._ahead = exchange, dict[bytes, tuple[Server, Refused | None]]()

    def open(self, session: Session) -> None:
        """Begin a round with a new `server`, which ends the one before: two exchanges, or none where `session` was set up ahead.

        Raises `TooFew` where fewer clients than the threshold sent keys; that too few sent shares is found at the first `sum`.
        Where `session` was set up ahead and that was refused, the refusal is raised here.
        """
        prepared = self._ahead.pop(session.id, None)
        self.server, refused = prepared or (Server(session), None)
        if refused is not None:
            raise refused
        if prepared is None:
            run_over_exchange(set_up_session(self.server), self._exchange)

    def sum(self, width: int, modulus_bits: int, context: bytes = b"", ahead: Session | None = None,
            check: Check = accept_any_members) -> Sum:
        """Hold the next query of the open session and return the `Sum` over the clients whose rows arrived.

        Rows have `width` entries modulo 2^modulus_bits. `context` is what was broadcast with the query. The session `ahead` is
        set up in the same exchanges, for a later `open`, which raises if that failed. `check` is called with the members whose
        rows arrived and may raise, before anything is unmasked. Raises `TooFew` where fewer clients than the threshold answer;
        raises `Refused` where no round is open.
        """
        if self.server is None:
            raise Refused("no round is open. Write rounds.open(session) first.")
        steps = hold_query(self.server, width, modulus_bits, context, check)
        if ahead is None:
            return run_over_exchange(steps, self._exchange)
        server = Server(ahead)
        both = run_generators_together(with_refusal_as_result(steps), with_refusal_as_result(set_up_session(server)))
        total, refused = run_over_exchange(both, self._exchange)
        self._ahead = {ahead.id: (server, refused)}
        if isinstance(total, Refused):
            raise total
        return total


@with_old_names
class AllOrNothingRounds:
    """All-or-nothing secure sums over an exchange: one exchange for each query, and one before the first.

    Where a member is missing, `sum` raises `Missing`. Where rows carry noise, `retry` then asks the rest for rows with fresh
    noise; without noise the late row would be the difference of the two sums, and clients refuse.
    """

    def __init__(self, exchange: Exchange, run: Run):
        """Make the server of `run` and collect the members' public keys over `exchange`, in one exchange.

        Raises `TooFew` where fewer than 2 members sent keys.
        """
        self.server, self._exchange, self._unheard = AllOrNothingServer(run), exchange, Messages()
        run_over_exchange(self._exchange_keys(), exchange)

    def sum(self, round: int, query: int, width: int, modulus_bits: int, context: bytes = b"",
            members: tuple[int, ...] | None = None) -> Sum:
        """The `Sum` of the rows of `members`, by default of all clients that sent keys, for one query of a round: one exchange.

        Rows have `width` entries modulo 2^modulus_bits; `context` is what was broadcast with the query. Raises `Missing` where a
        row did not arrive.
        """
        contents = self.server.ask(round, query, width, modulus_bits, context, members)
        return run_over_exchange(self._exchange_rows(contents), self._exchange)

    def retry(self, context: bytes = b"") -> Sum:
        """After `Missing`: ask the members that answered for new rows, with fresh noise, and return their `Sum`; one exchange.

        `context` is what is broadcast with the retry. Raises `Missing` where a row did not arrive this time; raises `Refused`
        where there is nothing to retry.
        """
        return run_over_exchange(self._exchange_rows(self.server.retry(context)), self._exchange)

    def _exchange_keys(self) -> Steps[None]:
        """A generator of one exchange: it yields the invitations by client, is sent the answers, and gives them to the server.

        Sets `_unheard`: for each client that sent keys, the message with the list of all keys, which has yet to reach it.
        Raises `TooFew` where fewer than 2 members sent keys.
        """
        pass_answers_to_server(self.server, self.server.run.id, (yield as_message_lists(self.server.invite())))
        self._unheard = as_message_lists(self.server.key_list())

    def _exchange_rows(self, contents: Contents) -> Steps[Sum]:
        """A generator of one exchange: it yields the query `contents`, is sent the masked rows, and returns their `Sum`.

        Raises `Missing` where a row does not arrive. The list of keys is sent along to each client until it has answered once;
        those that have are removed from `_unheard`.
        """
        answers = yield {one: [*self._unheard.get(one, []), message] for one, message in contents.items()}
        pass_answers_to_server(self.server, self.server.run.id, answers)
        self._unheard = {one: unheard for one, unheard in self._unheard.items() if one not in answers}
        return self.server.total()
