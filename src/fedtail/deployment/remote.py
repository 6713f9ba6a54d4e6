"""A fleet whose clients live at remote nodes, behind one function that exchanges bytes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedtail.channel.base import Encoder, RoundLost, adds_shares
from fedtail.channel.graph import Graph
from fedtail.client_memory import ClientMemory, NodeMemory
from fedtail.deployment.masking import AllOrNothing, DropoutTolerant, Masking
from fedtail.deployment.node import PARTS, Ask, Close, Open, context_digest, may_be_repeated
from fedtail.deployment.node_messages import AnswerReport, NodeMessage, Reply, message_bytes, read_reply, silent_clients
from fedtail.deployment.registry import ClientRegistry
from fedtail.deprecated import new_value, with_old_names
from fedtail.fleet import Broadcast
from fedtail.questions import Question
from fedtail.sampling import Cohort
from fedtail.secure.encoding import Refused
from fedtail.secure.exchanges import refuse_few
from fedtail.secure.frames import peek, unbundled
from fedtail.secure.messages import Ask as MaskedAsk
from fedtail.secure.messages import AskAll
from fedtail.secure.sparse_messages import SparseAsk
from fedtail.wire import pack, types_by_name, unpack

Exchange = Callable[[Mapping[int, bytes]], Mapping[int, bytes]]      # a message for some nodes, replies from those who answer
Schedule = Literal["ahead", "simple", "all-or-nothing"]
MOST_LOST = 256                                                      # lost rounds that are named to nodes
SILENT = "no answer"
LONGEST = 200                                                        # of what a node says about a problem


@with_old_names
class RemoteFleet:
    """Sends questions to nodes; each returns one partial sum for each question, in the clear or under masks.

    A node that is missing from what `exchange` returns has failed, and so has one whose answer is malformed; their
    clients do not contribute to that question, and `reports` says so. `schedule` is how masked sums share their exchanges
    (see `fedtail.deployment.masking`). `forgets` says whether nodes may lose what their clients remember.
    """

    in_one_process = False
    masks_rows = True
    loses_clients = True

    def __init__(self, exchange: Exchange, registry: ClientRegistry, forgets: bool = True, schedule: Schedule = "ahead"):
        """Begin a run under a fresh random name; nothing is sent. ValueError for an unknown schedule."""
        schedule = new_value("schedule", schedule)
        if schedule not in ("ahead", "simple", "all-or-nothing"):
            raise ValueError(f"schedule must be ahead, simple or all-or-nothing, got {schedule!r}.")
        self.exchange, self.population, self.forgets, self.schedule = exchange, registry, forgets, schedule
        self.answer_count = 0                                    # clients whose answers the last sums hold
        self.answered_beside_largest = 0                     # those at other nodes than the one that holds most of them
        self.reports: list[AnswerReport] = []                # of the round under way, or the last one
        self._types, self._run, self._messages = types_by_name(PARTS), secrets.token_bytes(16), 0
        self._masking: Masking = (AllOrNothing(self._exchange_masked, self._run) if schedule == "all-or-nothing"
                                  else DropoutTolerant(self._exchange_masked, self._run, schedule == "ahead"))
        self._nodes = NodeMemory(secrets.token_bytes(16))    # what is sent to them about the training
        self._drawn: dict[int, Cohort] = {}                  # cohorts by round, drawn ahead
        self._counts: dict[int, int] = {}                    # clients sampled in this round, by node
        self._unsent: dict[int, list[bytes]] = {}            # broadcasts that each node has not received yet
        self._broadcast = Broadcast(-1, 0, torch.zeros(1, 0))
        self._masked_round = -1
        self._asking, self._problems, self._exchanges = b"", dict[int, str](), 0
        self._silent: dict[int, int] = {}                    # clients by node that the masked row holds with zeros only

    def draw(self, draw: Callable[[int], Cohort], round: int) -> Cohort:
        """The cohort of a round, by `draw`.

        Where keys travel ahead, the next round's is sampled too and used when that begins.
        """
        cohort = self._drawn.pop(round, None) or draw(round)
        self._drawn = {round + 1: draw(round + 1)} if self.schedule == "ahead" else {}
        return cohort

    def open(self, cohort: Cohort, broadcast: Broadcast) -> None:
        """Begin a round with a cohort.

        Nothing is sent yet: the broadcast, without its noise seed, travels with the first question.
        """
        self._broadcast, self.reports = Broadcast(broadcast.round, broadcast.seed, broadcast.params), []
        self._counts, self._masked_round = self.population.counts(cohort), -1
        for node in self._counts:
            before, mine = self._unsent.get(node, [])[-1:], self.population.cohort_at(cohort, node)  # how its last round ended
            self._unsent[node] = [*before, pack(Open(mine, self._broadcast, self._nodes.training, self._nodes.lost))]

    def collect(self, questions: tuple[Question, ...], encoding: Encoder) -> list[Tensor]:
        """For each question the sum over the nodes that answered, asked in the clear, or their rows where it gathers.

        RoundLost where no node answered; `reports` says which did not and why.
        """
        ask = self._pack_question(questions, encoding)
        replies = self._exchange_messages(dict.fromkeys(self._counts, b""), dict.fromkeys(self._counts, ask))
        found = {node: sums for node, reply in replies.items() if (sums := self._sums(node, reply, questions, encoding))}
        self._report(found)
        if not found:
            first = next((f" Node {node} says: {why}" for node, why in self._problems.items() if why != SILENT), "")
            raise RoundLost(f"no node answered.{first}")
        return [torch.cat(parts) if question.gather else encoding.sum(torch.stack(parts))
                for question, parts in zip(questions, zip(*found.values(), strict=True), strict=True)]

    def collect_masked(self, questions: tuple[Question, ...], encoding: Any, threshold: int,
                       again: Callable[[], None], graph: Graph | None = None, needed: int = 0) -> list[Tensor]:
        """For each question the sum over `threshold` clients or more, none of whose rows is seen here; RoundLost for fewer.

        Nothing is unmasked where fewer than `needed` answered with more than zeros. `again` is called before a retry, and charges
        for it; sums without noise have none. `graph` says which nodes share masks; None: all of them.
        """
        widths = [one.width(self._broadcast.params.shape[-1]) for one in questions]
        shares = max((one.mechanism.minimum for one in questions if adds_shares(one.mechanism)), default=0)
        if shares:                                           # beside those of any one node, which knows its own
            threshold = max(threshold, shares + max(self._counts.values()))
        self._asking = self._pack_question(questions, encoding)

        def retry_context() -> bytes:
            """Charge for the retry, mark the question as a second attempt, and give its context digest."""
            again()
            self._asking = pack(Ask(self._broadcast.round, questions, encoding, attempt=1))
            return context_digest(self._broadcast, self._asking)

        def check_enough(members: tuple[int, ...]) -> None:
            """Raise TooFew where these nodes hold too few clients that answered with more than zeros."""
            silent = sum(self._silent.get(node, 0) for node in members) if needed else 0
            refuse_few(self._counts, max(needed + silent, threshold), members)

        try:
            self._open_masked(threshold, graph)
            context = context_digest(self._broadcast, self._asking)
            found = self._masking.sum(sum(widths), encoding.modulus_bits, context,
                                      retry_context if may_be_repeated(questions) else None, check_enough)
        except Refused as why:
            self._report(())
            raise RoundLost(str(why)) from why
        self._note_refused()
        for node in self._counts.keys() - set(found.survivors):
            self._problems.setdefault(node, "its keys or shares did not come in time")
        self._report(found.survivors)
        return list(torch.from_numpy(found.total).split(widths))

    def close(self, finished: bool) -> None:
        """End a round. Nothing is sent: nodes that heard of it learn with their next message whether it was `finished`."""
        if not finished:
            self._nodes = replace(self._nodes, lost=(*self._nodes.lost, self._broadcast.round)[-MOST_LOST:])
        for node in self._counts:
            if not self._unsent[node]:                       # who never heard of the round need not hear of its end
                self._unsent[node] = [pack(Close(self._broadcast.round, finished))]
            else:
                self._unsent[node] = self._unsent[node][:-1]
        self._counts = {}

    def view(self) -> None:
        """None: a server has no view of single clients; `reports` says which answered."""

    def finish(self) -> None:
        """Send nodes how their last round ended, once training is over, so that they keep what it left."""
        waiting = {node: b"" for node, broadcasts in self._unsent.items() if broadcasts}
        if waiting:
            self._exchange_messages(waiting, waiting)

    def memory(self) -> ClientMemory:
        """What is sent to nodes so that they find what their clients keep, for a checkpoint.

        None of the memory itself is seen here.
        """
        return ClientMemory(self.population.key, {}, self._nodes if self._broadcast.round >= 0 else None)

    def recall(self, memory: ClientMemory) -> None:
        """Go on with the training of a checkpoint, whose nodes remember by themselves; without one, a new training begins."""
        self._nodes = memory.nodes or NodeMemory(secrets.token_bytes(16))

    def _open_masked(self, threshold: int, graph: Graph | None) -> None:
        """Begin the round's secure sums with its first masked question; later calls in the round change nothing."""
        if self._masked_round == self._broadcast.round:
            return
        upcoming = self._drawn.get(self._broadcast.round + 1)
        self._masking.open(self._counts, threshold, None if upcoming is None else self.population.counts(upcoming), graph)
        if isinstance(self._masking, AllOrNothing):
            self._masking.begin(tuple(self.population.node.unique().tolist()))
        self._masked_round = self._broadcast.round

    def _pack_question(self, questions: tuple[Question, ...], encoding: Encoder) -> bytes:
        """The packed questions of the round, after what was noted of the one before (problems, exchanges, zeros) was reset."""
        self._problems, self._exchanges, self._silent = {}, 0, {}
        return pack(Ask(self._broadcast.round, questions, encoding))

    def _exchange_masked(self, contents: Mapping[int, bytes]) -> Mapping[int, bytes]:
        """Exchange messages of the secure sum, by node; those that ask for a row travel with the question itself."""
        asks = {node: self._asking for node, bundle in contents.items() if node in self._counts and asks_for_row(bundle)}
        replies = self._exchange_messages(contents, asks)
        for node in asks.keys() & replies.keys():
            try:
                self._silent[node] = silent_clients(replies[node].answer)
            except Refused as why:
                self._problems[node] = str(why)
                del replies[node]
        return {node: reply.secure for node, reply in replies.items()}

    def _exchange_messages(self, secure: Mapping[int, bytes], asks: Mapping[int, bytes]) -> dict[int, Reply]:
        """Send each node its message and give the replies, in the order of the nodes; a node that failed is left out and noted.

        `secure` are messages of the secure sum by node, `asks` the questions; broadcasts go with a question until a node has
        them.
        """
        messages = {}
        for node, bundle in secure.items():
            self._messages += 1
            broadcasts = tuple(self._unsent[node]) if node in asks else ()
            messages[node] = message_bytes(NodeMessage(self._run, node, self._messages, broadcasts, asks.get(node, b""), bundle))
        came, self._exchanges = self.exchange(messages), self._exchanges + 1
        replies = {}
        for node, message in messages.items():
            try:
                reply = read_reply(message, came[node]) if node in came else None
            except Refused as why:
                self._problems[node] = str(why)
                continue
            if reply is None:
                self._problems[node] = SILENT
                continue
            if reply.problem:
                self._problems[node] = reply.problem.decode(errors="replace")[:LONGEST]
            elif node in asks:
                self._unsent[node] = []
            replies[node] = reply
        return replies

    def _sums(self, node: int, reply: Reply, questions: tuple[Question, ...], encoding: Any) -> tuple[Tensor, ...] | None:
        """A node's sums in the clear, one per question.

        None where it reported a problem or its answer is malformed, which is noted.
        """
        if reply.problem:
            return None
        try:
            sums = unpack(reply.answer, self._types)
            dim, counts = self._broadcast.params.shape[-1], self._counts[node]
            for one, question in zip(sums, questions, strict=True):
                check_answer(one, (counts,) if question.gather else (), question.width(dim), encoding)
        except Exception as why:                             # whatever garbage makes the reader say
            self._problems[node] = f"its answer was not taken: {why}"[:LONGEST]
            return None
        return sums

    def _note_refused(self) -> None:
        """Note why messages of nodes were refused since the last call; what is noted of a node already stays."""
        for node, why in self._masking.take_refused():
            self._problems.setdefault(node, str(why))

    def _report(self, nodes: Iterable[int]) -> None:
        """Add the report of a question whose sums hold the answers of these nodes, and set `answered` to their clients."""
        self._note_refused()
        counts = [self._counts[node] for node in nodes]
        self.answer_count = answered = sum(counts)
        self.answered_beside_largest = answered - max(counts, default=0)
        self.reports.append(AnswerReport(self._broadcast.round, len(self.reports), sum(self._counts.values()), answered,
                                         dict(self._problems), self._exchanges))


def asks_for_row(bundle: bytes) -> bool:
    """Whether a bundle of messages of the secure sum asks for a masked row, so that the question must go with it."""
    return any(peek(message)[0] in (MaskedAsk, AskAll, SparseAsk) for message in unbundled(bundle))


def check_answer(one: Any, lead: tuple[int, ...], width: int, encoding: Any) -> None:
    """Raise Refused for an answer that is no sum: another shape or dtype, numbers that are not finite, or beyond the modulus.

    `lead` is (clients,) where rows are gathered, else ().
    """
    bits = encoding.modulus_bits
    wanted = torch.float64 if bits is None else torch.int64
    if not isinstance(one, Tensor) or one.dtype != wanted or tuple(one.shape) != (*lead, width):
        raise Refused(f"it should be {(*lead, width)} numbers as {wanted}.")
    if not bool(one.isfinite().all()) or (bits is not None and bool(((one < 0) | (one >= 1 << bits)).any())):
        raise Refused("it holds numbers that are not finite, or beyond the modulus.")

