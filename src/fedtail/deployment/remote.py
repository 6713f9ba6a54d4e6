"""A fleet whose clients live at remote nodes, behind one function that exchanges bytes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedtail.channel.base import Encoder, RoundLost, clients_add_noise
from fedtail.channel.graph import Graph
from fedtail.client_memory import ClientMemory, NodeMemory
from fedtail.deployment.audit_log import AuditLog
from fedtail.deployment.masking import AllOrNothing, DropoutTolerant, Masking
from fedtail.deployment.node import PARTS, Ask, Close, Open, context_digest, may_retry_sum
from fedtail.deployment.node_messages import AnswerReport, NodeMessage, Reply, encode_message, read_reply
from fedtail.deployment.registry import ClientRegistry
from fedtail.deprecated import value_with_new_name, with_old_names
from fedtail.escaping import one_line
from fedtail.fleet import Broadcast
from fedtail.questions import Question
from fedtail.sampling import Cohort
from fedtail.secure.encoding import Refused
from fedtail.secure.exchanges import refuse_few_clients
from fedtail.secure.frames import decode_bundle, frame_class_and_session
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
    """Sends questions to nodes; each node returns one partial sum for each question, in the clear or under masks.

    `exchange` sends a message to each of some nodes and returns the replies by node. A node that is missing from them has failed,
    and so has one whose answer is malformed: their clients do not contribute to that question, and `reports` says so. `schedule`
    says which exchanges a masked sum takes (see `fedtail.deployment.masking`). `forgets` says whether nodes may lose what their
    clients remember.
    """

    in_one_process = False
    masks_rows = True
    loses_clients = True

    def __init__(self, exchange: Exchange, registry: ClientRegistry, forgets: bool = True, schedule: Schedule = "ahead"):
        """Begin a run under a name of 16 fresh random bytes; nothing is sent. Raises ValueError for an unknown schedule.

        `exchange` sends messages to nodes and returns their replies, both by node; `registry` has the clients of each node.
        `forgets` is whether nodes may lose what their clients remember, `schedule` which exchanges a masked sum takes.
        """
        schedule = value_with_new_name("schedule", schedule)
        if schedule not in ("ahead", "simple", "all-or-nothing"):
            raise ValueError(f"schedule must be ahead, simple or all-or-nothing, got {schedule!r}.")
        self.exchange, self.population, self.forgets, self.schedule = exchange, registry, forgets, schedule
        self.answer_count = 0                                    # clients whose answers the last sums hold
        self._heard: set[int] = set()                            # nodes whose answers are in a sum of the open round
        self.answers_outside_largest_node = 0                     # those at other nodes than the one that holds most of them
        self.reports: list[AnswerReport] = []                # of the round under way, or the last one
        self.audit: AuditLog | None = None                   # of what is asked and answered
        self._types, self._run, self._messages = types_by_name(PARTS), secrets.token_bytes(16), 0
        self._masking: Masking = (AllOrNothing(self._exchange_secure_messages, self._run) if schedule == "all-or-nothing"
                                  else DropoutTolerant(self._exchange_secure_messages, self._run, schedule == "ahead"))
        self._nodes = NodeMemory(secrets.token_bytes(16))    # what is sent to them about the training
        self._drawn: dict[int, Cohort] = {}                  # cohorts by round, drawn ahead
        self._counts: dict[int, int] = {}                    # clients sampled in this round, by node
        self._members = torch.zeros(0, 2, dtype=torch.int64)    # as nodes are told, (nodes, 2)
        self._unsent: dict[int, list[bytes]] = {}            # broadcasts that each node has not received yet
        self._broadcast = Broadcast(-1, 0, torch.zeros(1, 0))
        self._masked_round = -1
        self._asking, self._problems, self._exchanges = b"", dict[int, str](), 0
        self._silent = 0                                     # clients whose rows in the last masked sums hold only zeros

    def draw_cohort(self, draw: Callable[[int], Cohort], round: int) -> Cohort:
        """The cohort of round `round`; `draw` samples the cohort of a round number.

        With the schedule "ahead" the cohort of the next round is sampled now too, because its keys are exchanged with this round,
        and stored until this is called for that round.
        """
        cohort = self._drawn.pop(round, None) or draw(round)
        self._drawn = {round + 1: draw(round + 1)} if self.schedule == "ahead" else {}
        return cohort

    def change_population(self, registry: ClientRegistry, minimum_nodes: int = 2) -> None:
        """Between rounds: sample from `registry` from the next round on. A cohort that was sampled ahead is sampled anew.

        Masked sums are over `minimum_nodes` nodes or more, which is what the strictest of them demands.

        All-or-nothing sums begin a run of their own, in which nodes that joined have keys too.
        """
        if isinstance(self._masking, DropoutTolerant):
            self._masking.minimum_nodes = max(2, minimum_nodes)
        if registry is self.population:
            return
        self.population, self._drawn = registry, {}
        there = set(registry.node.unique().tolist())
        self._unsent = {node: unsent for node, unsent in self._unsent.items() if node in there}
        if isinstance(self._masking, AllOrNothing):
            self._run = secrets.token_bytes(16)
            self._masking = AllOrNothing(self._exchange_secure_messages, self._run)

    def open_round(self, cohort: Cohort, broadcast: Broadcast) -> None:
        """Begin a round with a cohort, and clear `reports`. Nothing is sent yet.

        For each node with sampled clients, the broadcast (round, seed, model; never the noise seed) is queued with its part of
        the cohort, and sent with the first question, after the message about how the node's last round ended, if that is still
        unsent.
        """
        self._broadcast, self.reports = Broadcast(broadcast.round, broadcast.seed, broadcast.params), []
        self._counts, self._masked_round, self._heard = self.population.clients_per_node(cohort), -1, set()
        self._members = torch.tensor(list(self._counts.items()), dtype=torch.int64).reshape(-1, 2)
        for node in self._counts:
            before, mine = self._unsent.get(node, [])[-1:], self.population.cohort_at(cohort, node)  # how its last round ended
            self._unsent[node] = [*before, pack(Open(mine, self._broadcast, self._nodes.training, self._nodes.lost,
                                                     self._members))]

    def collect(self, questions: tuple[Question, ...], encoding: Encoder) -> list[Tensor]:
        """For each question the encoded sum over the nodes that answered, (width,), or their clients' rows where it gathers them.

        Gathered rows are (clients, width). `encoding` is sent along: nodes encode their clients' rows by it. The answers are sent
        without masks. Adds an `AnswerReport` to `reports`, which says which nodes failed and why. Raises RoundLost where no node
        answered.
        """
        ask = self._begin_questions(questions, encoding)
        replies = self._exchange_messages(dict.fromkeys(self._counts, b""), dict.fromkeys(self._counts, ask))
        found = {node: sums for node, reply in replies.items() if (sums := self._checked_sums(node, reply, questions, encoding))}
        self._append_report(found)
        if not found:
            first = next((f" Node {node} says: {why}" for node, why in self._problems.items() if why != SILENT), "")
            raise RoundLost(f"no node answered.{first}")
        return [torch.cat(parts) if question.gather else encoding.sum(torch.stack(parts))
                for question, parts in zip(questions, zip(*found.values(), strict=True), strict=True)]

    def collect_masked(self, questions: tuple[Question, ...], encoding: Any, threshold: int,
                       again: Callable[[], None], graph: Graph | None = None, needed: int = 0) -> list[Tensor]:
        """For each question the sum over `threshold` clients or more, (width,) int64 modulo 2 ** modulus_bits; rows stay masked.

        `encoding`, by which nodes turn rows into integers, has the modulus. Nothing is unmasked where fewer than `needed` clients
        answered, and nothing is returned where fewer did with more than zeros; how many did not is an entry of the sum. `again`
        is called before a retry and charges the ledger for it; sums without noise are never retried. `graph` says which nodes
        share masks; None: every pair. Adds an `AnswerReport` to `reports`. Raises RoundLost where too few clients answer.
        """
        widths = [one.width(self._broadcast.params.shape[-1]) for one in questions]
        shares = max((one.mechanism.minimum for one in questions if clients_add_noise(one.mechanism)), default=0)
        if shares:                                           # beside those of any one node, which knows its own
            threshold = max(threshold, shares + max(self._counts.values()))
        self._asking = self._begin_questions(questions, encoding)

        def retry_context() -> bytes:
            """Charge for the retry by `again`, and mark the question as a second attempt; returns its context digest."""
            again()
            self._asking = pack(Ask(self._broadcast.round, questions, encoding, attempt=1))
            self._note_asked(self._asking, 1)
            return context_digest(self._broadcast, self._members, self._asking)

        def check_enough(members: tuple[int, ...], silent: int = 0) -> None:
            """Raise TooFew unless the nodes `members` hold `threshold` clients, and enough whose rows are not only zeros.

            `members` are nodes that answered. The second is checked where `needed` is not 0: all sampled clients but `needed` may
            be missing. Clients are counted at the nodes whose answers are in an earlier sum of this round, at all nodes where
            there is none; each of the `silent` clients at `members`, who sent zeros only, makes one more necessary.
            """
            refuse_few_clients(self._counts, threshold, members)
            if needed:
                expected = {node: held if node in self._heard or not self._heard else 0 for node, held in self._counts.items()}
                missing = sum(self._counts.values()) - needed
                refuse_few_clients(expected, sum(expected.values()) - missing + silent, members)

        try:
            self._open_masked_round(threshold, graph)
            context = context_digest(self._broadcast, self._members, self._asking)
            found = self._masking.sum_rows(sum(widths) + 1, encoding.modulus_bits, context,
                                           retry_context if may_retry_sum(questions) else None, check_enough)
            self._silent = int(found.total[-1])
            check_enough(found.survivors, self._silent)
        except Refused as why:
            self._append_report(())
            raise RoundLost(str(why)) from why
        self._note_refused_messages()
        for node in self._counts.keys() - set(found.survivors):
            self._problems.setdefault(node, "its keys or shares did not come in time")
        self._append_report(found.survivors)
        self._heard |= set(found.survivors)
        return list(torch.from_numpy(found.total)[:-1].split(widths))

    def count_silent_clients(self, questions: Iterable[Question]) -> int:
        """How many clients answered the last masked questions with zeros only; `questions` is not used."""
        return self._silent

    def close_round(self, finished: bool) -> None:
        """End the round; `finished` is whether it was completed. Nothing is sent.

        For nodes that received the round's broadcast, a message about its end is queued for their next question; for the others
        the broadcast is dropped. A round that was not finished is added to the lost rounds, which later broadcasts name.
        """
        if not finished:
            self._nodes = replace(self._nodes, lost=(*self._nodes.lost, self._broadcast.round)[-MOST_LOST:])
        for node in self._counts:
            if not self._unsent[node]:                       # who never heard of the round need not hear of its end
                self._unsent[node] = [pack(Close(self._broadcast.round, finished))]
            else:
                self._unsent[node] = self._unsent[node][:-1]
        self._counts = {}

    def round_view(self) -> None:
        """Always None: a server cannot see single clients. `reports` says how many answered and which nodes failed."""

    def finish(self) -> None:
        """Send every node that has not received it yet the message about how its last round ended; call it after the last round.

        The nodes then store what their clients remember of that round. It takes one exchange, and none where nothing is unsent.
        """
        waiting = {node: b"" for node, broadcasts in self._unsent.items() if broadcasts}
        if waiting:
            self._exchange_messages(waiting, waiting)

    def memory(self) -> ClientMemory:
        """For a checkpoint: the name of this training and its lost rounds, by which nodes find what their clients remember.

        The memory itself stays at the nodes: `kept` is {}. `nodes` is None before the first round.
        """
        return ClientMemory(self.population.key, {}, self._nodes if self._broadcast.round >= 0 else None)

    def restore_memory(self, memory: ClientMemory) -> None:
        """Continue the training that a checkpoint's `memory` names, so that nodes find what their clients remember in it.

        Where `memory.nodes` is None a new training begins, under a random name.
        """
        self._nodes = memory.nodes or NodeMemory(secrets.token_bytes(16))

    def _open_masked_round(self, threshold: int, graph: Graph | None) -> None:
        """Begin the round's secure sums, at its first masked question; further calls in the same round do nothing.

        Sums are over `threshold` clients or more; `graph` says which nodes share masks, None: every pair. With the all-or-nothing
        schedule, the first call of a run exchanges keys with all registered nodes.
        """
        if self._masked_round == self._broadcast.round:
            return
        upcoming = self._drawn.get(self._broadcast.round + 1)
        expected = None if upcoming is None else self.population.clients_per_node(upcoming)
        self._masking.open_round(self._counts, threshold, expected, graph)
        if isinstance(self._masking, AllOrNothing):
            self._masking.exchange_keys(tuple(self.population.node.unique().tolist()))
        self._masked_round = self._broadcast.round

    def _begin_questions(self, questions: tuple[Question, ...], encoding: Encoder) -> bytes:
        """Clear the problems, exchanges and zeros noted for the last questions; returns the new ones as a serialised `Ask`.

        It holds the number of the round, `questions`, and `encoding`, how answers are encoded.
        """
        self._problems, self._exchanges, self._silent = {}, 0, 0
        ask = pack(Ask(self._broadcast.round, questions, encoding))
        self._note_asked(ask)
        return ask

    def _note_asked(self, ask: bytes, attempt: int = 0) -> None:
        """Write to the audit log, if there is one, the digest of a serialised question that is sent, as nodes do."""
        if self.audit is not None:
            context = context_digest(self._broadcast, self._members, ask).hex()
            self.audit.write("asked", round=self._broadcast.round, context=context, attempt=attempt, nodes=list(self._counts),
                             cohort=sum(self._counts.values()), training=self._nodes.training.hex())

    def _exchange_secure_messages(self, contents: Mapping[int, bytes]) -> Mapping[int, bytes]:
        """Send each node its message of the secure sum, in `contents`, and return the messages in the replies; both by node.

        A message that asks for a row is sent with the question itself. Nodes that failed are left out, with the reason in
        `_problems`.
        """
        asks = {node: self._asking for node, bundle in contents.items() if node in self._counts and asks_for_row(bundle)}
        return {node: reply.secure for node, reply in self._exchange_messages(contents, asks).items()}

    def _exchange_messages(self, secure: Mapping[int, bytes], asks: Mapping[int, bytes]) -> dict[int, Reply]:
        """Send one message to each node in `secure` and return the replies by node, in the same order; adds one to `_exchanges`.

        `secure` holds messages of the secure sum (b"" for none), `asks` the serialised questions. Nodes in `asks` are also sent
        their unsent broadcasts, which are then dropped unless the reply has a problem. A node with no reply or a malformed one is
        left out. A reply with a problem is returned. The reasons of all of these are noted in `_problems`.
        """
        messages = {}
        for node, bundle in secure.items():
            self._messages += 1
            broadcasts = tuple(self._unsent[node]) if node in asks else ()
            asked = NodeMessage(self._run, node, self._messages, broadcasts, asks.get(node, b""), bundle)
            if asked.ask:
                asked = replace(asked, training=self._nodes.training, round=self._broadcast.round)
            messages[node] = encode_message(asked)
        came, self._exchanges = self.exchange(messages), self._exchanges + 1
        replies = {}
        for node, message in messages.items():
            try:
                reply = read_reply(message, came[node]) if node in came else None
            except Refused as why:
                self._problems[node] = one_line(why, LONGEST)
                continue
            if reply is None:
                self._problems[node] = SILENT
                continue
            if reply.problem:
                self._problems[node] = one_line(reply.problem.decode(errors="replace"), LONGEST)
            elif node in asks:
                self._unsent[node] = []
            replies[node] = reply
        return replies

    def _checked_sums(self, node: int, reply: Reply, questions: tuple[Question, ...], encoding: Any) -> tuple[Tensor, ...] | None:
        """The sums in a node's reply, one tensor for each question, checked for the shape, dtype and range that `encoding` gives.

        None where the reply of `node` holds a problem or the answer is malformed; the latter is noted in `_problems`.
        """
        if reply.problem:
            return None
        try:
            sums = unpack(reply.answer, self._types)
            dim, counts = self._broadcast.params.shape[-1], self._counts[node]
            for one, question in zip(sums, questions, strict=True):
                check_node_answer(one, (counts,) if question.gather else (), question.width(dim), encoding)
        except Exception as why:                             # whatever garbage makes the reader say
            self._problems[node] = one_line(f"its answer was not taken: {why}", LONGEST)
            return None
        return sums

    def _note_refused_messages(self) -> None:
        """Note in `_problems` why messages of secure sums were refused since the last call; a node's earlier reason is kept."""
        for node, why in self._masking.pop_refused_messages():
            self._problems.setdefault(node, one_line(why, LONGEST))

    def _append_report(self, nodes: Iterable[int]) -> None:
        """Append to `reports` the report of a question; its sums hold the answers of `nodes`. With none, nothing was released.

        Sets `answer_count` to the number of clients at these nodes, and `answers_outside_largest_node` to that of the clients at
        all but the largest of them.
        """
        self._note_refused_messages()
        nodes = tuple(nodes)
        counts = [self._counts[node] for node in nodes]
        if self.audit is not None:
            self.audit.write("answered", safely=True, round=self._broadcast.round, nodes=list(nodes),
                             problems={str(node): why for node, why in self._problems.items()})
        self.answer_count = answered = sum(counts)
        self.answers_outside_largest_node = answered - max(counts, default=0)
        self.reports.append(AnswerReport(self._broadcast.round, len(self.reports), sum(self._counts.values()), answered,
                                         dict(self._problems), self._exchanges, len(nodes), len(self._counts)))


def asks_for_row(bundle: bytes) -> bool:
    """Whether a bundle of secure-sum messages asks a node for a masked row, so that the question must be sent along.

    Raises Refused where the bundle is malformed.
    """
    return any(frame_class_and_session(message)[0] in (MaskedAsk, AskAll, SparseAsk) for message in decode_bundle(bundle))


def check_node_answer(one: Any, lead: tuple[int, ...], width: int, encoding: Any) -> None:
    """Raise Refused unless `one`, a node's answer, is a finite tensor of shape (*lead, width) and of the encoding's dtype.

    That is float64 where the encoding has no modulus, for gathered rows float32 too; else int64, with values in
    [0, 2 ** modulus_bits). `lead` is (clients,) where rows are gathered, else ().
    """
    bits = encoding.modulus_bits
    wanted = torch.float64 if bits is None else torch.int64
    fits = isinstance(one, Tensor) and one.dtype in (wanted, torch.float32 if lead and bits is None else wanted)
    if not fits or tuple(one.shape) != (*lead, width):
        raise Refused(f"it should be {(*lead, width)} numbers as {wanted}.")
    if not bool(one.isfinite().all()) or (bits is not None and bool(((one < 0) | (one >= 1 << bits)).any())):
        raise Refused("it holds numbers that are not finite, or beyond the modulus.")

