"""What a data set has answered, over all runs and servers, in a folder beside it: charged before an answer, refused when spent.

    rounds.jsonl    every round that was begun, and every question in it      ledger.jsonl    what private answers have cost
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtail.channel.base import clients_add_noise
from fedtail.deployment.policy import NodePolicy
from fedtail.privacy.events import NoSampling, Release, RoundEvent, Unit
from fedtail.privacy.ledger import BudgetSpent, Ledger, PrivacyBudget
from fedtail.secure.encoding import Refused

ROUNDS, LEDGER = "rounds.jsonl", "ledger.jsonl"
Held = tuple[str, int, str]      # a round that was held: its training, its number, and the digest of its contents


@dataclass(frozen=True)
class Charge:
    """What one question is charged: the `release` of its answer, the unit that its noise protects, and whether clients add it."""

    release: Release
    unit: Unit
    noisy: bool

    @classmethod
    def of(cls, question: Any, dim: int, unit: Unit) -> Charge:
        """The charge of `question` about a model of `dim` parameters, by a method with this unit of privacy."""
        return cls(question.release(dim), unit, clients_add_noise(question.mechanism))


class DataBudget:
    """The budget of one data set by a node's `policy`, stored in `folder`, which nodes of several servers may share."""

    def __init__(self, folder: Path, policy: NodePolicy):
        """Store where and by which policy; files are read when a round begins."""
        self.folder, self.policy = folder, policy
        self._read = 0                                          # bytes of rounds.jsonl that the counts below hold
        self._begun: dict[tuple[str, int], list[str]] = {}      # the openings of each round of a training
        self._asked: dict[Held, set[str]] = {}                  # the questions of each round that was held
        self._bare: set[Held] = set()                           # the rounds in which a sum had no noise

    def begin_round(self, training: bytes, round: int, opening: bytes) -> None:
        """Note that a round of a training begins, whose contents (cohort, model, seed) have the digest `opening`.

        The same contents once more change nothing. Raises Refused where the round was begun with other contents before, more
        often in this training than the policy's `repeats`.
        """
        with self._locked():
            before = self._begun.get((training.hex(), round), [])
            if opening.hex() in before:
                return
            again = sum(len(one) - 1 for (name, _), one in self._begun.items() if name == training.hex()) + 1
            if before and again > self.policy.repeats:
                raise Refused(f"round {round} of this training was held here before, and its policy allows {self.policy.repeats} "
                              "rounds that are begun again.")
            self._append({"training": training.hex(), "round": round, "opening": opening.hex()})

    def charge(self, training: bytes, round: int, opening: bytes, questions: Mapping[bytes, Charge]) -> None:
        """Charge the answers to `questions`, by their digests, before they are computed.

        Without noise, a question that was asked in this round before is free, because its answer is the same. With noise it is
        charged again: whoever still has the answer does not compute it, and who lost it draws new noise.

        Raises Refused, and charges nothing, where the policy does not allow so many questions, where the budget does not cover
        them, or where a sum has no noise that clients add and the policy has an epsilon.
        """
        with self._locked():
            held = training.hex(), round, opening.hex()
            asked = self._asked.get(held, set())
            new = {name: one for name, one in questions.items() if one.noisy or name.hex() not in asked}
            if len(asked | {name.hex() for name in new}) > self.policy.questions:
                raise Refused(f"more than {self.policy.questions} questions are asked in round {round}, which the policy of this "
                              "node does not allow.")
            self._charge_releases(list(new.values()), held)
            for name, one in new.items():
                self._append({"training": held[0], "round": round, "opening": held[2], "question": name.hex(),
                              "bare": not one.noisy})

    def spent_text(self) -> str:
        """What the data set has answered so far, in words."""
        with self._locked():
            begun = sum(map(len, self._begun.values()))
            text = f"{begun} rounds begun, {len(self._bare)} of them with sums without noise"
            if self.policy.rounds_without_noise is not None:
                return f"{text}, of {self.policy.rounds_without_noise} that the policy allows"
            if not (self.folder / LEDGER).is_file():
                return f"{text}; nothing of epsilon {self.policy.epsilon:g} is spent"
            return f"{text}; {self._ledger().guarantee()}, of epsilon {self.policy.epsilon:g}"

    def _charge_releases(self, charges: list[Charge], held: Held) -> None:
        """Charge releases of the round `held` to the ledger, or to the rounds without noise; Refused where that is too much."""
        limit = self.policy.rounds_without_noise
        if limit is not None:
            if held not in self._bare and any(not one.noisy for one in charges) and len(self._bare) >= limit:
                raise Refused(f"this data set has answered {len(self._bare)} rounds without noise, all that its policy allows.")
            return
        for one in charges:
            if not one.noisy:
                raise Refused(f"{one.release.what} would be released without noise that clients add, and the policy of this node "
                              "has an epsilon.")
        if charges:
            self._charge_ledger(charges)

    def _charge_ledger(self, charges: list[Charge]) -> None:
        """Charge releases with noise as a round of their own, without amplification by sampling; Refused where it is too much."""
        ledger, releases = self._ledger(charges[0].unit), tuple(one.release for one in charges)
        try:
            ledger.open(sum(map(len, self._asked.values())), RoundEvent(releases, NoSampling(), charges[0].unit), "a node")
            ledger.charge(releases)
            ledger.close()
        except (BudgetSpent, ValueError) as why:
            raise Refused(f"the budget of this data set, {self.policy.budget_text}, does not cover it: {why}.") from why

    def _ledger(self, unit: Unit = "client") -> Ledger:
        """The ledger of private answers, read from its file."""
        budget = PrivacyBudget(self.policy.epsilon, self.policy.delta, randomness="os", unit=unit)
        return Ledger(budget, self.folder / LEDGER)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Within the block this process alone uses the folder, which is created, and the counts hold all that its file does."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self.folder / "lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._read_new_lines()
            yield

    def _read_new_lines(self) -> None:
        """Add the lines that rounds.jsonl holds beyond those read to the counts; Refused where it is shorter or damaged."""
        path = self.folder / ROUNDS
        size = path.stat().st_size if path.is_file() else 0
        if size < self._read:
            raise Refused("the record of this data set's rounds has been cut; the operator of the node must look at it.")
        if size == self._read:
            return
        with open(path, "rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]                   # a line that a crash has cut was not answered
        if len(whole) < len(text):
            os.truncate(path, self._read + len(whole))
        try:
            for line in whole.splitlines():
                self._count(json.loads(line))
        except (ValueError, KeyError, TypeError) as why:
            raise Refused("the record of this data set's rounds is damaged; the operator of the node must look at it.") from why
        self._read += len(whole)

    def _count(self, entry: dict[str, Any]) -> None:
        """Add an entry of rounds.jsonl, the beginning of a round or a question, to the counts."""
        held = entry["training"], entry["round"], entry["opening"]
        if "question" not in entry:
            self._begun.setdefault(held[:2], []).append(held[2])
            return
        self._asked.setdefault(held, set()).add(entry["question"])
        if entry["bare"]:
            self._bare.add(held)

    def _append(self, entry: dict[str, Any]) -> None:
        """Append an entry to rounds.jsonl, on disk when this returns, and to the counts."""
        line = json.dumps(entry).encode() + b"\n"
        with os.fdopen(os.open(self.folder / ROUNDS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._count(entry)
        self._read += len(line)
