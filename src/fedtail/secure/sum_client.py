"""A client of dropout-tolerant secure aggregation, in one session: messages in, messages out, and what it refuses to do.

Its state is one frozen value that a step replaces only when it succeeds: after a refusal a client is as before. It can be saved
between messages, in a place that only the client reads: it holds the secrets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fedtail.deprecated import with_old_names
from fedtail.secure.encoding import U8, U16, U64, Blob, Key, Refused, TooFew, decode, encode
from fedtail.secure.frames import decode_frame, encode_frame
from fedtail.secure.identity import Identity, checked_identity
from fedtail.secure.masks import (
    MaskContext,
    add_masks,
    box_key,
    key_digest,
    mask_context,
    own_mask_key,
    pair_mask_key,
    row_to_bytes,
    seed_commitment,
    to_residues,
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
from fedtail.secure.primitives import KEY, Randomness, make_key_agreement, public_key, seal, system, unseal
from fedtail.secure.shamir import SIZE, split_secret
from fedtail.secure.sparse_graph import CORRUPTED, SECURITY_BITS
from fedtail.secure.sparse_messages import NeighbourKeys, SparseSession


@dataclass(frozen=True)
class Secrets:
    """For one query: the mask key, the seed of the mask it adds alone, and its own share of both."""

    mask: Key
    seed: Key
    own: Blob = b""


@dataclass(frozen=True)
class AnsweredQuery:
    """A query that this client sent a row for, and what it did since."""

    query: U16
    context_digest: Key
    confirmed: Blob = b""           # digest of the lists it signed
    unmasked: U8 = 0


@dataclass(frozen=True)
class ClientState:
    """The state of a client in a session."""

    session: Session
    me: U64
    sealing: Key
    secrets: tuple[Secrets, ...]
    key_list: KeyList = KeyList(())
    members: tuple[U64, ...] = ()
    answered: tuple[AnsweredQuery, ...] = ()


@dataclass(frozen=True)
class SparseState(ClientState):
    """The state of a client in a session with few neighbours."""

    session: SparseSession
    key_list: NeighbourKeys = NeighbourKeys(())


SPARSE = b"\2"      # before the saved state of such a client; any other begins with a zero


@with_old_names
class Client:
    """One client in one session. `minimum` is the smallest threshold it agrees to; with an `identity` the session must be signed.

    In a session with few neighbours it requires that its row stays secret but for a probability of 2^-security_bits where a
    share of `corrupted` clients is on the server's side.

    keys() -> shares(list of keys) -> for each query: masked_row(ask, row, context), [confirm(lists),] unmask(lists).
    Whatever is out of order, repeated or against the rules raises `Refused` and changes nothing.
    """

    state: ClientState
    _digested: tuple[KeyList | None, bytes] = (None, b"")

    def __init__(self, session: Session, me: int, minimum: int = 2, identity: Identity | None = None,
                 random: Randomness = system, corrupted: float = CORRUPTED, security_bits: int = SECURITY_BITS):
        """Client number `me` in `session`; draws its keys and seeds for all queries from `random`.

        Raises `Refused` where it is no member, where the threshold is below `minimum`, where the session is signed and there is
        no `identity` (or the other way round), and, in a `SparseSession`, where its row may be disclosed with a probability
        above 2^-security_bits if a fraction `corrupted` of the clients colludes.
        """
        if me not in session.share_points:
            raise Refused(f"client {me} is not among the {len(session.members)} members of the session.")
        if session.threshold < minimum:
            raise Refused(f"the session's threshold is {session.threshold}, and this client requires {minimum} or more.")
        session.check_secrecy(corrupted, security_bits)
        self._identity, self._random = checked_identity(session, identity), random
        sealing, secrets = random(KEY), tuple(Secrets(random(KEY), random(KEY)) for _ in range(session.queries))
        self.state = (SparseState(session, me, sealing, secrets) if isinstance(session, SparseSession)
                      else ClientState(session, me, sealing, secrets))

    @classmethod
    def restore(cls, saved: bytes, identity: Identity | None = None, random: Randomness = system) -> Client:
        """The client that `save` wrote; `identity` and `random` are not saved and are given anew.

        Keep one copy only: an older one would answer again what was answered already. Raises `Refused` where `saved` does not
        decode, or the session does not suit the identity.
        """
        client = cls.__new__(cls)
        client.state = decode(SparseState, saved[1:]) if saved[:1] == SPARSE else decode(ClientState, saved)
        client._identity, client._random = checked_identity(client.state.session, identity), random
        return client

    def save(self) -> bytes:
        """The state as bytes, for `restore`, with secrets but without the identity: store it where only this client reads."""
        return (SPARSE if isinstance(self.state, SparseState) else b"") + encode(self.state)

    @property
    def is_done(self) -> bool:
        """Whether this client has released its shares for the last query of the session, so that nothing is left to answer."""
        answered = self.state.answered
        return bool(answered and answered[-1].query == self.state.session.queries - 1 and answered[-1].unmasked)

    def keys(self) -> bytes:
        """The message with this client's public keys, in answer to the invitation; the same at every call."""
        return self._encode_frame(self._make_keys())

    def _make_keys(self) -> Keys:
        """The `Keys` of this client: public keys, commitments to its seeds, and a signature where it has an identity.

        They follow from the state, so they are the same at every call.
        """
        state = self.state
        committed = tuple(seed_commitment(state.session, state.me, q, one.seed) for q, one in enumerate(state.secrets))
        keys = Keys(state.me, public_key(state.sealing), tuple(public_key(one.mask) for one in state.secrets), committed)
        return keys if self._identity is None else self._identity.sign_keys(state.session.id, keys)

    def shares(self, message: bytes) -> bytes:
        """The answer to the list of public keys in `message`: shares of this client's secrets, encrypted for their holders.

        Stores the list and this client's own shares, and draws from `random`. Raises `Refused` for a second list, and for one
        with uninvited clients, with other keys of this client than it sent, or without valid signatures in a signed session;
        `TooFew` for one with too few clients to restore a secret.
        """
        state, heard = self.state, self._decode_frame(KeyList, message)
        if state.key_list.entries:
            raise Refused("a second list of keys came; shares are given once.")
        names, about = [one.sender for one in heard.entries], key_digest(state.session, heard)
        holders = state.session.share_holders(state.me, about)
        self._check_keys(heard, holders)
        points = [holders[one] for one in names]
        given = [self._secret_shares(one, points) for one in state.secrets]                # for each query, for each client
        agree = make_key_agreement(state.sealing)
        boxes = b"".join(self._sealed_boxes(one.sender, agree(one.sealing), about, [shares[place] for shares in given])
                         for place, one in enumerate(heard.entries) if one.sender != state.me)
        if state.me in names:
            mine = names.index(state.me)
            secrets = tuple(replace(one, own=shares[mine]) for one, shares in zip(state.secrets, given, strict=True))
            state = replace(state, secrets=secrets)
        self.state = replace(state, key_list=heard)
        return self._encode_frame(Shares(state.me, state.session.key_confirmation(self._make_keys(), heard, about), boxes))

    def _check_keys(self, heard: KeyList, holders: dict[int, int]) -> None:
        """Raise `Refused` unless every sender on the list of keys `heard` is one of `holders`, with mask keys for every query.

        `holders` are the clients that may hold shares of this client's secrets. If it is one itself, the list must have its own
        keys as it sent them. In a signed session all keys must be signed. Raises `TooFew` where the list has fewer clients than
        restore a secret.
        """
        session, entries = self.state.session, {one.sender: one for one in heard.entries}
        if not entries.keys() <= holders.keys():
            raise Refused("a list of keys names somebody who was not invited, or is no neighbour of this client.")
        if self.state.me in holders and entries.get(self.state.me) != self._make_keys():
            raise Refused("a list of keys names not this client with the keys it sent.")
        if len(entries) < session.shares_needed:
            raise TooFew(f"{len(entries)} clients sent keys, and the threshold is {session.shares_needed}.")
        for one in heard.entries:
            if len(one.masking) != session.queries:
                raise Refused(f"client {one.sender} has keys for {len(one.masking)} of {session.queries} queries.")
        if self._identity is not None:
            self._identity.check_signatures(session.id, heard.entries)

    def _secret_shares(self, one: Secrets, points: list[int]) -> list[bytes]:
        """For each of `points` 66 bytes: a Shamir share of the seed in `one`, then a share of the mask key in it.

        `one` has the secrets for one query. Draws the coefficients of the polynomials from `random`.
        """
        needed = self.state.session.shares_needed
        seeds, masks = (split_secret(secret, needed, points, self._random) for secret in (one.seed, one.mask))
        return [seed + mask for seed, mask in zip(seeds, masks, strict=True)]

    def _sealed_boxes(self, to: int, shared: bytes, about: bytes, texts: list[bytes]) -> bytes:
        """The encrypted boxes for client `to`, joined: one for each query, with the shares (66 bytes) in that entry of `texts`.

        They are under a key that only the two clients can derive, from `shared`, their X25519 secret. `about`, the digest of
        all public keys, is authenticated but not contained.
        """
        key = box_key(shared, about, self.state.me, to)
        return b"".join(seal(key, query, text, about) for query, text in enumerate(texts))

    def checked_query(self, message: bytes) -> Ask:
        """The `Ask` in the framed `message`, for a caller that is about to compute the row.

        Raises `Refused` where this client may not answer it.
        """
        ask = self._decode_frame(Ask, message)
        self._check_query(ask)
        return ask

    def masked_row(self, message: bytes, row: Any, context: bytes = b"") -> bytes:
        """Answer a query: the message with `row`, a vector of integers, under masks that are bound to the whole context.

        `context` is what the server broadcast besides: the question, the model, the dual; only its digest is sent. The query is
        recorded as answered, and its members are fixed for the session. Raises `Refused` for a query that this client may not
        answer, and for a row of another width than asked; a TypeError for a row that is not a vector of integers.
        """
        state, ask = self.state, self.checked_query(message)
        values = to_residues(row, ask.modulus_bits)
        if len(values) != ask.width:
            raise Refused(f"the query is for a row of {ask.width} entries, and this client's has {len(values)}.")
        bound = mask_context(state.session, state.key_list, ask, context)
        add_masks(values, *self._mask_keys(bound, ask))
        self.state = replace(state, members=ask.members, answered=(*state.answered, AnsweredQuery(ask.query, bound.digest)))
        return self._encode_frame(Masked(state.me, ask.query, bound.digest, row_to_bytes(values, ask.modulus_bits)))

    def _check_query(self, ask: Ask) -> None:
        """Raise `Refused` for a query that this client may not answer.

        It refuses a query that was answered or skipped, is beyond the session's number, does not name this client, has a member
        with which it would share a mask but whose keys never arrived, or has other members than the last one. Raises `TooFew`
        where fewer members than the threshold are left, or fewer that hold its shares than restore a secret.
        """
        state, known = self.state, {one.sender for one in self.state.key_list.entries}
        if ask.query >= state.session.queries or (state.answered and ask.query <= state.answered[-1].query):
            raise Refused(f"query {ask.query} was answered or skipped, or is beyond the session's {state.session.queries}.")
        partners = self._partners_among(ask.members)
        if state.me not in ask.members or not known.issuperset(partners):
            raise Refused("a query is not for this client, or has a member whose keys never came.")
        if state.members and ask.members != state.members:
            raise Refused("the list of members changed since the last query.")
        if len(ask.members) < state.session.threshold:
            raise TooFew(f"{len(ask.members)} members are left, and the threshold is {state.session.threshold}.")
        self._check_partners(partners)

    def _partners_among(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """The clients of `members` with which this client exchanges shares, in increasing order.

        In a session where every pair shares a mask, these are all of `members`, itself included.
        """
        return self.state.session.share_partners(self.state.me, self._all_keys_digest, members)

    @property
    def _all_keys_digest(self) -> bytes:
        """The digest (32 bytes) of the public keys of all clients; computed once for a list of keys and cached.

        In a sparse session, where this client has only its neighbours' keys, it is the digest that the server sent.
        """
        if self._digested[0] is not self.state.key_list:
            self._digested = self.state.key_list, key_digest(self.state.session, self.state.key_list)
        return self._digested[1]

    def _check_partners(self, partners: tuple[int, ...]) -> None:
        """Raise `TooFew` where `partners`, the clients that hold this client's shares, are fewer than restore a secret."""
        if len(partners) < self.state.session.shares_needed:
            raise TooFew(f"{len(partners)} of this client's neighbours are left, and {self.state.session.shares_needed} restore "
                         "its secrets.")

    def _mask_keys(self, context: MaskContext, ask: Ask) -> tuple[list[bytes], list[bytes]]:
        """(plus, minus): the keys of the masks that this client adds to its row, its own one first, and of those it subtracts.

        Of two clients, the one with the smaller number adds their common mask, and the other subtracts it. Keys are for the
        query `ask`, and bound to `context`.
        """
        me, secret, publics = self.state.me, self.state.secrets[ask.query], self._public_keys(ask.query)
        agree = make_key_agreement(secret.mask)
        others = [one for one in self._partners_among(ask.members) if one != me]
        pairs = {one: pair_mask_key(agree(publics[one]), context, me, one) for one in others}
        plus = [own_mask_key(secret.seed, context, me)] + [key for one, key in pairs.items() if me < one]
        return plus, [key for one, key in pairs.items() if me > one]

    def _public_keys(self, query: int) -> dict[int, bytes]:
        """The public mask key of each client on the list of keys, for query number `query`, by client."""
        return {one.sender: one.masking[query] for one in self.state.key_list.entries}

    def confirm(self, message: bytes) -> bytes:
        """The answer to the lists of survivors in `message`: this client's signature of them, so that all unmask the same sum.

        It signs once for a query, and records which lists. Raises `Refused` in an unsigned session, for a second signature, and
        for lists that it would not unmask.
        """
        lists = self._decode_frame(Confirm, message).lists
        answered = self._record_to_unmask(lists)
        if self._identity is None or answered.confirmed:
            raise Refused("lists were signed for this query already, or the session is not signed.")
        text = lists.digest(answered.context_digest)
        self._replace_query_record(replace(answered, confirmed=text))
        return self._encode_frame(Signed(self.state.me, lists.query, self._identity.sign(text)))

    def _record_to_unmask(self, lists: SurvivorLists) -> AnsweredQuery:
        """The record of the query that `lists` are about; raises `Refused` where this client must not release shares for them.

        It must have answered the query and not unmasked it yet, and `lists` must have it among the survivors and name exactly
        the members it masked its row for. Raises `TooFew` where fewer survivors than the threshold, or too few of its
        neighbours, are left.
        """
        state = self.state
        answered = next((one for one in state.answered if one.query == lists.query), None)
        if answered is None or answered.unmasked:
            raise Refused(f"query {lists.query} was not answered by this client, or is unmasked already: once is all it gets.")
        if state.me not in lists.alive or tuple(sorted(lists.alive + lists.dropped)) != state.members:
            raise Refused("alive and dropped are not exactly the members this client answered with, itself alive.")
        if len(lists.alive) < state.session.threshold:
            raise TooFew(f"{len(lists.alive)} rows came, and the threshold is {state.session.threshold}.")
        self._check_partners(self._partners_among(lists.alive))
        return answered

    def unmask(self, message: bytes) -> bytes:
        """The answer to the lists of survivors in `message`: shares of survivors' seeds, and of dropped clients' mask keys.

        It never gives both of one client, and only gives those it holds. The query is recorded as unmasked, so that it answers
        once. Raises `Refused` for lists that it must not unmask, boxes that do not open, or, in a signed session, lists without
        enough valid signatures; `TooFew` where too few clients survive.
        """
        state, request = self.state, self._decode_frame(Unmask, message)
        answered = self._record_to_unmask(request.lists)
        self._check_signatures(request, answered)
        held, alive = self._held_shares(request), set(request.lists.alive)
        shares = b"".join(held[one][:SIZE] if one in alive else held[one][SIZE:] for one in held)
        self._replace_query_record(replace(answered, unmasked=1))
        return self._encode_frame(Unmasked(state.me, answered.query, request.lists.digest(answered.context_digest), shares))

    def _check_signatures(self, request: Unmask, answered: AnsweredQuery) -> None:
        """In a signed session, raise `Refused` unless this client signed the lists in `request` and all signatures are valid.

        `answered` is this client's record of the query. Raises `TooFew` where there are fewer signatures than the threshold.
        Without an identity nothing is checked.
        """
        if self._identity is None:
            return
        text, session = request.lists.digest(answered.context_digest), self.state.session
        known = self._identity.with_numbered_pins(session.id, self.state.key_list.entries)
        if text != answered.confirmed or any(one.sender not in request.lists.alive or one.query != answered.query
                                             or not known.is_signature_of(one.sender, one.signature, text)
                                             for one in request.signatures):
            raise Refused("the lists are not those this client signed, or a signature of them is wrong.")
        if len(request.signatures) < session.threshold:
            raise TooFew(f"{len(request.signatures)} signed the lists, and the threshold is {session.threshold}.")

    def _held_shares(self, request: Unmask) -> dict[int, bytes]:
        """For each member whose shares this client holds: 66 bytes, a share of that member's seed, then one of its mask key.

        Those of others are decrypted from the boxes of `request`; its own, if it holds any, are in the state. Raises `Refused`
        where the boxes are for another client, are not one for each of those members, or do not open.
        """
        state, query = self.state, request.lists.query
        partners = self._partners_among(state.members)
        others = [one for one in partners if one != state.me]
        if request.to != state.me or len(request.boxes) != BOX * len(others):
            raise Refused("sealed shares are for another client, or not one for each of the others.")
        about, entries = self._all_keys_digest, {one.sender: one for one in state.key_list.entries}
        held, agree = dict.fromkeys(partners, state.secrets[query].own), make_key_agreement(state.sealing)
        for place, one in enumerate(others):
            key = box_key(agree(entries[one].sealing), about, one, state.me)
            held[one] = unseal(key, query, request.boxes[BOX * place:BOX * (place + 1)], about)
        return held

    def _replace_query_record(self, changed: AnsweredQuery) -> None:
        """Put `changed` into `state.answered` in place of the record with the same query number."""
        answered = tuple(changed if one.query == changed.query else one for one in self.state.answered)
        self.state = replace(self.state, answered=answered)

    def _encode_frame(self, message: Any) -> bytes:
        """`message`, a dataclass of `messages`, as framed bytes of this session."""
        return encode_frame(self.state.session.id, message)

    def _decode_frame(self, kind: Any, message: bytes) -> Any:
        """The message of class `kind`, a dataclass of `messages`, in the framed bytes `message` of this session.

        What a sparse session sends in a shorter form is turned back into `kind`. Raises `Refused` for anything else.
        """
        session = self.state.session
        return session.from_wire_message(decode_frame(session.wire_class(kind), message, session.id, session.max_message_bytes))
