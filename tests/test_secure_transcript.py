"""Every byte of a session, derived a second time straight from the definition.

Nothing of fedtail is used on this side: X25519 is a ladder over integers, HKDF is two calls of HMAC, masks are blocks of AES, the
polynomials are sums of powers, frames are put together by hand. Only AES and ChaCha20-Poly1305 themselves come from a library.
"""

import hashlib
import hmac
import struct

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fedtail.secure import AllOrNothingClient, AllOrNothingServer, Client, Run, Server, Session, SparseSession

NAME, ROUND, MEMBERS, THRESHOLD, QUERIES = b"known answers", 6, (3, 7, 8, 2**40), 3, 2
WIDTH, CONTEXT = 5, b"round 6, question 2, model 00ff"
ROWS = {3: [1, -2, 3, 2**40, 0], 7: [10, 20, -30, 40, 5], 8: [0, 0, 0, 0, 0], 2**40: [7, 7, 7, 7, -2**61]}


# The definition


def drawn(who):
    """Bytes that a client draws: SHA-256 of its name and a counter, cut to size; a block or more a draw."""
    count = 0

    def draw(size):
        nonlocal count
        count += 1
        return b"".join(hashlib.sha256(b"%d/%d/%d" % (who, count, part)).digest() for part in range(-(-size // 32)))[:size]

    return draw


def ladder(secret, point):
    p, k = 2**255 - 19, int.from_bytes(secret, "little") & ((1 << 254) - 8) | 1 << 254
    x1 = int.from_bytes(point, "little") & ((1 << 255) - 1)
    a, b, c, d = 1, 0, x1, 1
    for bit in reversed(range(255)):
        swap = k >> bit & 1
        if swap:
            a, b, c, d = c, d, a, b
        e, f, g, h = a + b, a - b, c + d, c - d
        gf, he = g * f, h * e
        a, b, c, d = e * e * f * f % p, (e * e - f * f) * (e * e + 121665 * (e * e - f * f)) % p, (he + gf) ** 2 % p, x1 * (he - gf) ** 2 % p
        if swap:
            a, b, c, d = c, d, a, b
    return (a * pow(b, -1, p) % p).to_bytes(32, "little")


def public(secret):
    return ladder(secret, (9).to_bytes(32, "little"))


def hashed(label, *parts):
    return hashlib.sha256(b"".join(struct.pack(">Q", len(part)) + part for part in (label.encode(), *parts))).digest()


def hkdf(secret, salt, info):
    return hmac.digest(hmac.digest(salt, secret, "sha256"), info + b"\1", "sha256")


def u(size, *numbers):
    return b"".join(number.to_bytes(size, "big") for number in numbers)


def names(some):
    return u(4, len(some)) + u(8, *some)


def blob(data):
    return u(4, len(data)) + data


def frame(kind, session, body, version=1):
    whole = b"fts" + bytes([version, kind]) + session + body
    return whole + hashlib.sha256(whole).digest()[:16]


def mask(key, width, bits):
    """Blocks of AES over a counter from zero, as little-endian words of 32 or 64 bits."""
    size = 4 if bits <= 32 else 8
    blocks = u(16, *range(-(-width * size // 16)))
    stream = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(blocks)
    return [int.from_bytes(stream[size * k:size * (k + 1)], "little") for k in range(width)]


def label(purpose, round, query, attempt, *who):
    return f"fedtail secure 1: {purpose}".encode() + u(8, round, query, attempt, *who)


def masked(row, me, members, agreed, told, place, bits, seed=None):
    """The row plus the masks with those of larger names, minus those with smaller ones, plus the one of its own seed."""
    entries = list(row)
    for other in members:
        if other != me:
            key = hkdf(agreed(other), told, label("mask of a pair", *place, min(me, other), max(me, other)))
            sign = 1 if me < other else -1
            entries = [x + sign * m for x, m in zip(entries, mask(key, len(row), bits), strict=True)]
    if seed is not None:
        own = mask(hkdf(seed, told, label("mask of one", *place, me)), len(row), bits)
        entries = [x + m for x, m in zip(entries, own, strict=True)]
    return b"".join((x % 2**bits).to_bytes(-(-bits // 8), "little") for x in entries)


def polynomial(coefficients, secret, x):
    terms = [int.from_bytes(secret, "big"), *coefficients]
    return sum(term * x**power for power, term in enumerate(terms)) % (2**264 - 275)


class Definition:
    """Everything a session says when each client draws as above, in the order: sealing key; mask key and seed of each query;
    then for each query the coefficients of the seed's polynomial and of the mask key's, the highest power first."""

    def __init__(self):
        body = blob(NAME) + u(8, ROUND) + names(MEMBERS) + u(4, THRESHOLD) + u(2, QUERIES) + u(1, 0)
        self.session = hashed("fedtail secure: session", b"\1", body)
        self.invitation = frame(1, self.session, body)
        self.draws = {one: drawn(one) for one in MEMBERS}
        self.sealing = {one: draw(32) for one, draw in self.draws.items()}
        self.secrets = {one: [(draw(32), draw(32)) for _ in range(QUERIES)] for one, draw in self.draws.items()}
        self.keys = {one: self.keys_of(one) for one in MEMBERS}
        listed = u(4, len(MEMBERS)) + b"".join(self.keys[one] for one in MEMBERS)
        self.key_list = frame(3, self.session, listed)
        self.heard = hashed("fedtail secure: list of keys", self.session, listed)
        self.shares = {one: self.shares_of(one) for one in MEMBERS}      # [one][query][other]: 66 bytes

    def keys_of(self, one):
        committed = [hashed("fedtail secure: seed", self.session, u(8, one), u(2, query), seed) for query, (_, seed) in enumerate(self.secrets[one])]
        publics = [public(secret) for secret, _ in self.secrets[one]]
        return u(8, one) + public(self.sealing[one]) + u(4, QUERIES) + b"".join(publics) + u(4, QUERIES) + b"".join(committed) + blob(b"")

    def shares_of(self, one):
        shares = []
        for secret, seed in self.secrets[one]:
            two = []
            for value in (seed, secret):
                coefficients = [int.from_bytes(self.draws[one](33), "big") for _ in range(THRESHOLD - 1)][::-1]
                two.append([polynomial(coefficients, value, x).to_bytes(33, "big") for x in range(1, len(MEMBERS) + 1)])
            shares.append({other: a + b for other, a, b in zip(MEMBERS, *two, strict=True)})
        return shares

    def box(self, sender, to, query):
        agreed = ladder(self.sealing[sender], public(self.sealing[to]))
        key = hkdf(agreed, self.heard, b"fedtail secure 1: sealed shares" + u(8, sender, to))
        return ChaCha20Poly1305(key).encrypt(u(12, query), self.shares[sender][query][to], self.heard)

    def sharing(self, one):
        boxes = b"".join(self.box(one, to, query) for to in MEMBERS if to != one for query in range(QUERIES))
        return frame(4, self.session, u(8, one) + self.heard + blob(boxes))

    def ask(self, query, bits):
        return u(2, query) + names(MEMBERS) + u(4, WIDTH) + u(1, bits)

    def told(self, query, bits):
        said = hashed("fedtail secure: context", CONTEXT)
        body = self.session + self.heard + names(MEMBERS) + u(8, ROUND) + u(2, query, 0) + u(4, WIDTH) + u(1, bits) + said
        return hashed("fedtail secure: told", b"\1", body)

    def row(self, one, query, bits):
        secret, seed = self.secrets[one][query]
        told = self.told(query, bits)
        row = masked(ROWS[one], one, MEMBERS, lambda other: ladder(secret, public(self.secrets[other][query][0])), told, (ROUND, query, 0), bits, seed)
        return frame(6, self.session, u(8, one) + u(2, query) + told + blob(row))

    def lists(self, query, alive):
        return u(2, query) + names(alive) + names([one for one in MEMBERS if one not in alive])

    def request(self, one, query, alive):
        boxes = b"".join(self.box(sender, one, query) for sender in MEMBERS if sender != one)
        return frame(9, self.session, u(8, one) + self.lists(query, alive) + blob(boxes) + u(4, 0))

    def answer(self, one, query, bits, alive):
        heard = hashed("fedtail secure: survivors", self.told(query, bits), self.lists(query, alive))
        shares = b"".join(self.shares[other][query][one][:33] if other in alive else self.shares[other][query][one][33:] for other in MEMBERS)
        return frame(10, self.session, u(8, one) + u(2, query) + heard + blob(shares))


# The library against it


def test_every_byte_of_a_session():
    """Two queries, modulo 2^62 with everybody and modulo 2^29 without one of the clients."""
    definition, transcript = Definition(), hashlib.sha256()
    session = Session(NAME, ROUND, MEMBERS, THRESHOLD, QUERIES)
    server, clients = Server(session), {one: Client(session, one, random=drawn(one)) for one in MEMBERS}

    def same(said, defined):
        assert said == defined
        transcript.update(said)
        return said

    for one, message in server.invite().items():
        same(message, definition.invitation)
        server.receive(one, same(clients[one].keys(), frame(2, session.id, definition.keys[one])))
    for one, message in server.key_list().items():
        server.receive(one, same(clients[one].shares(same(message, definition.key_list)), definition.sharing(one)))
    for query, (bits, alive) in enumerate([(62, MEMBERS), (29, (3, 8, 2**40))]):
        for one, message in server.ask(WIDTH, bits, CONTEXT).items():
            same(message, frame(5, session.id, definition.ask(query, bits)))
            row = same(clients[one].masked_row(message, ROWS[one], CONTEXT), definition.row(one, query, bits))
            if one in alive:
                server.receive(one, row)
        for one, message in server.unmask().items():
            given = clients[one].unmask(same(message, definition.request(one, query, alive)))
            server.receive(one, same(given, definition.answer(one, query, bits, alive)))
        expected = [sum(ROWS[one][place] for one in alive) % 2**bits for place in range(WIDTH)]
        assert server.total().total.tolist() == expected
    # Version 1 of the protocol, for good: other bytes need another version.
    assert transcript.hexdigest() == "21189d83b67e8581aaa85c25080e791d0d27f8e98db65a6d2b583d1450610244"


def test_every_byte_of_a_run_without_shares():
    run, draws = Run(NAME, MEMBERS), {one: drawn(one) for one in MEMBERS}
    secrets = {one: draw(32) for one, draw in draws.items()}
    body = blob(NAME) + names(MEMBERS) + u(1, 0)
    digest = hashed("fedtail secure: run", b"\1", body)
    server, clients = AllOrNothingServer(run), {one: AllOrNothingClient(run, one, repetitions=1, random=drawn(one)) for one in MEMBERS}
    for one, message in server.invite().items():
        assert message == frame(11, digest, body)
        assert clients[one].keys() == frame(12, digest, u(8, one) + public(secrets[one]) + blob(b""))
        server.receive(one, clients[one].keys())
    listed = u(4, len(MEMBERS)) + b"".join(u(8, one) + public(secrets[one]) + blob(b"") for one in MEMBERS)
    for one, message in server.key_list().items():
        assert message == frame(13, digest, listed)
        clients[one].store_key_list(message)
    heard, said = hashed("fedtail secure: list of keys", digest, listed), hashed("fedtail secure: context", CONTEXT)
    for attempt, members in enumerate((MEMBERS, MEMBERS[:3])):
        asked = server.retry(CONTEXT) if attempt else server.ask(ROUND, 1, WIDTH, 33, CONTEXT)
        ask = u(2, 1) + names(members) + u(4, WIDTH) + u(1, 33)
        told = hashed("fedtail secure: told", b"\1",
                      digest + heard + names(members) + u(8, ROUND) + u(2, 1, attempt) + u(4, WIDTH) + u(1, 33) + said)
        for one, message in asked.items():
            assert message == frame(14, digest, u(8, ROUND) + u(2, attempt) + ask)
            row = masked(ROWS[one], one, members, lambda other, one=one: ladder(secrets[one], public(secrets[other])), told, (ROUND, 1, attempt), 33)
            sent = clients[one].masked_row(message, np.array(ROWS[one]), CONTEXT)
            assert sent == frame(15, digest, u(8, ROUND) + u(2, attempt) + u(8, one) + u(2, 1) + told + blob(row))
            if attempt or one != MEMBERS[3]:
                server.receive(one, sent)
    assert server.total().total.tolist() == [sum(ROWS[one][place] for one in MEMBERS[:3]) % 2**33 for place in range(WIDTH)]


class SparseDefinition(Definition):
    """A session in which each client has few neighbours: who they are, and what differs from one in which every pair shares a mask."""

    names, neighbours, needed, threshold = (3, 7, 8, 20, 21, 2**40), 4, 3, 5

    def __init__(self):
        body = blob(NAME) + u(8, ROUND) + names(self.names) + u(4, self.threshold) + u(2, 1) + u(1, 0) + u(2, self.neighbours, self.needed)
        self.session = hashed("fedtail secure: session", b"\2", body)
        self.invitation = frame(16, self.session, body, version=2)
        self.draws = {one: drawn(one) for one in self.names}
        self.sealing = {one: draw(32) for one, draw in self.draws.items()}
        self.secrets = {one: [(draw(32), draw(32))] for one, draw in self.draws.items()}
        self.keys = {one: self.keys_of(one) for one in self.names}
        self.heard = hashed("fedtail secure: list of keys", self.session, u(4, len(self.names)) + b"".join(self.keys.values()))
        self.near = self.graph()
        self.shares = {one: self.shares_of(one) for one in self.names}

    def keys_of(self, one):
        (secret, seed), = self.secrets[one]
        committed = hashed("fedtail secure: seed", self.session, u(8, one), u(2, 0), seed)
        return u(8, one) + public(self.sealing[one]) + u(4, 1) + public(secret) + u(4, 1) + committed + blob(b"")

    def graph(self):
        """For each client its neighbours: two before it on the circle, the farthest first, and two behind it."""
        words = mask(hashed("fedtail secure: graph", self.session, self.heard), 2 * len(self.names), 64)
        circle = [one for _, one in sorted(zip(zip(words[:6], words[6:], strict=True), self.names, strict=True))]
        return {one: [circle[(place + step) % 6] for step in (-2, -1, 1, 2)] for place, one in enumerate(circle)}

    def shares_of(self, one):
        (secret, seed), = self.secrets[one]
        near, two = sorted(self.near[one]), []
        for value in (seed, secret):
            coefficients = [int.from_bytes(self.draws[one](33), "big") for _ in range(self.needed - 1)][::-1]
            two.append([polynomial(coefficients, value, 1 + self.near[one].index(other)).to_bytes(33, "big") for other in near])
        return [{other: a + b for other, a, b in zip(near, *two, strict=True)}]

    def listed(self, one):
        return frame(17, self.session, self.received(one), version=2)

    def received(self, one):
        return self.heard + u(4, 4) + b"".join(blob(self.keys[other]) for other in sorted(self.near[one]))

    def sharing(self, one):
        boxes = b"".join(self.box(one, to, 0) for to in sorted(self.near[one]))
        return frame(4, self.session, u(8, one) + hashed("fedtail secure: keys of neighbours", self.session, self.keys[one], self.received(one)) + blob(boxes))

    def told(self, bits):
        said = hashed("fedtail secure: context", CONTEXT)
        return hashed("fedtail secure: told", b"\1", self.session + self.heard + names(self.names) + u(8, ROUND) + u(2, 0, 0) + u(4, WIDTH) + u(1, bits) + said)

    def row(self, one, row, bits):
        (secret, seed), = self.secrets[one]
        told = self.told(bits)
        sent = masked(row, one, self.near[one], lambda other: ladder(secret, public(self.secrets[other][0][0])), told, (ROUND, 0, 0), bits, seed)
        return frame(6, self.session, u(8, one) + u(2, 0) + told + blob(sent))

    def request(self, one, alive):
        boxes = b"".join(self.box(sender, one, 0) for sender in sorted(self.near[one]))
        return frame(19, self.session, u(8, one) + u(2, 0) + blob(self.bits(alive)) + blob(self.bits(set(self.names) - set(alive))) + blob(boxes), version=2)

    def bits(self, some):
        return bytes([sum(128 >> place for place, one in enumerate(self.names) if one in some)])

    def answer(self, one, bits, alive):
        lists = u(2, 0) + names(alive) + names([other for other in self.names if other not in alive])
        shares = b"".join(self.shares[other][0][one][:33] if other in alive else self.shares[other][0][one][33:] for other in sorted(self.near[one]))
        return frame(10, self.session, u(8, one) + u(2, 0) + hashed("fedtail secure: survivors", self.told(bits), lists) + blob(shares))


def test_every_byte_of_a_session_with_few_neighbours():
    definition, transcript, bits = SparseDefinition(), hashlib.sha256(), 29
    session = SparseSession(NAME, ROUND, definition.names, definition.threshold, 1, 0, definition.neighbours, definition.needed)
    server, clients = Server(session), {one: Client(session, one, corrupted=0.0, random=drawn(one)) for one in definition.names}
    rows, alive = {one: [one % 1000, -1, 2, 3, 4] for one in definition.names}, definition.names[1:]

    def same(said, defined):
        assert said == defined
        transcript.update(said)
        return said

    for one, message in server.invite().items():
        same(message, definition.invitation)
        server.receive(one, same(clients[one].keys(), frame(2, session.id, definition.keys[one])))
    for one, message in server.key_list().items():
        server.receive(one, same(clients[one].shares(same(message, definition.listed(one))), definition.sharing(one)))
    for one, message in server.ask(WIDTH, bits, CONTEXT).items():
        same(message, frame(18, session.id, u(2, 0) + blob(definition.bits(definition.names)) + u(4, WIDTH) + u(1, bits), version=2))
        row = same(clients[one].masked_row(message, rows[one], CONTEXT), definition.row(one, rows[one], bits))
        if one in alive:
            server.receive(one, row)
    for one, message in server.unmask().items():
        given = clients[one].unmask(same(message, definition.request(one, alive)))
        server.receive(one, same(given, definition.answer(one, bits, alive)))
    assert server.total().total.tolist() == [sum(rows[one][place] for one in alive) % 2**bits for place in range(WIDTH)]
    # Version 2 of the protocol, for good: other bytes need another version.
    assert transcript.hexdigest() == "d247e74397e258e69a245417452e7a7b02d0e8ace0de6c4d5ba4b1a0e8b82ac8"
