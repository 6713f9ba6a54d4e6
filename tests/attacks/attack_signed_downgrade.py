"""Claimed: clients with pinned identities release one sum over one set of survivors, also to a server that departs from the protocol.

The attacker is the server. First it invites to an unsigned session, and tells each of seven clients other survivors: clients
without an identity then give it what unmasks the sum over two of them, clients with one refuse the invitation, to a session of every
pair, of few neighbours and to an all-or-nothing run. Then one client is on its side, signs every list, and gives all its shares: the six
others are split in two, and with a threshold that is too low for a colluding client both halves unmask, and a row is read.
"""

from __future__ import annotations

import numpy as np
from outcome import Outcome

from fedtail.secure import Client, Identity, Participant, Refused, Run, Server, Session, sparse_session
from fedtail.secure.frames import decode_frame, encode_bundle, encode_frame
from fedtail.secure.masks import add_masks, own_mask_key, pair_mask_key
from fedtail.secure.messages import Confirm, Masked, Signed, SurvivorLists, Unmask, Unmasked
from fedtail.secure.primitives import make_key_agreement
from fedtail.secure.shamir import SIZE, restore_secret

COUNT, ROW = 7, np.array([1, 10, 100])
# Each outsider is called dropped by four of the others, everybody calls 0 and 1 alive, and every list is of four or more.
DROPPED = {0: (2, 3, 4), 1: (5, 6), 2: (3, 4, 5), 3: (4, 5, 6), 4: (2, 5, 6), 5: (2, 3, 6), 6: (2, 3, 4)}
COLLUDES, READ = 6, 0


def identities(count: int = COUNT, colluding: int = 0) -> dict[int, Identity]:
    """Identities that have pinned each other."""
    secrets = {one: bytes([one + 1]) * 32 for one in range(count)}
    pinned = {one: Identity(secret, {}).public_key for one, secret in secrets.items()}
    return {one: Identity(secret, pinned, colluding) for one, secret in secrets.items()}


class DepartingServer:
    """A server in a session whose rows are all in: client k's is ROW * 2^k. From then on it does what it likes."""

    def __init__(self, session: Session, known: dict[int, Identity]):
        self.session, self.clients, self.sent = session, {}, {}
        self.clients = {one: Client(session, one, identity=known.get(one)) for one in session.members}
        self.server = Server(session)
        for one, client in self.clients.items():
            self.server.receive(one, client.keys())
        for one, message in self.server.key_list().items():
            self.server.receive(one, self.clients[one].shares(message))
        for one, message in self.server.ask(len(ROW), 32).items():
            self.sent[one] = self._read(Masked, self.clients[one].masked_row(message, ROW * 2**one))

    def lists(self, dropped: tuple[int, ...]) -> SurvivorLists:
        return SurvivorLists(0, tuple(one for one in self.session.members if one not in dropped), dropped)

    def signed(self, one: int, dropped: tuple[int, ...]) -> Signed:
        """A client's signature of the lists."""
        return self._read(Signed, self.clients[one].confirm(self._wrap(Confirm(self.lists(dropped)))))

    def shares(self, one: int, dropped: tuple[int, ...], signatures: tuple[Signed, ...] = ()) -> list[bytes]:
        """What a client gives for the lists: a share for each member."""
        request = Unmask(one, self.lists(dropped), self.server._boxes_for(one, 0), signatures)
        given = self._read(Unmasked, self.clients[one].unmask(self._wrap(request))).shares
        return [given[start:start + SIZE] for start in range(0, len(given), SIZE)]

    def row_without_masks(self, one: int, seed: bytes, mask_keys: dict[int, bytes]) -> np.ndarray:
        """The row that a client sent, less its own mask and those it shares with clients whose mask keys are known."""
        context, total = self.server._query.context, np.frombuffer(self.sent[one].row, "<u4").copy()
        public = self.server._keys[one].masking[0]
        pairs = {other: pair_mask_key(make_key_agreement(key)(public), context, one, other) for other, key in mask_keys.items()}
        add_masks(total, [key for other, key in pairs.items() if other < one],
                  [own_mask_key(seed, context, one), *(key for other, key in pairs.items() if other > one)])
        return total

    def _wrap(self, message) -> bytes:
        return encode_frame(self.session.id, message)

    def _read(self, kind: type, message: bytes):
        return decode_frame(kind, message, self.session.id, 10**6)


def sum_over_two(known: dict[int, Identity]) -> list[int]:
    """The sum over clients 0 and 1, from an unsigned session in which every client hears of other survivors."""
    world = DepartingServer(Session(b"run", 0, tuple(range(COUNT)), 4), known)
    given = {one: world.shares(one, DROPPED[one]) for one in range(COUNT)}

    def secret(one: int, dropped: bool) -> bytes:
        givers = [k for k in range(COUNT) if (one in DROPPED[k]) == dropped][:4]
        return restore_secret({k + 1: given[k][one] for k in givers})

    outsiders = {one: secret(one, True) for one in range(2, COUNT)}
    return sum(world.row_without_masks(one, secret(one, False), outsiders) for one in (0, 1)).tolist()


def row_by_collusion(threshold: int, trusted: dict[int, Identity]) -> list[int]:
    """The row of client 0 from a signed session, client 6 being on the server's side; it is alive to one half, dropped to the other.

    `trusted` are the identities of the clients. The honest ones sign one list each, and the colluding one as many as it is asked.
    """
    world = DepartingServer(Session(b"run", 0, tuple(range(COUNT)), threshold, signed=1), trusted)
    halves = {(): (0, 1, 2), (0,): (3, 4, 5)}                      # dropped, as it is told to three each
    signatures = {dropped: [world.signed(one, dropped) for one in half] for dropped, half in halves.items()}
    colluding = world.clients[COLLUDES].save()
    for dropped in halves:
        world.clients[COLLUDES] = Client.restore(colluding, trusted[COLLUDES])
        signatures[dropped].append(world.signed(COLLUDES, dropped))
    found = {dropped: {one: world.shares(one, dropped, tuple(signatures[dropped])) for one in half} for dropped, half in halves.items()}
    world.clients[COLLUDES] = Client.restore(colluding, trusted[COLLUDES])
    held = world.clients[COLLUDES]._held_shares(Unmask(COLLUDES, world.lists(()), world.server._boxes_for(COLLUDES, 0)))

    def secret(one: int, dropped: tuple[int, ...], place: int) -> bytes:
        givers = {k + 1: shares[one] for k, shares in found[dropped].items()}
        return restore_secret({**givers, COLLUDES + 1: held[one][place * SIZE:(place + 1) * SIZE]})

    total = sum(np.frombuffer(masked.row, "<u4") for masked in world.sent.values())       # pairs cancel, seeds of all are known
    seeds = {one: secret(one, (), 0) for one in range(COUNT) if one != COLLUDES}
    seeds[COLLUDES] = world.clients[COLLUDES].state.secrets[0].seed
    context = world.server._query.context
    add_masks(total, [], [own_mask_key(seed, context, one) for one, seed in seeds.items()])
    others = sum(np.frombuffer(world.sent[one].row, "<u4") for one in range(1, COUNT))    # and again, without client 0
    agree = make_key_agreement(secret(READ, (0,), 1))
    add_masks(others, [], [own_mask_key(seed, context, one) for one, seed in seeds.items() if one != READ])
    add_masks(others, [pair_mask_key(agree(world.server._keys[one].masking[0]), context, READ, one) for one in range(1, COUNT)], [])
    return (total - others).tolist()


def refusals(identity: Identity) -> int:
    """Of three unsigned invitations, how many a participant with this identity refuses."""
    few = sparse_session(b"run", 0, tuple(range(200)), 101, 0.1, 0.1)
    invitations = (Session(b"run", 0, tuple(range(COUNT)), 4), few, Run(b"run", tuple(range(COUNT))))
    answers = [Participant(0, b"run", identity=identity).answer(encode_bundle([encode_frame(one.id, one)]), lambda *_: None) for one in invitations]
    return sum(answer == encode_bundle([]) and len(refused) == 1 for answer, refused in answers)


def is_refused(attempt) -> bool:
    try:
        attempt()
    except Refused:
        return True
    return False


def attack() -> Outcome:
    """Whether clients with identities refuse both attacks, each of which succeeds against clients without what it takes."""
    leaked = sum_over_two({}) == (ROW * 3).tolist()
    refused = refusals(identities()[0]) == 3 and is_refused(lambda: sum_over_two(identities()))
    read = row_by_collusion(4, identities()) == ROW.tolist()
    low = is_refused(lambda: row_by_collusion(4, identities(colluding=1)))
    enough = is_refused(lambda: row_by_collusion(5, identities(colluding=1)))
    return Outcome(leaked and refused and read and low and enough,
                   f"unsigned, the sum over 2 of 7 is {'read' if leaked else 'not read'}; clients with identities refuse {refusals(identities()[0])} "
                   f"of 3 unsigned invitations; with 1 colluding client a row is {'read' if read else 'not read'} at threshold 4, "
                   f"{'refused' if low else 'not refused'} by clients who reckon with it, and at 5 {'nothing' if enough else 'a sum'} is unmasked")
