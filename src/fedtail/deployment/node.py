"""The part of a node that holds its own clients and computes."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedtail import aggregation, local, personal, privacy, quantiles, risk, speeds
from fedtail.base_part import Part, classes_sent_with
from fedtail.channel.base import clients_add_noise
from fedtail.channel.integer import FixedPoint, clipping
from fedtail.channel.plain import Plain
from fedtail.client_memory import ClientMemory
from fedtail.data.population import Population
from fedtail.deployment.agreement import Agreement, check_members, check_shares_of_noise, first_agreeing
from fedtail.deployment.audit_log import AuditLog
from fedtail.deployment.contributions import count_left_out, small_groups
from fedtail.deployment.data_budget import Charge, DataBudget
from fedtail.deployment.old_trainings import remove_old_trainings
from fedtail.deprecated import with_old_names
from fedtail.engine.local_fleet import LocalFleet
from fedtail.errors import FieldError
from fedtail.evaluation.dissimilarity import GradientMoments
from fedtail.evaluation.federated import PersonalMetrics
from fedtail.evaluation.inexactness import ClientInexactness
from fedtail.fleet import Broadcast
from fedtail.questions import Count, Evaluate, Statistic, Train
from fedtail.rows import Mark, Rows, RowsError, RowStore
from fedtail.runs.files import write_atomically
from fedtail.sampling import Cohort
from fedtail.secure.encoding import Refused
from fedtail.task import Task
from fedtail.wire import pack, types_by_name, unpack

if TYPE_CHECKING:
    from fedtail.deployment.consent import Consent

log = logging.getLogger("fedtail.node")


@dataclass(frozen=True)
class Open:
    """A round begins: the clients of this node that are sampled, and the broadcast for them."""

    cohort: Cohort
    broadcast: Broadcast
    training: bytes = b""               # whose memory it is about, the same when the server is started again
    lost: tuple[int, ...] = ()          # rounds before that were not held to their end
    members: Tensor | None = None       # (nodes, 2) int64, ascending: the nodes of the round, and how many clients each has in it


@dataclass(frozen=True)
class Ask:
    """Questions about the open round, and how their answers are encoded; `attempt` is 1 for a retry with fewer nodes, else 0."""

    round: int
    questions: tuple[Any, ...]
    encoding: Any
    attempt: int = 0


@dataclass(frozen=True)
class Close:
    """The round is over; `finished` is whether it was completed."""

    round: int
    finished: bool


@dataclass(frozen=True)
class Computed:
    """The saved state of a node. Without it, answers are computed again and what clients remember is lost."""

    opened: bytes
    memo: tuple[tuple[Any, Tensor], ...]
    given: tuple[tuple[bytes, tuple[Tensor, ...]], ...]
    kept: tuple[tuple[str, Tensor], ...]
    remembered: tuple[tuple[str, Tensor], ...]
    training: bytes = b""
    stores: tuple[tuple[str, Mark], ...] = ()      # row stores by name
    stamp: bytes = b""                             # of what the open round has written there


def built_in_parts() -> Iterator[type]:
    """The classes that every node accepts in messages: fedtail's messages, questions and parts, with those they declare.

    A class declares others in its attribute `sends`. A class may come more than once.
    """
    yield from (Open, Ask, Close, Cohort, Broadcast, Statistic, Train, Count, Evaluate, Plain, FixedPoint,
                *classes_sent_with(PersonalMetrics), *classes_sent_with(ClientInexactness), *classes_sent_with(GradientMoments))
    for room in (aggregation, local, personal, privacy, quantiles, risk, speeds):
        for name in room.__all__:
            part = getattr(room, name)
            if isinstance(part, type) and is_dataclass(part) and issubclass(part, Part):
                yield from classes_sent_with(part)


STATE, RECEIVED = "node.msgpack", "received.msgpack"      # in the folder of a training: the state, and the models received last
PARTS: tuple[type, ...] = tuple(dict.fromkeys(built_in_parts()))      # give a node your own parts as well


@with_old_names
class Node:
    """Answers questions for its own clients; a transport talks to the `Site` in front of it.

    `parts` are classes beside fedtail's own that questions may hold, a user's risk for example. In `folder`, which only this node
    reads, what clients remember is stored, for each training in a folder of its own, so that it is found again after a restart.
    The last `trainings` of them are kept, and older ones deleted when another begins. Without a folder, large memory is lost with
    the process. `test` holds examples of the same clients, matched by their keys, that models are evaluated on and never trained
    on. With `agreements` a round's questions, and its cohort, must be those of one of them; everything else is refused.
    """

    def __init__(self, population: Population, task: Task, parts: Iterable[type] = (), dtype: torch.dtype | None = None,
                 workers: int | None = None, folder: Path | str | None = None, test: Population | None = None,
                 trainings: int = 3, agreements: Sequence[Agreement] = (), budget: DataBudget | None = None,
                 consent: Consent | None = None, log: AuditLog | None = None, data_state: bytes = b""):
        """Check the task against `population`, this node's clients; no round is open.

        `parts` are classes beside fedtail's own that questions may hold; `dtype` is what clients compute in and `workers` the
        number of worker processes. In `folder` the clients' memory of the last `trainings` trainings is stored; `test` holds
        examples to evaluate on; `agreements` says what may be asked, everything where it is empty, and `budget` is charged for
        every answer, None: nothing is. `consent` is checked for every round, and what happens is written to `log`, if they are
        given. A round that is held again is another one where `data_state` differs, by which changed data are known: the
        difference of two answers would be what changed. Raises FieldError where `trainings` is less than 1.
        """
        if trainings < 1:
            raise FieldError("trainings", "at least 1", trainings, "The one that is open is always kept.")
        task.check(population)
        self.fleet = LocalFleet(population, task, dtype=dtype, workers=workers, test=test)
        self.types = types_by_name(dict.fromkeys((*PARTS, *(sent for part in parts for sent in classes_sent_with(part)))))
        self.folder, self.trainings = None if folder is None else Path(folder), trainings
        self.agreements, self.budget, self.consent, self.log = tuple(agreements), budget, consent, log
        self._data_state = data_state
        self._training, self._named = b"", set[str]()          # whose memory it is; files of rows that were saved last
        self._received = b""                                   # the round whose models were written last, as it was broadcast
        self._forget_round()

    def _forget_round(self) -> None:
        """Clear the open round: its broadcast, and the answers that were given in it."""
        self._opened = b""                                     # the round that is open, as it was broadcast
        self._broadcast: Broadcast | None = None
        self._cohort: Cohort | None = None
        self._members: Tensor | None = None                    # the nodes of the round, with their clients in it
        self._opening = b""                                    # the digest of its contents
        self._given: dict[bytes, tuple[Tensor, ...]] = {}      # what was answered in this round, by what was asked
        self._private: set[bytes] = set()                      # and which of it must not be drawn again
        self._summed: set[bytes] = set()                       # what has left under masks: noise is in one sum only
        self._left_out: dict[bytes, int] = {}                  # clients that are left out of an answer, because they are too few

    @property
    def round(self) -> int:
        """The number of the open round; -1 where none is open."""
        return -1 if self._broadcast is None else self._broadcast.round

    def receive_broadcast(self, message: bytes, number: int | None = None) -> None:
        """Receive the beginning or the end of a round: `message` is a serialised `Open` or `Close`; raises Refused for any other.

        `number` is that of this node in the run, None where the caller does not know it. The `Open` of the round that is open
        changes nothing when it comes again: answering anew would draw fresh noise, which could be averaged away. A `Close` of
        another round is ignored.
        """
        if message == self._opened:
            return
        received = self._unpack_message(message)
        if isinstance(received, Open):
            self._open_round(message, received, number)
            self._note("opened", safely=True, training=received.training.hex(), round=self.round, opening=self._opening.hex(),
                       clients=len(received.cohort.ids), cohort=total_clients(received.members))
        elif isinstance(received, Close):
            if received.round == self.round:
                self._close_round(received.finished)
        else:
            raise Refused(f"a node cannot be sent a {type(received).__name__}.")

    def _close_round(self, finished: bool) -> None:
        """Close the open round, if there is one; `finished` is whether it was held to its end: again, it would be another one."""
        if self.round >= 0:
            if finished and self.budget is not None:
                self.budget.end_round(self._training, self.round, self._opening)
            self._note("closed", round=self.round, finished=finished)
        self.fleet.close_round(finished)
        self._forget_round()

    def _note(self, what: str, safely: bool = False, **about: Any) -> None:
        """Write to the audit log, if there is one, that `what` happened; no data is among what is said `about` it."""
        if self.log is not None:
            self.log.write(what, safely, **about)

    def _open_round(self, message: bytes, received: Open, number: int | None = None) -> None:
        """Begin the round of `received`; `message` is the same, serialised, and `number` that of this node, if it is known.

        Noise is drawn on this machine, never from a seed of the server. Where it is of another training, that training's memory
        is loaded first. A round that is still open is closed: as finished if it is of the same training, the new round is later,
        and the server does not list it as lost.
        """
        if self.consent is not None:
            self.consent.check()
        if self.agreements:
            check_members(received.members, len(received.cohort.ids), number)
            own = self.fleet.population
            first_agreeing(self.agreements, lambda one: one.check_cohort(received.cohort, own.mass, own.key))
        opening = round_digest(received, self._data_state)
        if self.budget is not None:
            self.budget.begin_round(received.training, received.broadcast.round, opening)
        broadcast = replace(received.broadcast, noise_seed=None)      # noise from this machine, never from a seed of the server
        if received.training != self._training:
            self._switch_training(received.training)
        if self.round >= 0:                                    # nobody said how it ended: the server was started again
            self._close_round(self.round < broadcast.round and self.round not in received.lost)
        self._forget_round()
        self.fleet.open_round(received.cohort, broadcast)
        self._opened, self._broadcast, self._cohort, self._opening = message, broadcast, received.cohort, opening
        self._members = received.members

    def _switch_training(self, training: bytes) -> None:
        """Make `training` the current one: clients recall what its folder on this node holds, or nothing where there is none.

        An open round is closed as not finished.
        """
        place = self._state_file(training)
        self.restore(place.read_bytes() if place and place.is_file() else b"")
        if not self._training and place:
            self.fleet.reset_to_folder(place.parent)
        self._training = training

    def _state_file(self, training: bytes) -> Path | None:
        """The path of the file with the saved state of `training`, whether it exists or not.

        None where the node has no folder, or for b"", no training.
        """
        return self.folder / training.hex() / STATE if self.folder is not None and training else None

    def answer(self, ask: bytes) -> bytes:
        """The answer to a serialised `Ask`, serialised too: for each question the sum over this node's clients, or their rows.

        Rows are gathered where the question asks for that. Raises Refused where the message is malformed or about another round.
        """
        sums = pack(self._encoded_sums(ask))
        assert self._broadcast is not None
        if self.log is not None:
            context = context_digest(self._broadcast, self._members, ask)
            self._note("answered", training=self._training.hex(), round=self.round, context=context.hex(), masked=False)
        return sums

    def integer_row(self, ask: bytes, modulus_bits: int, attempt: int = 0,
                    summed: tuple[Iterable[int], int] | None = None) -> tuple[Any, bytes]:
        """The pair (row, context digest): the sums of all questions of a serialised `Ask`, joined into one NumPy vector.

        They are integers modulo 2 ** modulus_bits, the last of them how many clients are not in the sums though they were to be,
        because they failed or are too few, and the context digest is a hash of the broadcast and the question. `attempt` is the
        number of the secure sum, 0 for a first one and 1 for a retry. `summed` has the nodes that are asked and how few of them
        the sum may be over; None: it is not known, and no question may rely on other nodes' noise. Raises Refused where the
        question is of another attempt (asked again as it was it would get the same noise, and the two sums would differ by the
        row that is missing), is encoded for another modulus, gathers rows, is about another round, is a retry of sums without
        noise, may be summed with too few shares of noise, or has noise and left in another sum already.
        """
        asked = self._read_ask(ask)
        if asked.attempt != attempt:
            raise Refused(f"the question is of attempt {asked.attempt}, and the sum of attempt {attempt}.")
        if asked.encoding.modulus_bits != modulus_bits or any(one.gather for one in asked.questions):
            raise Refused("masked are sums of integers, modulo what they are encoded for.")
        if asked.attempt and not may_retry_sum(asked.questions):
            raise Refused("a retry asks for sums without noise: with a row that comes late, the two sums differ by that row.")
        if self.agreements:
            check_shares_of_noise(asked.questions, self._members, summed)
        noisy = {question_digest(one, asked) for one in asked.questions if clients_add_noise(one.mechanism)}
        self._refuse_second_sum(noisy)
        sums = self._encoded_sums(ask)
        self._summed |= noisy
        assert self._broadcast is not None
        context = context_digest(self._broadcast, self._members, ask)
        self._note("answered", training=self._training.hex(), round=self.round, context=context.hex(), masked=True)
        left_out = sum(self._left_out.get(question_digest(one, asked), 0) for one in asked.questions)
        silent = self._count_silent_clients(asked.questions) + left_out      # fewer than minimum_contributors may be left
        return np.concatenate([*(one.numpy() for one in sums), np.array([silent], np.int64)]), context

    def _refuse_second_sum(self, noisy: set[bytes]) -> None:
        """Raise Refused where one of the questions `noisy`, by digest, has had this node's row in a sum of this round.

        Clients add noise to them. With the same noise in two sums, over other nodes the second time, the difference is the row of
        a node that is missing with that node's own shares of the noise, and no more.
        """
        if noisy & self._summed:
            raise Refused("a sum with noise is asked for that has this node's row already: with the same noise in a second sum, "
                          "over other nodes, the difference would be a row with one node's noise.")

    def _count_silent_clients(self, questions: Iterable[Any]) -> int:
        """How many of this node's clients answered `questions` with zeros although they were to contribute to their sums.

        It is told as an entry of the masked row: of one node it would be an answer about its clients without masks. Questions
        with a private mechanism are left out: their sums rely on no number of contributors, and reveal none.
        """
        return self.fleet.count_silent_clients([one for one in questions if not one.mechanism.private])

    def _encoded_sums(self, ask: bytes) -> tuple[Tensor, ...]:
        """The encoded sums, (width,), or gathered rows, (clients, width), of a serialised `Ask`: one tensor for each question.

        They are stored, each under its own digest: a question that comes again in a round gets the same answer, also under
        another number or beside other questions, because fresh noise could be averaged away. Raises Refused where the message is
        malformed or about another round.
        """
        asked = self._read_ask(ask)
        names = [question_digest(one, asked) for one in asked.questions]
        new = {name: one for name, one in zip(names, asked.questions, strict=True) if name not in self._given}
        self._charge_budget(new, asked.encoding.clients)
        encoding = clipping(asked.encoding) if self.agreements else asked.encoding      # an error would tell of a row beyond it
        asking = tuple(map(self._without_small_groups, new.values()))
        for name, sums in zip(new, self.fleet.collect(asking, encoding), strict=True):
            self._left_out[name] = self._count_left_out(new[name]) or 0
            self._given[name] = (torch.zeros_like(sums) if self._left_out[name] and not new[name].by_group else sums,)
            self._private |= {name} if new[name].mechanism.private else set()
        return tuple(self._given[name][0] for name in names)

    def _charge_budget(self, questions: dict[bytes, Any], cohort_size: int) -> None:
        """Charge the data set's budget, if there is one, for answers to `questions`, by digest, of a cohort of `cohort_size`.

        Raises Refused where the policy of the node does not allow the cohort or the questions, or the budget does not cover them.
        """
        if self.budget is None:
            return
        assert self._broadcast is not None
        least, dim = self.budget.policy.smallest_cohort, self._broadcast.params.shape[-1]
        if cohort_size < least:
            raise Refused(f"the round has {cohort_size} clients, and this node's policy takes part in those of {least} or more.")
        here, least = self._clients_here, self.budget.policy.smallest_tail
        if here < least and not all(clients_add_noise(one.mechanism) for one in questions.values()):
            raise Refused(f"{here} clients of this node are in the round, and its policy has {least} or more of them in sums "
                          "without noise.")
        unit = self.agreements[0].method.unit if self.agreements else "client"
        charges = {name: Charge.of(one, dim, unit) for name, one in questions.items()}
        self.budget.charge(self._training, self._broadcast.round, self._opening, charges)
        if charges:
            self._note("charged", safely=True, round=self.round, noise=all(one.noisy for one in charges.values()),
                       questions={name.hex(): one.release.what for name, one in charges.items()})

    @property
    def _clients_here(self) -> int:
        """How many clients of this node are in the cohort of the open round; 0 where none is open."""
        return 0 if self._cohort is None else len(self._cohort.ids)

    def _count_left_out(self, question: Any) -> int:
        """How many of this node's clients are to be in the sum of `question`, and are too few for its policy: 0 for none."""
        assert self._cohort is not None
        least = 1 if self.budget is None else self.budget.policy.smallest_tail
        return count_left_out(question, self.fleet, self._cohort, least, self.round)

    def _without_small_groups(self, question: Any) -> Any:
        """A copy of `question` to which clients answer zeros whose group is too small here for the policy; mostly itself."""
        assert self._cohort is not None
        least = 1 if self.budget is None else self.budget.policy.smallest_tail
        small = small_groups(question, self.fleet, self._cohort, least)
        return replace(question, left_out_groups=(*question.left_out_groups, *small)) if small else question

    def _read_ask(self, ask: bytes) -> Ask:
        """The `Ask` that the bytes `ask` hold.

        Raises Refused where they are malformed, hold something else, or ask about another round than the open one.
        """
        asked = self._unpack_message(ask)
        if not isinstance(asked, Ask):
            raise Refused(f"a node cannot be asked a {type(asked).__name__}.")
        if asked.round != self.round:
            raise Refused(f"round {asked.round} is asked about, but round {self.round} is open (-1: none).")
        if self.agreements:
            assert self._cohort is not None
            cohort, total = self._cohort, total_clients(self._members)
            first_agreeing(self.agreements, lambda one: one.check_ask(asked.questions, asked.encoding, cohort, total))
        return asked

    def _unpack_message(self, message: bytes) -> Any:
        """The `Open`, `Ask` or `Close` that the bytes `message` hold, built from classes that this node knows.

        Raises Refused where they are malformed or name another class.
        """
        try:
            return unpack(message, self.types)
        except (ValueError, TypeError, KeyError) as why:
            raise Refused(f"a message could not be read: {why}") from why      # which is about the message

    def save(self) -> bytes:
        """The state as bytes, for `restore` in another process; also written to the training's folder where the node has one.

        Of the answers in the open round only private ones are in it, because others can be computed again. Raises RowsError where
        clients remember more than fits into a message and the node has no folder.
        """
        memo, remembered = self.fleet.round_results()
        given = tuple((name, sums) for name, sums in self._given.items() if name in self._private)
        kept, place = self.fleet.memory().kept, self._state_file(self._training)
        stores = {name: rows.mark for name, rows in kept.items() if isinstance(rows, Rows)}
        if stores and place is None:
            raise RowsError(f"what clients of this node remember ({', '.join(stores)}) is too large to be saved elsewhere. Give "
                            "the node a folder for it: Node(..., folder=...).")
        small = tuple((name, rows) for name, rows in kept.items() if isinstance(rows, Tensor))
        saved = pack(Computed(self._opened, tuple(memo.items()), given, small, tuple(remembered.items()), self._training,
                              tuple(stores.items()), self.fleet.rows_stamp))
        if place is not None and (kept or remembered or place.parent.is_dir()):
            self._write_state(place, saved, {mark.file for mark in stores.values()})
        return saved

    def keep_memory(self) -> None:
        """Write what clients remember to the training's folder, as `save` does; nothing where they remember nothing."""
        if self.fleet.memory().kept or self.fleet.round_results()[1]:
            self.save()

    def _write_state(self, place: Path, saved: bytes, named: set[str]) -> None:
        """Write the state `saved` to the file `place`, as the only writer of the training's folder, which is created.

        The models that the open round broadcast are written beside it, once a round, for predictions on this node. When a
        training is written for the first time, old ones are deleted. `named` are the files of rows that the state refers to:
        between rounds, all other such files are deleted, except those of the state before.
        """
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not place.exists():                                 # a training begins
            remove_old_trainings(place.parent.parent, self.trainings, place.parent)
        self.fleet.lock_folder()                               # of which one node is the writer
        write_atomically(place, saved)
        if self._broadcast is not None and self._opened != self._received:
            write_atomically(place.with_name(RECEIVED), pack(self._broadcast.params))
            self._received = self._opened
        if not self.fleet.rows_stamp:
            self.fleet.remove_unused_files(named | self._named)      # the state before may be all that is left after a crash
            self._named = named

    def restore(self, saved: bytes) -> None:
        """Replace the state by one that `save` returned; b"" begins without any memory. An open round is closed as not finished.

        The round that was open when it was saved is opened again. Takes the writer's lock of the training's folder, if that
        exists.
        """
        self.fleet.close_round(False)
        self._forget_round()
        self._training, self._named = b"", set()
        if not saved:
            self.fleet.restore_memory(ClientMemory(self.fleet.population.key, {}))
            return
        was: Computed = unpack(saved, {**self.types, **types_by_name([Computed])})
        self._training, kept, place = was.training, dict[str, Tensor | Rows](was.kept), self._state_file(was.training)
        if place is not None:
            self.fleet.reset_to_folder(place.parent)
            if place.parent.is_dir():
                self.fleet.lock_folder()
            kept |= {name: RowStore.open(place.parent, Mark(*mark)).rows for name, mark in was.stores}
        self.fleet.restore_memory(ClientMemory(self.fleet.population.key, kept))
        if was.opened:
            self._open_round(was.opened, self._unpack_message(was.opened))
            self.fleet.restore_round_results(dict(was.memo), dict(was.remembered), was.stamp)
        self._given = dict(was.given)
        self._private, self._summed = set(self._given), set(self._given)


def round_digest(received: Open, data_state: bytes) -> bytes:
    """SHA-256 (32 bytes) of what a round is held with: its number, seed, models and cohort, and the state of the data.

    Which rounds were lost before is not in it.
    """
    broadcast = received.broadcast
    held = pack((broadcast.round, broadcast.seed, broadcast.params, received.cohort, received.members))
    return hashlib.sha256(held + data_state).digest()


def question_digest(question: Any, asked: Ask) -> bytes:
    """SHA-256 (32 bytes) of a question of `asked` without its number, with the encoding and the attempt of `asked`."""
    return hashlib.sha256(pack((replace(question, number=0), asked.encoding, asked.attempt))).digest()


def may_retry_sum(questions: Iterable[Any]) -> bool:
    """Whether an all-or-nothing sum of these questions may be retried over fewer nodes: only if clients add noise to every one.

    Without fresh noise, a row that comes late would be revealed as the difference of the two sums.
    """
    return all(clients_add_noise(one.mechanism) for one in questions)


def context_digest(broadcast: Broadcast, members: Tensor | None, ask: bytes) -> bytes:
    """SHA-256 (32 bytes) of the round, seed and model of a broadcast, of the serialised question `ask`, and of the cohort.

    `members` has the nodes of the round and how many clients each has in it. Masks are bound to the digest, so they do not cancel
    where the server sends nodes different models, questions or cohorts.
    """
    return hashlib.sha256(pack((broadcast.round, broadcast.seed, broadcast.params, members)) + ask).digest()


def total_clients(members: Tensor | None) -> int:
    """How many clients are in a round whose nodes and their clients are `members`; 0 where they are not known."""
    return 0 if members is None else int(members[:, 1].sum())
