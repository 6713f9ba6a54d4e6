"""All-or-nothing secure aggregation, one exchange for each query: pairwise masks only, keys agreed once for a whole run.

For few, reliable sites. No secret is shared, so nobody's masks can be removed: if a row is missing there is no sum. A retry with
the rest is for rows with fresh noise only, and clients refuse one unless they were made with `repetitions`.

Why: the masks of a query cancel as soon as all its rows are in, whatever anybody does in between. So a row that comes late gives
the server the sum S of the first attempt, which nobody can take back; a retry over the others gives their sum R. If each of them
sent the same row twice, S - R is the late row, and other masks for the retry change nothing, since both sums are released without
them. Hence either there is no R, or rows differ between attempts. With fresh noise S and R are two releases, each with the
planned noise and both charged to the privacy budget; S - R is computed from them, and reveals no more than both together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedtail.deprecated import with_old_names
from fedtail.secure.encoding import U16, U32, U64, Key, Refused, TooFew, decode, encode
from fedtail.secure.frames import decode_frame, encode_frame
from fedtail.secure.identity import Identity, checked_identity, refuse_if_all_others_collude
from fedtail.secure.masks import add_masks, pair_mask_key, row_from_bytes, row_to_bytes, run_mask_context, to_residues, word_dtype
from fedtail.secure.messages import Ask, AskAll, Masked, MaskedForAll, Run, RunKeyList, RunKeys
from fedtail.secure.primitives import KEY, Randomness, make_key_agreement, public_key, system
from fedtail.secure.sum_server import Contents, Sum


class Missing(TooFew):
    """Some members did not answer, so there is no sum; `missing` names them."""

    def __init__(self, missing: tuple[int, ...]):
        """`missing`: the members whose rows did not arrive, in increasing order."""
        super().__init__(f"no row came from {', '.join(map(str, missing))}, and all are needed: nothing is released. Rows with "
                         "fresh noise may be asked for again, from the rest.")
        self.missing = missing


@dataclass(frozen=True)
class AllOrNothingState:
    """The state of a client in a run."""

    run: Run
    me: U64
    minimum: U32
    repetitions: U16
    secret: Key
    key_list: RunKeyList = RunKeyList(())
    last: tuple[AskAll, ...] = ()           # the last query it answered


@with_old_names
class AllOrNothingClient:
    """A client of all-or-nothing secure aggregation.

    keys() -> store_key_list(list of keys) -> for each query: masked_row(ask, row, context).

    It answers queries with `minimum` members or more, each once, with at most `repetitions` retries, each over fewer members.
    Rows of a retry must carry fresh noise: without noise leave `repetitions` at 0.
    """

    def __init__(self, run: Run, me: int, minimum: int = 2, repetitions: int = 0, identity: Identity | None = None,
                 random: Randomness = system):
        """Client number `me` of `run`, with a secret key drawn from `random`.

        It will refuse queries of fewer than `minimum` members (never fewer than 2), and more than `repetitions` retries of one.
        Raises `Refused` where it is no member, and where the run is signed and there is no `identity`, or the other way round.
        """
        if me not in run.members:
            raise Refused(f"client {me} is not among the {len(run.members)} members of the run.")
        self.state = AllOrNothingState(run, me, max(minimum, 2), repetitions, random(KEY))
        self._identity = checked_identity(run, identity)

    @classmethod
    def restore(cls, saved: bytes, identity: Identity | None = None) -> AllOrNothingClient:
        """The client that `save` wrote; `identity` is not saved and is given anew.

        Keep one copy only: an older one would answer again what was answered already. Raises `Refused` where `saved` does not
        decode, or the run does not suit the identity.
        """
        client = cls.__new__(cls)
        client.state = decode(AllOrNothingState, saved)
        client._identity = checked_identity(client.state.run, identity)
        return client

    def save(self) -> bytes:
        """The state as bytes, for `restore`, with the secret key, without the identity: store it where only this client reads."""
        return encode(self.state)

    def keys(self) -> bytes:
        """The message with this client's public key, in answer to the invitation; the same at every call."""
        return encode_frame(self.state.run.id, self._make_keys())

    def _make_keys(self) -> RunKeys:
        """The `RunKeys` of this client: its public key for the run, and a signature where it has an identity."""
        keys = RunKeys(self.state.me, public_key(self.state.secret))
        return keys if self._identity is None else self._identity.sign_keys(self.state.run.id, keys)

    def store_key_list(self, message: bytes) -> None:
        """Store the list of all clients' public keys in the framed `message`; there is no answer, and it may come again.

        Raises `Refused` for another list than before, for one without this client's key as it sent it, with clients that are no
        members, or, in a signed run, without valid signatures.
        """
        heard, run = decode_frame(RunKeyList, message, self.state.run.id, self.state.run.max_message_bytes), self.state.run
        entries = {one.sender: one for one in heard.entries}
        if self.state.key_list.entries and heard != self.state.key_list:
            raise Refused("another list of keys came than before: keys are agreed once for a run.")
        if entries.get(self.state.me) != self._make_keys() or not entries.keys() <= set(run.members):
            raise Refused("a list of keys names somebody who was not invited, or not this client with the key it sent.")
        if self._identity is not None:
            self._identity.check_signatures(run.id, heard.entries)
        self.state = replace(self.state, key_list=heard)

    def checked_query(self, message: bytes) -> AskAll:
        """The `AskAll` in the framed `message`, for a caller that is about to compute the row.

        Raises `Refused` where this client may not answer it.
        """
        asked = decode_frame(AskAll, message, self.state.run.id, self.state.run.max_message_bytes)
        self._check_query(asked)
        return asked

    def masked_row(self, message: bytes, row: Any, context: bytes = b"") -> bytes:
        """Answer a query: the message with `row`, a vector of integers, under masks shared with each of the other members.

        `context` is what the server broadcast besides; only its digest is sent. The query is recorded as the last one answered.
        Raises `Refused` for a query that this client may not answer, and for a row of another width than asked; a TypeError for
        a row that is not a vector of integers.
        """
        state, asked = self.state, self.checked_query(message)
        values, ask, me = to_residues(row, asked.ask.modulus_bits), asked.ask, state.me
        if len(values) != ask.width:
            raise Refused(f"the query is for a row of {ask.width} entries, and this client's has {len(values)}.")
        bound = run_mask_context(state.run, state.key_list, asked, context)
        publics = {one.sender: one.public for one in state.key_list.entries}
        agree = make_key_agreement(state.secret)
        pairs = {one: pair_mask_key(agree(publics[one]), bound, me, one) for one in ask.members if one != me}
        add_masks(values, [key for one, key in pairs.items() if me < one], [key for one, key in pairs.items() if me > one])
        self.state = replace(state, last=(asked,))
        masked = Masked(me, ask.query, bound.digest, row_to_bytes(values, ask.modulus_bits))
        return encode_frame(state.run.id, MaskedForAll(asked.round, asked.attempt, masked))

    def _check_query(self, asked: AskAll) -> None:
        """Raise `Refused` where this client may not answer the query `asked`, and `TooFew` where `asked` has too few members.

        It refuses a query that does not name it, has a member whose keys never arrived, precedes the last one it answered, or
        whose other members may all collude; and a retry of any query but the last, out of turn, over no fewer members, or beyond
        `repetitions`. Fewer than `minimum` members are too few.
        """
        refuse_if_all_others_collude(len(asked.ask.members), self._identity)
        state, members = self.state, asked.ask.members
        if state.me not in members or not {one.sender for one in state.key_list.entries}.issuperset(members):
            raise Refused("a query is not for this client, or has a member whose keys never came.")
        if len(members) < state.minimum:
            raise TooFew(f"the query has {len(members)} members, and this client requires {state.minimum} or more.")
        last = state.last[0] if state.last else None
        if last is not None and query_position(asked) == query_position(last):
            if asked.attempt != last.attempt + 1 or asked.attempt > state.repetitions or not set(members) < set(last.ask.members):
                raise Refused(f"query {asked.ask.query} of round {asked.round} was answered; a retry is for fewer members, and "
                              f"at most {state.repetitions} times. Rows with fresh noise may be asked for again: repetitions=1.")
        elif asked.attempt or (last is not None and query_position(asked) < query_position(last)):
            raise Refused(f"query {asked.ask.query} of round {asked.round} is a retry of nothing, or in the past.")


@with_old_names
class AllOrNothingServer:
    """The server of all-or-nothing secure aggregation, for a run.

    invite() -> key_list() -> for each query: ask(...), total(), or retry() where a member is missing.
    """

    def __init__(self, run: Run):
        """A server that expects the public keys of the members of `run`; nothing is sent yet."""
        self.run = run
        self._keys: dict[int, RunKeys] = {}
        self._list: RunKeyList | None = None
        self._asked: AskAll | None = None
        self.refused: list[tuple[int, Refused]] = []      # what came and was not taken, from whom

    @property
    def members_with_keys(self) -> tuple[int, ...]:
        """The clients that sent keys, in increasing order: the possible members of a query."""
        return tuple(sorted(self._keys))

    def receive(self, sender: int, message: bytes) -> None:
        """Take the answer `message` of a client: its public key until `key_list` is called, then its masked row.

        `sender` is the client it came from by the transport. Raises `Refused`, without any change, for a message that is not
        expected now, is repeated, does not fit what was asked, or names another sender.
        """
        if self._list is None:
            keys = decode_frame(RunKeys, message, self.run.id, self.run.max_message_bytes)
            if keys.sender != sender or sender not in self.run.members or sender in self._keys:
                raise Refused(f"client {sender} was not invited, sent keys already, or speaks for another.")
            self._keys[sender] = keys
            return
        if self._asked is None:
            raise Refused("no answer is expected now: the query is done, and the next has not been asked.")
        most_bytes = self.run.max_message_bytes + self._asked.ask.row_bytes
        self._receive_masked_row(sender, decode_frame(MaskedForAll, message, self.run.id, most_bytes))

    def invite(self) -> Contents:
        """For each member of the run, the message that invites it to send its public key."""
        return self._same_message_for(self.run.members, self.run)

    def key_list(self) -> Contents:
        """For each client that sent keys, the message with all public keys; from now on no other client can join.

        Raises `TooFew` where fewer than 2 sent keys, and at a second call.
        """
        if self._list is not None or len(self._keys) < 2:
            raise TooFew(f"{len(self._keys)} clients sent keys, or the list is out already; it goes out once, to 2 or more.")
        self._list = RunKeyList(tuple(self._keys[one] for one in sorted(self._keys)))
        return self._same_message_for(sorted(self._keys), self._list)

    def ask(self, round: int, query: int, width: int, modulus_bits: int, context: bytes = b"",
            members: tuple[int, ...] | None = None) -> Contents:
        """For each member, the message of a query of this round: a row of `width` entries modulo 2^modulus_bits.

        `members`, in increasing order, are all clients that sent keys, unless given; `context` must be what was broadcast to
        them. A query that has not ended is given up. Raises `TooFew` for fewer than 2 members, one without keys, or before
        `key_list`.
        """
        members = tuple(sorted(self._keys)) if members is None else members
        return self._begin_query(AskAll(round, 0, Ask(query, members, width, modulus_bits)), context)

    def retry(self, context: bytes = b"") -> Contents:
        """For each member that answered, the message of a retry over these members, whose rows must have fresh noise.

        `context` must be what is broadcast with the retry. The rows that arrived are discarded. Raises `Refused` where no query
        is under way or no member is missing; raises `TooFew` where fewer than 2 answered.
        """
        if self._asked is None or not self.missing_members:
            raise Refused("there is nothing to retry: no query is under way, or no member is missing.")
        ask = replace(self._asked.ask, members=tuple(sorted(self._alive)))
        return self._begin_query(replace(self._asked, attempt=self._asked.attempt + 1, ask=ask), context)

    def _begin_query(self, asked: AskAll, context: bytes) -> Contents:
        """For each member, the message of the query or retry `asked`; sets the sum to zero and gives up an open query.

        `context` is what was broadcast with it. Raises `TooFew` for fewer than 2 members, one that is not on the list of keys,
        or where there is no list yet.
        """
        if self._list is None or not self._keys.keys() >= set(asked.ask.members) or len(asked.ask.members) < 2:
            raise TooFew("2 or more members are needed, each with its keys on the list.")
        self._asked, self._context = asked, run_mask_context(self.run, self._list, asked, context)
        self._total, self._alive = np.zeros(asked.ask.width, word_dtype(asked.ask.modulus_bits)), set[int]()
        return self._same_message_for(asked.ask.members, asked)

    def _receive_masked_row(self, sender: int, came: MaskedForAll) -> None:
        """Add `came`, a member's masked row, to the total of the query, and the member to those that answered.

        Raises `Refused` where it answers another query or attempt, is no member or answered before, names another sender than
        `sender`, has another context than the server, or has another width or an entry beyond the modulus.
        """
        asked, masked = self._asked, came.masked
        if asked is None or (came.round, masked.query, came.attempt) != (*query_position(asked), asked.attempt):
            raise Refused(f"client {sender} answers another query or attempt.")
        if masked.sender != sender or sender not in asked.ask.members or sender in self._alive:
            raise Refused(f"client {sender} is no member of the query, answered already, or speaks for another.")
        if masked.context_digest != self._context.digest:
            raise Refused(f"client {sender} has another context than this server: other members, keys or broadcast.")
        self._total += row_from_bytes(masked.row, asked.ask.width, asked.ask.modulus_bits)
        self._alive.add(sender)

    @property
    def missing_members(self) -> tuple[int, ...]:
        """The members that have not answered the current query, in increasing order; empty where there is no query."""
        return () if self._asked is None else tuple(one for one in self._asked.ask.members if one not in self._alive)

    def total(self) -> Sum:
        """The `Sum` over all members of the query, which ends it.

        Raises `Missing` where a row has not arrived, and the query goes on; raises `Refused` where no query is under way.
        """
        if self._asked is None:
            raise Refused("no query is under way. Ask first.")
        if self.missing_members:
            raise Missing(self.missing_members)
        asked, self._asked = self._asked, None
        mask = self._total.dtype.type((1 << asked.ask.modulus_bits) - 1)
        return Sum((self._total & mask).astype(np.int64), asked.ask.members)

    def _same_message_for(self, names: Any, message: Any) -> Contents:
        """By client, for all of `names`: the framed bytes of `message`, the same object for everybody."""
        return dict.fromkeys(names, encode_frame(self.run.id, message))


def query_position(asked: AskAll) -> tuple[int, int]:
    """(round, query number) of `asked`: as tuples these order the queries of a run in time; a retry has the same as its query."""
    return asked.round, asked.ask.query
