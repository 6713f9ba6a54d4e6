"""What a data set has answered, over all runs and servers, in a folder beside it: charged before an answer, refused when spent.

    rounds.jsonl    every round that was begun, and every question in it      ledger.jsonl    what private answers have cost

Each line of rounds.jsonl has the digest of the one before; the head is in a file beside it, and in the folder of each node.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedtail.channel.base import clients_add_noise
from fedtail.deployment.audit_log import ChainedFile, LogDamaged, damaged_text
from fedtail.deployment.policy import NodePolicy
from fedtail.escaping import one_line
from fedtail.privacy.events import NoSampling, Release, RoundEvent, Unit
from fedtail.privacy.ledger import BudgetSpent, Ledger, PrivacyBudget
from fedtail.privacy.ledger_file import LedgerFile, LedgerMark
from fedtail.questions import Train
from fedtail.secure.encoding import Refused
from fedtail.wire import pack

ROUNDS, LEDGER = "rounds.jsonl", "ledger.jsonl"
log = logging.getLogger("fedtail.node")
Held = tuple[str, int, str, int]      # a round: its training, its number, the digest of its contents, and how often it was over


@dataclass(frozen=True)
class Charge:
    """What one question is charged: the `release` of its answer, the unit that its noise protects, and whether clients add it.

    For training without noise, `sum` names the sum of the round that it is about (which model, and whether its step), and
    `weights` is a digest of all that decides who is in it by which weight.
    """

    release: Release
    unit: Unit
    noisy: bool
    sum: str = ""
    weights: str = ""

    @classmethod
    def of(cls, question: Any, dim: int, unit: Unit) -> Charge:
        """The charge of `question` about a model of `dim` parameters, by a method with this unit of privacy."""
        charge = cls(question.release(dim), unit, clients_add_noise(question.mechanism))
        if charge.noisy or not isinstance(question, Train):
            return charge
        weights = hashlib.sha256(pack((question.risk, question.dual, question.local))).hexdigest()
        return replace(charge, sum=f"{question.model} {'step' if question.marks_contributors else 'other'}", weights=weights)


class DataBudget:
    """The budget of one data set by a node's `policy`, stored in `folder`, which nodes of several servers may share.

    A round is held under one policy, that of its beginning. Where the operator has changed the policy since, nothing more is
    answered in that round, and the next one is held under the new policy: a process that stays needs no restart.
    """

    def __init__(self, folder: Path, policy: NodePolicy, witness: Path | None = None,
                 read_policy: Callable[[], NodePolicy] | None = None):
        """Store where and by which policy; files are read when a round begins.

        `read_policy` returns the policy as it is now, or raises ValueError; it is called for every round and every question.
        None: it stays as it is. `witness` is a file in the node's own folder with the head of the record: where that is not in
        the record any more, because the folder was lost, changed or is another one, nothing is answered.
        """
        self.folder, self.policy = folder, policy
        self._read_policy = read_policy or (lambda: policy)
        self._file = ChainedFile(folder / ROUNDS, witness)
        self._begun: dict[tuple[str, int], list[str]] = {}      # the openings of each round of a training
        self._policies: dict[tuple[str, int, str], str] = {}    # the digest of the policy that each of them began under
        self._over: dict[tuple[str, int, str], int] = {}        # how often each of them was held to its end
        self._asked: dict[Held, set[str]] = {}                  # the questions of each round that was held
        self._weights: dict[Held, dict[str, str]] = {}          # by which weights each sum of updates without noise was asked for
        self._uncovered: set[Held] = set()                      # the rounds with answers that are not on the ledger
        self._mark: list[Any] = []                              # size and digest of the ledger after the last charge

    def begin_round(self, training: bytes, round: int, opening: bytes) -> None:
        """Note that a round of a training begins, whose contents (cohort, model, seed) have the digest `opening`.

        From now on the policy is the one that the operator's file has. The same contents once more change nothing until the round
        is over. Raises Refused where there is no valid policy, and where the round was begun before, with other contents or to
        its end, more often in this training than the policy's `repeats`.
        """
        self.policy = self._policy_now()
        with self._locked():
            name, digest = training.hex(), opening.hex()
            before = self._begun.get((name, round), [])
            if before.count(digest) > self._over.get((name, round, digest), 0):
                return
            again = sum(len(one) - 1 for (whose, _), one in self._begun.items() if whose == name) + 1
            if before and again > self.policy.repeats:
                raise Refused(f"round {round} of this training was held here before, and its policy allows {self.policy.repeats} "
                              "rounds that are begun again.")
            self._append({"training": name, "round": round, "opening": digest, "policy": self.policy.digest})

    def end_round(self, training: bytes, round: int, opening: bytes) -> None:
        """Note that a round that was begun with these contents was held to its end: from now on it would be another one."""
        with self._locked():
            name, digest = training.hex(), opening.hex()
            if self._begun.get((name, round), []).count(digest) > self._over.get((name, round, digest), 0):
                self._append({"training": name, "round": round, "opening": digest, "over": True})

    def charge(self, training: bytes, round: int, opening: bytes, questions: Mapping[bytes, Charge]) -> None:
        """Charge the answers to `questions`, by their digests, before they are computed.

        Without noise, a question that was asked in this round before is free, because its answer is the same. With noise it is
        charged again: whoever still has the answer does not compute it, and who lost it draws new noise.

        Raises Refused, and charges nothing, where the policy does not allow so many questions, where the budget does not cover
        them, where a sum has no noise that clients add and the policy has an epsilon, or has none and is asked for by weights
        other than before in this round, and where the policy is not valid any more, or another one than the round began under.
        """
        now = self._policy_now().digest
        with self._locked():
            contents = training.hex(), round, opening.hex()
            if now != self._policies.get(contents, self.policy.digest):
                raise Refused(f"the policy of this node changed since round {round} began: it answers nothing more in that "
                              "round, and holds the next one under the new policy.")
            held: Held = (*contents, self._over.get(contents, 0))
            asked = self._asked.get(held, set())
            new = {name: one for name, one in questions.items() if one.noisy or name.hex() not in asked}
            if len(asked | {name.hex() for name in new}) > self.policy.questions:
                raise Refused(f"more than {self.policy.questions} questions are asked in round {round}, which the policy of this "
                              "node does not allow.")
            self._refuse_other_weights(held, new.values())
            if self.policy.epsilon is None and any(name.hex() in asked for name in new):
                raise Refused("an answer with noise was lost when this node was started again, and is drawn again in another "
                              "round only: its policy has no epsilon that the noise could be charged to.")
            mark = self._charge_releases(list(new.values()), held)
            for name, one in new.items():
                self._append({"training": held[0], "round": round, "opening": held[2], "question": name.hex(),
                              "what": one.release.what, "noise": one.noisy, "ledger": mark,
                              **({"sum": one.sum, "weights": one.weights} if one.sum else {})})

    @property
    def rounds_answered(self) -> int:
        """How many rounds have had an answer that is not on the ledger: those that count where a policy has no epsilon."""
        with self._locked():
            return len(self._uncovered)

    def spent_rounds(self) -> list[tuple[RoundEvent, int]]:
        """What the ledger of private answers holds, as pairs of a round and how often it was charged."""
        with self._locked():
            return list(self._ledger().rounds) if (self.folder / LEDGER).is_file() else []

    def spent_text(self) -> str:
        """What the data set has answered so far, in words."""
        with self._locked():
            text, limit = f"{sum(map(len, self._begun.values()))} rounds begun", self.policy.rounds_without_noise
            if limit is not None:
                return f"{text}, {len(self._uncovered)} of them answered, of {limit} that the policy allows"
            if self._uncovered:
                return f"{text}, {len(self._uncovered)} of them answered under a policy without an epsilon"
            if not (self.folder / LEDGER).is_file():
                return f"{text}; nothing of epsilon {self.policy.epsilon:g} is spent"
            return f"{text}; {self._ledger().guarantee()}, of epsilon {self.policy.epsilon:g}"

    def _policy_now(self) -> NodePolicy:
        """The policy as the operator's file has it; raises Refused, with the reason logged here, where that is none."""
        try:
            return self._read_policy()
        except ValueError as why:
            log.error("nothing is answered: %s", one_line(str(why)))
            raise Refused("the policy of this node is missing or not valid, and without one it answers nothing. Its own log says "
                          "more.") from why

    def _refuse_other_weights(self, held: Held, charges: Iterable[Charge]) -> None:
        """Raise Refused where a sum of updates without noise was asked for in the round `held` by other weights.

        A server has one dual in a round. The difference of two sums, whose thresholds have one client between them, is its row.
        """
        known = dict(self._weights.get(held, {}))
        if any(known.setdefault(one.sum, one.weights) != one.weights for one in charges if one.sum):
            raise Refused("updates are asked for by two rules of who contributes in one round, without noise: the difference of "
                          "the two sums could be one client's.")

    def _charge_releases(self, charges: list[Charge], held: Held) -> list[Any] | None:
        """Charge releases of the round `held`, and return size and digest of the ledger; Refused where that is too much.

        None is returned where the policy counts rounds, and has no ledger.
        """
        limit = self.policy.rounds_without_noise
        if limit is not None:
            if charges and held not in self._uncovered and len(self._uncovered) >= limit:
                raise Refused(f"this data set has answered {len(self._uncovered)} rounds, all that its policy allows.")
            return None
        if self._uncovered:
            raise Refused(f"this data set has answered {len(self._uncovered)} rounds under a policy without an epsilon, and no "
                          "epsilon can be kept any more.")
        for one in charges:
            if not one.noisy:
                raise Refused(f"{one.release.what} would be released without noise that clients add, and the policy of this node "
                              "has an epsilon.")
        return self._charge_ledger(charges) if charges else self._mark

    def _charge_ledger(self, charges: list[Charge]) -> list[Any]:
        """Charge releases with noise as a round of their own, without amplification by sampling; Refused where it is too much.

        Returns size and digest of the ledger, by which it is known again.
        """
        ledger, releases = self._ledger(charges[0].unit), tuple(one.release for one in charges)
        try:
            ledger.open(sum(map(len, self._asked.values())), RoundEvent(releases, NoSampling(), charges[0].unit), "a node")
            ledger.charge(releases)
            ledger.close()
        except (BudgetSpent, ValueError) as why:
            raise Refused(f"the budget of this data set, {self.policy.budget_text}, does not cover it: {why}.") from why
        mark = ledger.file_mark(safely=True)
        return [] if mark is None else [mark.size, mark.digest]

    def _ledger(self, unit: Unit = "client") -> Ledger:
        """The ledger of private answers, read from its file; LogDamaged where that does not hold what was charged before."""
        if self._mark:
            size, digest = self._mark
            if not LedgerFile(self.folder / LEDGER).matches_mark(LedgerMark(size, digest, 0)):
                raise LogDamaged(damaged_text(LEDGER))
        budget = PrivacyBudget(self.policy.epsilon, self.policy.delta, randomness="os", unit=unit)
        return Ledger(budget, self.folder / LEDGER)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Within the block this process alone uses the folder, which is created, and the counts hold all that its file does."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self.folder / "lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for entry in self._file.read_new():
                self._count(entry)
            yield

    def _count(self, entry: dict[str, Any]) -> None:
        """Add an entry of rounds.jsonl to the counts: the beginning of a round, its end, or a question."""
        contents = sys.intern(entry["training"]), entry["round"], sys.intern(entry["opening"])      # once in memory
        if "over" in entry:
            self._over[contents] = self._over.get(contents, 0) + 1
        elif "question" not in entry:
            self._begun.setdefault(contents[:2], []).append(contents[2])
            if "policy" in entry:                             # earlier versions did not note it
                self._policies[contents] = sys.intern(entry["policy"])
        else:
            held: Held = (*contents, self._over.get(contents, 0))
            self._asked.setdefault(held, set()).add(entry["question"])
            if "sum" in entry:
                self._weights.setdefault(held, {})[sys.intern(entry["sum"])] = entry["weights"]
            if entry["ledger"] is None:
                self._uncovered.add(held)
            else:
                self._mark = entry["ledger"]

    def _append(self, entry: dict[str, Any]) -> None:
        """Append an entry to rounds.jsonl, on disk when this returns, and to the counts."""
        self._file.append(entry)
        self._count(entry)
