"""The server of dropout-tolerant secure aggregation, in one session: it learns of each query the sum over those who stayed.

Rows are added as they arrive; none is stored. A message that is refused changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from fedtail.secure.encoding import Refused, TooFew
from fedtail.secure.frames import decode_frame, encode_frame
from fedtail.secure.masks import (
    MaskContext,
    add_masks,
    key_digest,
    mask_context,
    own_mask_key,
    pair_mask_key,
    row_from_bytes,
    seed_commitment,
    word_dtype,
)
from fedtail.secure.messages import (
    BOX,
    Ask,
    Confirm,
    KeyList,
    Keys,
    Masked,
    Session,
    Shares,
    Signed,
    SurvivorLists,
    Unmask,
    Unmasked,
)
from fedtail.secure.primitives import make_key_agreement, public_key
from fedtail.secure.shamir import SIZE, lagrange_weights, restore_secret, share_as_integer

Contents = dict[int, bytes]      # a message for each client
Places = dict[int, int]          # names in increasing order, with their places in it


def map_by_client(given: dict[int, Any], make: Callable[[Any], Any]) -> dict[int, Any]:
    """make(value) for each client's value in `given`, by client.

    `make` is called once for clients whose values are one and the same object, so that they share the result.
    """
    made: dict[int, Any] = {}
    for value in given.values():
        if id(value) not in made:
            made[id(value)] = make(value)
    return {one: made[id(value)] for one, value in given.items()}


@dataclass(frozen=True)
class Sum:
    """What the server learns: the sum modulo M over those who stayed, int64 in [0, M), and who they are."""

    total: np.ndarray
    survivors: tuple[int, ...]


@dataclass
class Query:
    """A query that has been asked and not yet been unmasked: what arrived for it so far."""

    ask: Ask
    context: MaskContext
    total: np.ndarray                                              # of the masked rows
    alive: set[int] = field(default_factory=set)
    signatures: dict[int, Signed] = field(default_factory=dict)
    shares: dict[int, list[bytes]] = field(default_factory=dict)   # from a client, for each member

    @cached_property
    def survivor_lists(self) -> SurvivorLists:
        """Whose rows arrived and whose did not; fixed at the first read, so that later rows do not change it."""
        alive = tuple(sorted(self.alive))
        return SurvivorLists(self.ask.query, alive, tuple(one for one in self.ask.members if one not in self.alive))

    @cached_property
    def survivor_digest(self) -> bytes:
        """The digest (32 bytes) of `survivor_lists`, which it fixes, and of the query's context; clients' shares carry it."""
        return self.survivor_lists.digest(self.context.digest)


class Server:
    """invite() -> key_list() -> for each query: ask(...), [confirm(),] unmask(), total().

    Each gives a message for each client; in between `receive` what they answer. Who does not answer has dropped out. A step for
    which too few are left raises `TooFew`, and what was asked is not released.
    """

    def __init__(self, session: Session):
        """A server that expects the public keys of the members of `session`; nothing is sent yet."""
        self.session = session
        self.members: tuple[int, ...] = ()              # those who shared their secrets; fixed by the first query
        self._keys: dict[int, Keys] = {}
        self._list: KeyList | None = None
        self._holders: dict[int, Places] = {}           # of each client that sent keys: who was sent shares of its secrets
        self._partners: dict[int, Places] = {}          # of each member: the members among them
        self._key_lists: dict[int, Any] = {}            # what each client was sent of the list of keys
        self._boxes: dict[int, bytes] = {}
        self._query: Query | None = None
        self._asked = 0
        self._expected: type = Keys
        self.refused: list[tuple[int, Refused]] = []    # what came and was not taken, from whom

    def receive(self, sender: int, message: bytes) -> None:
        """Take the answer `message` of a client to the current step; `sender` is the client it came from by the transport.

        Raises `Refused`, without any change, for a message that is not expected now, is repeated, does not fit what was asked, or
        names another sender.
        """
        if self._expected is Sum:
            raise Refused("no answer is expected now: the query is done, and the next has not been asked.")
        steps: dict[type, Callable[[Any], None]] = {
            Keys: self._receive_keys, Shares: self._receive_shares, Masked: self._receive_masked_row,
            Signed: self._receive_signature, Unmasked: self._receive_released_shares}
        row = self._query.ask.row_bytes if self._query is not None else 0
        came: Any = decode_frame(self._expected, message, self.session.id, self.session.max_message_bytes + row)
        if came.sender != sender:
            raise Refused(f"a message from client {sender} says that it is from {came.sender}.")
        steps[self._expected](came)

    def invite(self) -> Contents:
        """For each member of the session, the message that invites it to send its public keys."""
        return self._same_message_for(self.session.members, self.session)

    def _receive_keys(self, keys: Keys) -> None:
        """Store a client's public keys.

        Raises `Refused` for a client that was not invited or sent keys before, for another number of keys than queries, and for a
        missing or an unexpected signature.
        """
        if keys.sender not in self.session.share_points or keys.sender in self._keys:
            raise Refused(f"client {keys.sender} was not invited, or sent its keys already.")
        if len(keys.masking) != self.session.queries or bool(keys.signature) != bool(self.session.signed):
            raise Refused(f"client {keys.sender} has keys for {len(keys.masking)} of {self.session.queries} queries, or its "
                          "signature is missing or not wanted.")
        self._keys[keys.sender] = keys

    def key_list(self) -> Contents:
        """For each client that sent keys, the message with all public keys, or with its neighbours' in a sparse session.

        From now on sealed shares are expected, and no more keys. Raises `TooFew` where fewer clients than the threshold sent
        keys, and `Refused` at a second call.
        """
        self._expect_next(Keys, Shares, len(self._keys), "sent keys")
        self._list = KeyList(tuple(self._keys[one] for one in sorted(self._keys)))
        self._holders = self._partners_among(tuple(sorted(self._keys)))
        self._key_lists = self.session.key_lists(self._list)
        return map_by_client(self._key_lists, self._encode_frame)

    def _partners_among(self, names: tuple[int, ...]) -> dict[int, Places]:
        """For each client of `names`, those of `names` with which it exchanges shares, each mapped to its position among them.

        `names` must be in increasing order. Positions count from 0, in increasing order of the clients. Call it only after the
        list of keys is fixed, as `_key_digest` is read.
        """
        partners = {one: self.session.share_partners(one, self._key_digest, names) for one in names}
        return map_by_client(partners, lambda few: {one: place for place, one in enumerate(few)})

    @cached_property
    def _key_digest(self) -> bytes:
        """The digest (32 bytes) of all public keys, which fixes the graph of a sparse session; cached at the first read.

        Read it only after `key_list` has fixed the list: before that, the digest of an empty list would be cached for good.
        """
        return key_digest(self.session, self._list or KeyList(()))

    def _receive_shares(self, shares: Shares) -> None:
        """Store a client's sealed shares: an encrypted box for each other client that is to hold some, and for each query.

        Raises `Refused` for a client without keys or with shares already, for another number of boxes, and where it confirms
        other keys than were sent to it.
        """
        if shares.sender not in self._keys or shares.sender in self._boxes:
            raise Refused(f"client {shares.sender} sent no keys, or its shares already.")
        holders = self._holders[shares.sender]
        boxes = (len(holders) - (shares.sender in holders)) * self.session.queries
        answer = self.session.key_confirmation(self._keys[shares.sender], self._key_lists[shares.sender], self._key_digest)
        if shares.heard != answer or len(shares.boxes) != boxes * BOX:
            raise Refused(f"client {shares.sender} answers another list of keys, or has not a box for each client and query.")
        self._boxes[shares.sender] = shares.boxes

    def ask(self, width: int, modulus_bits: int, context: bytes = b"") -> Contents:
        """For each member, the message of the next query: a row of `width` entries modulo 2^modulus_bits; rows are expected now.

        `context` must be what was broadcast to the clients. The first query fixes `members`: the clients that sent shares. A
        query that has not ended is given up. Raises `TooFew` where the members are fewer than the threshold; raises `Refused`
        where the session has no query left, or no list of keys yet.
        """
        if self._list is None or self._asked >= self.session.queries:
            raise Refused(f"query {self._asked} of {self.session.queries} cannot be asked: keys have not been listed, or the "
                          "session has no more. Plan more queries.")
        self._check_threshold(len(self._boxes), "shared their secrets")
        if not self.members:
            self.members = tuple(sorted(self._boxes))
            self._partners = self._partners_among(self.members)
        ask = Ask(self._asked, self.members, width, modulus_bits)
        bound = mask_context(self.session, self._list, ask, context)
        total = np.zeros(width, word_dtype(modulus_bits))
        self._query, self._expected, self._asked = Query(ask, bound, total), Masked, self._asked + 1
        return self._same_message_for(self.members, ask)

    def _receive_masked_row(self, masked: Masked) -> None:
        """Add a member's masked row to the total of the query, and the member to those whose rows arrived (`alive`).

        Raises `Refused` where the sender is no member, answered before or answers another query, where its context differs from
        the server's, and where the row has another width or an entry beyond the modulus.
        """
        query = self._current_query()
        if masked.query != query.ask.query or masked.sender not in self.members or masked.sender in query.alive:
            raise Refused(f"client {masked.sender} is no member, answers another query, or answered this one already.")
        if masked.context_digest != query.context.digest:
            raise Refused(f"client {masked.sender} has another context than this server: other members, keys or broadcast.")
        query.total += row_from_bytes(masked.row, query.ask.width, query.ask.modulus_bits)
        query.alive.add(masked.sender)

    @property
    def answered_members(self) -> tuple[int, ...]:
        """The members whose rows for the current query have arrived, in increasing order.

        Raises `Refused` where there is no query.
        """
        return tuple(sorted(self._current_query().alive))

    def confirm(self) -> Contents:
        """In a signed session: for each client whose row arrived, the message that asks it to sign the lists of survivors.

        From now on no row is accepted, and signatures are expected. Raises `TooFew` where fewer rows than the threshold
        arrived; raises `Refused` in an unsigned session, and where no query is at the step of collecting rows.
        """
        if not self.session.signed:
            raise Refused("the session is not signed, so there are no lists to confirm. Use unmask().")
        query = self._current_query()
        self._expect_next(Masked, Signed, len(query.alive), "sent a row")
        return self._same_message_for(query.survivor_lists.alive, Confirm(query.survivor_lists))

    def _receive_signature(self, signed: Signed) -> None:
        """Store a client's signature of the lists; it is not verified here: the clients do that.

        Raises `Refused` for a client whose row did not arrive, that signed before, or answers another query.
        """
        query = self._current_query()
        if signed.query != query.ask.query or signed.sender not in query.alive or signed.sender in query.signatures:
            raise Refused(f"client {signed.sender} has no row here, answers another query, or signed already.")
        query.signatures[signed.sender] = signed

    def unmask(self) -> Contents:
        """For each client whose row arrived (and that signed, in a signed session), the message that asks for shares.

        It has the lists of survivors, the boxes that others sealed for this client, and in a signed session `threshold`
        signatures. From now on these shares are expected, and no more rows. Raises `TooFew` where fewer rows, or signatures,
        than the threshold arrived; raises `Refused` where no query is under way or rows, or signatures, are not what is
        expected.
        """
        query = self._current_query()
        if self.session.signed:
            self._expect_next(Signed, Unmasked, len(query.signatures), "signed the lists")
        else:
            self._expect_next(Masked, Unmasked, len(query.alive), "sent a row")
        signatures = tuple(query.signatures[one] for one in sorted(query.signatures)[:self.session.threshold])
        asked = sorted(query.signatures) if self.session.signed else query.survivor_lists.alive
        request, id = self.session.to_wire_message(Unmask(0, query.survivor_lists, b"", signatures)), self.session.id
        return {one: encode_frame(id, replace(request, to=one, boxes=self._boxes_for(one, query.ask.query))) for one in asked}

    def _boxes_for(self, to: int, query: int) -> bytes:
        """The boxes (encrypted shares) for query number `query` that other members sealed for client `to`, joined as bytes.

        They are in increasing order of the members that sealed them, and only from those that exchange shares with `to`.
        """
        found = []
        for one in self._partners[to]:
            if one != to:
                holders = self._holders[one]
                place = holders[to] - (one in holders and one < to)                   # nobody has a box from itself
                start = BOX * (place * self.session.queries + query)
                found.append(self._boxes[one][start:start + BOX])
        return b"".join(found)

    def _receive_released_shares(self, unmasked: Unmasked) -> None:
        """Store the Shamir shares in `unmasked`, which a client releases: one for each member it exchanges shares with, in order.

        The members are in increasing order. Raises `Refused` for a client whose row did not arrive or that gave shares before,
        for an answer to another query or to other lists of survivors, for another number of shares, and for a share that is not
        in the field.
        """
        query = self._current_query()
        if unmasked.query != query.ask.query or unmasked.sender not in query.alive or unmasked.sender in query.shares:
            raise Refused(f"client {unmasked.sender} has no row here, answers another query, or gave its shares already.")
        count = len(self._partners[unmasked.sender])
        if unmasked.heard != query.survivor_digest or len(unmasked.shares) != SIZE * count:
            raise Refused(f"client {unmasked.sender} answers other lists, or has not a share for each member.")
        shares = [unmasked.shares[start:start + SIZE] for start in range(0, len(unmasked.shares), SIZE)]
        for one in shares:
            share_as_integer(one)
        query.shares[unmasked.sender] = shares

    def total(self) -> Sum:
        """The `Sum` over the clients whose rows arrived, without masks; this ends the query.

        Raises `TooFew` where fewer clients than the threshold, or too few neighbours of some client, released shares; raises
        `Refused` where a restored secret does not fit what its owner announced, where shares are not what is expected now, and
        where no query is under way.
        """
        query = self._current_query()
        self._check_step(Unmasked, len(query.shares), "gave their shares")
        self._remove_masks(query, self._restore_secrets(query))
        self._query, self._expected = None, Sum
        total = query.total & query.total.dtype.type((1 << query.ask.modulus_bits) - 1)
        return Sum(total.astype(np.int64), query.survivor_lists.alive)

    def _restore_secrets(self, query: Query) -> dict[int, bytes]:
        """By member, restored from the shares of `query`: the seed of each survivor, and the mask key of each dropped client.

        Raises `Refused` where one does not fit the commitment or public key that its owner sent; raises `TooFew` where too few of
        its shares arrived.
        """
        found, chosen = {}, dict[int, tuple[dict[int, int], dict[int, int]]]()
        for one in self.members:
            partners = self._partners[one]
            if id(partners) not in chosen:                          # everybody's are the same where every pair shares a mask
                chosen[id(partners)] = self._givers_and_weights(one, query)
            givers, counts = chosen[id(partners)]
            shares = {point: query.shares[giver][self._partners[giver][one]] for giver, point in givers.items()}
            secret = restore_secret(shares, counts)
            keys, number = self._keys[one], query.ask.query
            fits = (seed_commitment(self.session, one, number, secret) == keys.commitments[number] if one in query.alive
                    else public_key(secret) == keys.masking[number])
            if not fits:
                raise Refused(f"the shares of client {one}'s secret do not fit what it announced: somebody gave a wrong share, "
                              "and the sum cannot be unmasked.")
            found[one] = secret
        return found

    def _givers_and_weights(self, one: int, query: Query) -> tuple[dict[int, int], dict[int, int]]:
        """(points, weights): the points of the clients whose shares restore client `one`'s secret, and Lagrange weights by point.

        They are the first `shares_needed`, by point, of the clients that hold shares of it and released them for `query`. Raises
        `TooFew` where there are fewer.
        """
        points, needed = self.session.share_holders(one, self._key_digest), self.session.shares_needed
        gave = sorted((points[giver], giver) for giver in self._partners[one] if giver in query.shares)[:needed]
        if len(gave) < needed:
            raise TooFew(f"{len(gave)} of client {one}'s neighbours gave their shares, and {needed} restore its secret: nothing "
                         "is released.")
        return {giver: point for point, giver in gave}, lagrange_weights([point for point, _ in gave])

    def _remove_masks(self, query: Query, secrets: dict[int, bytes]) -> None:
        """Remove from `query.total`, in place, the survivors' own masks and those they share with clients that dropped out.

        `secrets` has the seed of each survivor and the mask key of each client that dropped out, by client.
        """
        alone = [own_mask_key(secrets[one], query.context, one) for one in query.survivor_lists.alive]
        added: list[bytes] = []
        subtracted: list[bytes] = []
        for gone in query.survivor_lists.dropped:
            agree = make_key_agreement(secrets[gone])
            for one in self._partners[gone]:
                if one in query.alive:
                    shared = agree(self._keys[one].masking[query.ask.query])
                    (added if one < gone else subtracted).append(pair_mask_key(shared, query.context, one, gone))
        add_masks(query.total, subtracted, alone + added)

    def _current_query(self) -> Query:
        """The current query; raises `Refused` where there is none."""
        if self._query is None:
            raise Refused("no query is under way. Ask first.")
        return self._query

    def _expect_next(self, now: type, after: type, count: int, did: str) -> None:
        """Go on to the next step: answers of class `after` are expected from now on, instead of those of class `now`.

        Raises `Refused` where it is not answers of class `now` that are expected, and `TooFew` where `count` clients are fewer
        than the threshold; `did` says in the error text what they did.
        """
        self._check_step(now, count, did)
        self._expected = after

    def _check_step(self, now: type, count: int, did: str) -> None:
        """Raise `Refused` unless answers of class `now` are expected, and `TooFew` where `count` is below the threshold.

        `did` says in the error text what those clients did.
        """
        if self._expected is not now:
            raise Refused(f"the server is not at this step: it expects {self._expected.__name__}, not {now.__name__}.")
        self._check_threshold(count, did)

    def _check_threshold(self, count: int, did: str) -> None:
        """Raise `TooFew` where `count` clients are fewer than the threshold; `did` says in the error text what they did."""
        if count < self.session.threshold:
            raise TooFew(f"{count} of {len(self.session.members)} clients {did}, and the threshold is {self.session.threshold}: "
                         "nothing is released.")

    def _same_message_for(self, names: Any, message: Any) -> Contents:
        """By client, for all of `names`: the framed bytes of `message`, the same object for everybody."""
        return dict.fromkeys(names, self._encode_frame(message))

    def _encode_frame(self, message: Any) -> bytes:
        """`message` as framed bytes of this session, after `to_wire_message`, by which a sparse session shortens it."""
        return encode_frame(self.session.id, self.session.to_wire_message(message))
