"""Damaged, forged, repeated and misplaced messages against both sides of secure sums.

    python tests/fuzz_secure.py --cases 1000000 --seed 0      # make fuzz; a failure prints the seed of its session

Sessions run from begin to end. Before each message is delivered, its receiver is given many others: the same with bytes changed, cut
off, added or swapped; the same rewritten with a field changed and a right checksum; others of this session and of another; noise.
Each must be taken or raise `Refused`, and a refusal must leave the receiver as it was. In most sessions some forged messages are
delivered in earnest. Whatever happened, a sum that comes out is the sum of the survivors' rows.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import random
import time
from collections import Counter
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from fedtail.secure import (
    AllOrNothingClient,
    AllOrNothingServer,
    Client,
    Identity,
    Participant,
    Refused,
    Run,
    Server,
    Session,
    SparseSession,
)
from fedtail.secure.frames import (
    CHECKSUM,
    HEAD,
    KINDS,
    decode_bundle,
    decode_frame,
    encode_bundle,
    encode_frame,
    frame_class_and_session,
)
from fedtail.secure.messages import MaskedForAll

BITS, WIDTH = 23, 3


class Failure(AssertionError):
    """What must never happen, with the seed to see it again."""


# Messages that nobody should send


def damaged(rng: random.Random, message: bytes, others: list[bytes]) -> bytes:
    """Bytes changed without care: the checksum gives it away."""
    data, at = bytearray(message), rng.randrange(len(message))
    match rng.randrange(7):
        case 0:
            data[at] ^= 1 << rng.randrange(8)
        case 1:
            data[at] = rng.randrange(256)
        case 2:
            del data[at:]
        case 3:
            data[at:at] = rng.randbytes(rng.randrange(1, 40))
        case 4:
            del data[at:at + rng.randrange(1, 40)]
        case 5:
            other = rng.choice(others)
            data[at:] = other[rng.randrange(len(other)):]
        case 6:
            data = bytearray(rng.randbytes(rng.choice([0, 1, 40, 60, 300])))
    return bytes(data)


def reframed(body: bytes, head: bytes) -> bytes:
    """A body behind a head, with the checksum that fits."""
    return head + body + hashlib.sha256(head + body).digest()[:CHECKSUM]


def forged(rng: random.Random, message: bytes, others: list[bytes]) -> bytes:
    """With a right checksum: a body of changed bytes, a changed field, another kind, session or sender, or another message."""
    head, body = message[:HEAD], message[HEAD:-CHECKSUM]
    match rng.randrange(6):
        case 0:
            return reframed(damaged(rng, body or b"\0", [one[HEAD:-CHECKSUM] or b"\0" for one in others]), head)
        case 1:
            return reframed(body, head[:4] + bytes([rng.choice(list(KINDS))]) + head[5:])
        case 2:
            return rng.choice(others)
    kind, session = frame_class_and_session(message)
    value = decode_frame(kind, message, None, len(message))
    try:
        return encode_frame(session, twisted(rng, value))
    except (Refused, TypeError, AttributeError):      # it cannot even be written
        return reframed(rng.randbytes(len(body)), head)


def twisted(rng: random.Random, value: Any) -> Any:
    """The same record with one thing in it changed, past its own checks."""
    changed = object.__new__(type(value))
    for one in fields(value):
        object.__setattr__(changed, one.name, getattr(value, one.name))
    name = rng.choice(fields(value)).name
    object.__setattr__(changed, name, other(rng, getattr(value, name)))
    return changed


def other(rng: random.Random, value: Any) -> Any:
    if is_dataclass(value):
        return twisted(rng, value)
    if isinstance(value, int):
        return rng.choice([0, 1, 2, 3, value ^ 1, value + 1, max(value - 1, 0), 255]) & 255
    if isinstance(value, bytes):
        at = rng.randrange(len(value) + 1)
        same_size = value[:at] + bytes([value[at] ^ 1 << rng.randrange(8)]) + value[at + 1:] if at < len(value) else bytes(len(value))
        return rng.choice([same_size] * 4 + [bytes(len(value)), rng.randbytes(len(value))]) if len(value) == 32 else \
            rng.choice([same_size, same_size, bytes(len(value)), value[:at], value + b"\0", b""])
    return several(rng, list(value))


def several(rng: random.Random, values: list[Any]) -> tuple[Any, ...]:
    at = rng.randrange(len(values) + 1)
    match rng.randrange(5) if values else 4:
        case 0:
            del values[at:at + 1]
        case 1:
            values.insert(at, rng.choice(values))
        case 2:
            rng.shuffle(values)
        case 3:
            at = min(at, len(values) - 1)
            values[at] = other(rng, values[at])
        case 4:
            values.append(rng.randrange(9))
    return tuple(values)


# Sessions that get them


class Fuzzer:
    """One session with everything aimed at it; `counts` of what happened."""

    def __init__(self, seed: str, each: int, counts: Counter):
        self.rng, self.each, self.counts = random.Random(seed), each, counts
        self.keys = random.Random(seed + " keys").randbytes          # clients draw from it, so a session can be repeated
        self.seen: list[bytes] = [b"fts\1"]
        self.earnest = self.rng.choice([0.0, 0.02, 0.05, 0.15])      # how often a forged message takes the place of the right one
        self.changed: dict[int, np.ndarray] = {}                     # by how much a forged row differs from the one it replaces

    def deliver(self, machine: Any, take: Any, message: bytes, row_of: int | None = None) -> bytes | None:
        """Give a machine rubbish, then what it should get, or a forgery in its place. Returns its answer, None if refused."""
        self.seen = [*self.seen[-60:], message]
        for _ in range(self.each // 2):
            self.try_on(machine, take, damaged(self.rng, message, self.seen), may_be_taken=False)
            self.try_on(machine, take, forged(self.rng, message, self.seen), may_be_taken=True)
        if self.rng.random() < self.earnest:
            return self.in_earnest(machine, take, message, row_of)
        _, answer = self.attempt(take, machine, message)
        if self.rng.random() < 0.2:                                  # it comes again, and something from before comes late
            for late in (message, self.rng.choice(self.seen)):
                self.counts["cases"] += 1
                self.attempt(take, machine, late)
        return answer

    def try_on(self, machine: Any, take: Any, message: bytes, may_be_taken: bool) -> None:
        """On a copy, whose state is then compared."""
        if message in self.seen:
            return
        twin = twin_of(machine)
        before = state_of(twin)
        self.counts["cases"] += 1
        taken, _ = self.attempt(take, twin, message)
        self.counts["taken" if taken else "refused"] += 1
        if not taken and state_of(twin) != before:
            raise Failure("a refused message changed its receiver")
        if taken and not (may_be_taken and canonical(message)):
            raise Failure("a damaged message, or one with two ways to write it, was taken")

    def in_earnest(self, machine: Any, take: Any, message: bytes, row_of: int | None) -> bytes | None:
        """The first of a few forgeries that a copy takes, or the last."""
        for _ in range(30):
            wrong = forged(self.rng, message, self.seen)
            if wrong != message and self.attempt(take, twin_of(machine), wrong)[0]:
                break
        taken, answer = self.attempt(take, machine, wrong)
        self.counts["cases"] += 1
        self.counts["in earnest, taken" if taken else "in earnest, refused"] += 1
        if taken and row_of is not None:
            self.changed[row_of] = row_in(wrong) - row_in(message)
        return answer if taken else self.attempt(take, machine, message)[1]

    def attempt(self, take: Any, machine: Any, message: bytes) -> tuple[bool, bytes | None]:
        try:
            return True, take(machine, message)
        except Refused:
            return False, None

    def check(self, done: Any, rows: dict[int, np.ndarray]) -> None:
        expected = sum((rows[one] + self.changed.get(one, 0) for one in done.survivors), np.zeros(WIDTH, np.int64)) % 2**BITS
        self.counts["sums"] += 1
        if done.total.tolist() != expected.tolist():
            raise Failure(f"a wrong sum over {done.survivors}: {done.total.tolist()}, not {expected.tolist()}")


def twin_of(machine: Any) -> Any:
    """A copy that shares nothing that changes: client states are frozen, a server holds sets, dictionaries and a query."""
    twin = copy.copy(machine)
    for name, value in vars(machine).items():
        if isinstance(value, (dict, set, list)):
            setattr(twin, name, copy.copy(value))
        elif isinstance(value, np.ndarray):
            setattr(twin, name, value.copy())
    if getattr(machine, "_query", None) is not None:
        query = copy.copy(machine._query)
        query.total, query.alive = query.total.copy(), set(query.alive)
        query.signatures, query.shares = dict(query.signatures), dict(query.shares)
        twin._query = query
    if isinstance(machine, Participant):
        twin._clients = {key: copy.copy(one) for key, one in machine._clients.items()}
        twin._all_or_nothing = {key: copy.copy(one) for key, one in machine._all_or_nothing.items()}
    return twin


def state_of(machine: Any) -> Any:
    """What a refusal may not change, as something to compare."""
    if isinstance(machine, (Client, AllOrNothingClient)):
        return machine.state
    if isinstance(machine, Participant):
        return machine.save()
    kept = {name: value.tolist() if isinstance(value, np.ndarray) else copy.copy(value) for name, value in vars(machine).items()
            if name not in ("_query", "_key_digest")}
    query = getattr(machine, "_query", None)
    return kept, query and (query.total.tolist(), set(query.alive), dict(query.signatures), dict(query.shares))


def row_in(message: bytes) -> np.ndarray:
    """The masked row in a message, read here by hand."""
    kind, session = frame_class_and_session(message)
    opened = decode_frame(kind, message, session, len(message))
    data = opened.masked.row if isinstance(opened, MaskedForAll) else opened.row
    return np.array([int.from_bytes(data[3 * k:3 * k + 3], "little") for k in range(len(data) // 3)], np.int64)


def canonical(message: bytes) -> bool:
    """Whether reading and writing gives the same bytes."""
    kind, session = frame_class_and_session(message)
    return encode_frame(session, decode_frame(kind, message, session, len(message))) == message


def session_run(fuzzer: Fuzzer) -> None:
    """A session with two queries, signed or not, with every pair or few neighbours; clients may also vanish."""
    rng, count = fuzzer.rng, fuzzer.rng.choice([3, 4, 5, 6])
    signed = rng.random() < 0.3 and count < 6
    session = Session(b"fuzz", rng.randrange(3), tuple(range(count)), rng.randrange(count // 2 + 1, count + 1), 2, int(signed))
    if count == 6:
        session = SparseSession(b"fuzz", session.round, session.members, rng.choice([4, 5, 6]), 2, 0, *rng.choice([(2, 2), (4, 3), (4, 4)]))
    identities = known(count) if signed else {}
    clients = {one: Client(session, one, identity=identities.get(one), random=fuzzer.keys, security_bits=0) for one in session.members}
    server, gone = Server(session), {one for one in session.members if rng.random() < 0.05}

    def both(contents: dict[int, bytes], take: Any, rows: bool = False) -> None:
        for one, message in contents.items():
            answer = fuzzer.deliver(clients[one], take, message) if one not in gone else None
            if answer is not None:
                fuzzer.deliver(server, lambda machine, data, one=one: machine.receive(one, data), answer, one if rows else None)

    both(server.invite(), lambda client, data: client.keys() if data == encode_frame(session.id, session) else refuse())
    both(server.key_list(), lambda client, data: client.shares(data))
    for _ in range(2):
        rows = {one: np.array([rng.randrange(2**BITS) for _ in range(WIDTH)]) for one in session.members}
        fuzzer.changed = {}
        told = {one: b"told" if rng.random() > 0.03 else b"something else" for one in session.members}
        both(server.ask(WIDTH, BITS, b"told"),
             lambda client, data, rows=rows, told=told: client.masked_row(data, rows[client.state.me], told[client.state.me]), rows=True)
        if signed:
            both(server.confirm(), lambda client, data: client.confirm(data))
        both(server.unmask(), lambda client, data: client.unmask(data))
        fuzzer.check(server.total(), rows)


def all_or_nothing_run(fuzzer: Fuzzer) -> None:
    """All or nothing, two queries."""
    rng, count = fuzzer.rng, fuzzer.rng.choice([2, 3, 4])
    run = Run(b"fuzz", tuple(range(count)))
    server, clients = AllOrNothingServer(run), {one: AllOrNothingClient(run, one, repetitions=1, random=fuzzer.keys) for one in run.members}

    def up(one: int, message: bytes | None, row_of: int | None = None) -> None:
        if message is not None:
            fuzzer.deliver(server, lambda machine, data: machine.receive(one, data), message, row_of)

    for one in run.members:
        up(one, clients[one].keys())
    for one, message in server.key_list().items():
        fuzzer.deliver(clients[one], lambda client, data: client.store_key_list(data), message)
    for query in range(2):
        rows, fuzzer.changed = {one: np.array([rng.randrange(2**BITS) for _ in range(WIDTH)]) for one in run.members}, {}
        for one, message in server.ask(1, query, WIDTH, BITS).items():
            up(one, fuzzer.deliver(clients[one], lambda client, data, rows=rows: client.masked_row(data, rows[client.state.me]), message), one)
        fuzzer.check(server.total(), rows)


def participant_run(fuzzer: Fuzzer) -> None:
    """Bundles at a participant, and whole bundles of rubbish."""
    session = Session(b"fuzz", 1, (0, 1, 2), 2, 1)
    people = {one: Participant(one, b"fuzz", random=fuzzer.keys) for one in session.members}
    server, rows = Server(session), {one: np.arange(WIDTH) + one for one in session.members}
    fuzzer.earnest = 0.0

    def exchange(contents: dict[int, bytes]) -> None:
        for one, message in contents.items():
            answer = fuzzer.deliver(people[one], answered(rows[one]), message)
            rubbish(fuzzer, people[one], encode_bundle([message, message]), answered(rows[one], whole=True))
            for each in answer or ():
                server.receive(one, each)

    for step in (server.invite, server.key_list, lambda: server.ask(WIDTH, BITS), server.unmask):
        exchange(step())
    fuzzer.check(server.total(), rows)


def answered(row: np.ndarray, whole: bool = False) -> Any:
    def take(participant: Participant, data: bytes) -> Any:
        answer, refused = participant.answer(data if whole else encode_bundle([data]), lambda round, ask: (row, b""))
        if refused and not whole:
            raise refused[0]
        return decode_bundle(answer)
    return take


def rubbish(fuzzer: Fuzzer, participant: Participant, content: bytes, take: Any) -> None:
    for _ in range(fuzzer.each // 4):
        fuzzer.counts["cases"] += 1
        fuzzer.attempt(take, twin_of(participant), damaged(fuzzer.rng, content, fuzzer.seen))


def refuse() -> Any:
    raise Refused("another invitation")


def known(count: int) -> dict[int, Identity]:
    secrets = {one: bytes([one + 1]) * 32 for one in range(count)}
    pinned = {one: Identity(secret, {}).public_key for one, secret in secrets.items()}
    return {one: Identity(secret, pinned) for one, secret in secrets.items()}


def fuzz(cases: int, seed: int = 0, each: int = 12) -> Counter:
    """Run sessions until so many cases were tried; raises `Failure` with the seed of the session that failed."""
    counts: Counter = Counter()
    while counts["cases"] < cases:
        name = f"{seed}/{counts['sessions']}"
        fuzzer = Fuzzer(name, each, counts)
        run = fuzzer.rng.choice([session_run] * 4 + [all_or_nothing_run, participant_run])
        counts["sessions"] += 1
        try:
            run(fuzzer)
        except Refused:
            counts["ended by a refusal"] += 1
        except Exception as what:
            raise Failure(f"session {name!r} of {run.__name__}: {type(what).__name__}: {what}") from what
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    began = time.perf_counter()
    counts = fuzz(given.cases, given.seed)
    print(f"{', '.join(f'{number} {what}' for what, number in counts.items())}; {time.perf_counter() - began:.0f} s: "
          "nothing but refusals, and no wrong sum.")


if __name__ == "__main__":
    main()
