"""Secure sums: right for every way to drop out, nothing below the threshold, rows that look like noise, and every refusal."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, norm

from fedtail.secure import (
    KEYS,
    ROW,
    SHARES,
    UNMASK,
    Client,
    LocalClients,
    Refused,
    Rounds,
    Server,
    Session,
    TooFew,
    secure_sum,
)
from fedtail.secure.frames import decode_frame, decode_invitation, encode_frame
from fedtail.secure.masks import add_masks, mask_context, pair_mask_key
from fedtail.secure.messages import (
    Ask,
    KeyList,
    Keys,
    Masked,
    Run,
    RunKeyList,
    RunKeys,
    Shares,
    Signed,
    SurvivorLists,
    Unmask,
    Unmasked,
)
from fedtail.secure.primitives import make_key_agreement

NEVER = 99


def plain(rows, survivors, bits):
    """The sum in Python's integers, the oracle."""
    return [sum(int(rows[one][place]) for one in survivors) % 2**bits for place in range(len(rows[0]))]


def session_of(count, threshold, queries=1, round=0):
    return Session(b"test", round, tuple(range(10, 10 + count)), threshold, queries)


def seeded(seed=0):
    """Bytes from a seed, for tests that must not flake."""
    return np.random.default_rng(seed).bytes


# Sums


@given(st.data())
@settings(max_examples=60)
def test_sums_are_plain_sums(data):
    count, bits, width = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 62)), data.draw(st.integers(0, 9))
    threshold = data.draw(st.integers(max(2, count // 2 + 1), count))
    entries = st.integers(-2**63, 2**63 - 1)
    rows = np.array(data.draw(st.lists(st.lists(entries, min_size=width, max_size=width), min_size=count, max_size=count)), np.int64)
    done = secure_sum(rows.reshape(count, width), threshold, bits)
    assert done.total.tolist() == plain(rows.reshape(count, width), range(count), bits)
    assert done.total.dtype == np.int64
    assert done.survivors == tuple(range(count))


@pytest.mark.parametrize("lost", [False, True])
def test_every_way_four_clients_can_drop_out(lost):
    """Each leaves before any of the four exchanges, or not: 5^4 patterns, the sum exact or nothing at all."""
    rows, threshold = np.arange(8).reshape(4, 2) * 1000 + 7, 3
    for leaves in itertools.product((KEYS, SHARES, ROW, UNMASK, NEVER), repeat=4):
        gone = {one: range(at, NEVER) for one, at in enumerate(leaves)}
        stay = [sum(at > step for at in leaves) for step in (KEYS, SHARES, ROW, UNMASK)]
        absent = {"lose": gone} if lost else {"vanish": gone}
        if min(stay) < threshold:
            with pytest.raises(TooFew, match="nothing is released"):
                secure_sum(rows, threshold, 20, **absent)
        else:
            done = secure_sum(rows, threshold, 20, **absent)
            assert done.survivors == tuple(one for one, at in enumerate(leaves) if at > ROW)
            assert done.total.tolist() == plain(rows, done.survivors, 20)


def modelled(count, threshold, queries, absent):
    """Who is summed in each query, by the definition: None for nothing; the exchanges are counted as they take place."""
    def here(names):
        return [one for one in names if next_one not in absent.get(one, ())]

    sums, next_one = [], 0
    keyed = here(range(count))
    if len(keyed) < threshold:
        return None
    next_one = 1
    members, next_one = here(keyed), 2
    for _ in range(queries):
        if len(members) < threshold:
            sums.append(None)
            continue
        alive, next_one = here(members), next_one + 1
        if len(alive) < threshold:
            sums.append(None)
            continue
        givers, next_one = here(alive), next_one + 1
        sums.append(alive if len(givers) >= threshold else None)
    return sums


def assert_sums_as_modelled(session, clients, absent, bits):
    """The queries of a session of clients 0, 1, ... some of whom are `absent` in some exchanges: who stays, and their exact sums."""
    count = len(session.members)
    rounds, expected = Rounds(clients), modelled(count, session.threshold, session.queries, absent)
    if expected is None:
        with pytest.raises(TooFew):
            rounds.open(session)
        return
    rounds.open(session)
    for query, alive in enumerate(expected):
        clients.rows = {one: np.arange(5) * 2**40 + one + 100 * query for one in range(count)}
        if alive is None:
            with pytest.raises(TooFew):
                rounds.sum(5, bits)
        else:
            done = rounds.sum(5, bits)
            assert done.survivors == tuple(alive)
            assert done.total.tolist() == plain(clients.rows, alive, bits)


@given(st.data())
@settings(max_examples=120)
def test_clients_come_and_go_over_several_queries(data):
    count, queries, bits = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 3)), data.draw(st.sampled_from([8, 31, 32, 33, 62]))
    threshold = data.draw(st.integers(max(2, count // 2 + 1), count))
    misses = st.sets(st.integers(0, 1 + 2 * queries), max_size=2)
    vanish, lose = ({one: data.draw(misses) for one in range(count)} for _ in range(2))
    absent = {one: vanish[one] | lose[one] for one in range(count)}
    session = Session(b"test", 3, tuple(range(count)), threshold, queries)
    clients = LocalClients(session.members, b"test", threshold, vanish, lose)
    assert_sums_as_modelled(session, clients, absent, bits)


def test_a_million_entries_and_blocks():
    rows = np.random.default_rng(0).integers(0, 2**50, (3, 1_000_000))
    assert (secure_sum(rows, 2, 55, vanish={1: range(ROW, NEVER)}).total == (rows[0] + rows[2]) % 2**55).all()


# Below the threshold, and what the server sees


def carried(session, rows, bits, stop=None, clients=None, context=b""):
    """A session by hand, with all messages in view; a client in `stop` sends no row. Returns server, clients and rows as sent."""
    server = Server(session)
    clients = clients or {one: Client(session, one) for one in session.members}
    for one in session.members:
        server.receive(one, clients[one].keys())
    for one, message in server.key_list().items():
        server.receive(one, clients[one].shares(message))
    sent = {}
    for one, message in server.ask(len(next(iter(rows.values()))), bits, context).items():
        if one not in (stop or ()):
            sent[one] = clients[one].masked_row(message, rows[one], context)
            server.receive(one, sent[one])
    return server, clients, sent


def finished(server, clients):
    for one, message in server.unmask().items():
        server.receive(one, clients[one].unmask(message))
    return server.total()


def test_with_one_answer_too_few_nothing_is_released():
    session = session_of(5, 3)
    rows = {one: np.full(4, one) for one in session.members}
    server, clients, _ = carried(session, rows, 16, stop={14})
    asked = server.unmask()
    for one in (10, 11):
        server.receive(one, clients[one].unmask(asked[one]))
    with pytest.raises(TooFew, match="2 of 5 clients gave their shares, and the threshold is 3: nothing is released"):
        server.total()
    server.receive(12, clients[12].unmask(asked[12]))
    assert server.total().total.tolist() == [46] * 4


def words(sent, session, width, bits):
    data = decode_frame(Masked, sent, session.id, 10**8).row
    size = len(data) // width
    return np.array([int.from_bytes(data[k * size:(k + 1) * size], "little") for k in range(width)], dtype=np.uint64)


@pytest.mark.parametrize("bits", [5, 16, 32, 33, 62])
def test_masked_rows_are_uniform(bits):
    """Single rows and sums of fewer than all, of clients whose rows are all zero: ones, pairs of bits, bytes and correlation.

    Each statistic is compared with its 1e-5 quantile on both sides; some 200 of them over all cases: a good generator fails
    with probability 0.4%, and the randomness is seeded, so it does not flake.
    """
    session, width = session_of(4, 3), 20_000
    rows = dict.fromkeys(session.members, np.zeros(width, int))
    clients = {one: Client(session, one, random=seeded(one)) for one in session.members}
    server, clients, sent = carried(session, rows, bits, clients=clients)
    seen = {one: words(message, session, width, bits) for one, message in sent.items()}
    views = [*seen.values(), seen[10] + seen[11], seen[10] - seen[12], seen[10] + seen[11] + seen[12]]
    for view in views:
        view = view & np.uint64(2**bits - 1)
        for low in {0, bits - 4, bits // 2}:
            if low + 4 <= bits:
                counts = np.bincount((view >> np.uint64(low)) & np.uint64(15), minlength=16)
                statistic = ((counts - width / 16) ** 2 / (width / 16)).sum()
                assert chi2.ppf(1e-5, 15) < statistic < chi2.ppf(1 - 1e-5, 15)
        scaled = view.astype(float) / 2**bits - (1 - 2.0**-bits) / 2
        for lag in (1, 2, 7):
            correlation = (scaled[lag:] * scaled[:-lag]).mean() / scaled.var() * np.sqrt(width - lag)
            assert abs(correlation) < norm.ppf(1 - 1e-5)
    assert finished(server, clients).total.tolist() == [0] * width


def test_a_late_row_stays_hidden_when_its_sender_was_counted_as_dropped():
    """The server then holds the sender's mask key, and its row: the mask that it added alone still hides it."""
    session, width = session_of(4, 3), 20_000
    rows = dict.fromkeys(session.members, np.zeros(width, int))
    clients = {one: Client(session, one, random=seeded(one)) for one in session.members}
    server, clients, _ = carried(session, rows, 16, stop={13}, clients=clients)
    late = clients[13].masked_row(encode_frame(session.id, Ask(0, session.members, width, 16)), rows[13])
    query = server._query
    for one, message in server.unmask().items():
        server.receive(one, clients[one].unmask(message))
    with pytest.raises(Refused, match="Masked came out of order"):
        server.receive(13, late)
    secrets = server._restore_secrets(query)
    assert secrets[13] == clients[13].state.secrets[0].mask      # the server can take all pairs away
    view = words(late, session, width, 16).astype(np.uint32)
    pairs = [pair_mask_key(make_key_agreement(secrets[13])(server._keys[one].masking[0]), query.context, one, 13) for one in (10, 11, 12)]
    add_masks(view, pairs, [])                                   # 13 has the largest name, so it subtracted them
    counts = np.bincount(view.astype(np.uint64) & np.uint64(15), minlength=16)
    assert chi2.ppf(1e-5, 15) < ((counts - width / 16) ** 2 / (width / 16)).sum() < chi2.ppf(1 - 1e-5, 15)


def test_told_something_else_a_client_spoils_the_sum_and_is_found_out():
    session, bits = session_of(4, 3), 32
    rows = {one: np.zeros(1000, int) for one in session.members}
    server, clients, sent = carried(session, rows, bits, stop={13}, context=b"threshold 0.5")
    ask = encode_frame(session.id, Ask(0, session.members, 1000, bits))
    other = clients[13].masked_row(ask, rows[13], b"threshold 0.7")
    with pytest.raises(Refused, match="client 13 has another context than this server"):
        server.receive(13, other)
    honest = decode_frame(Masked, sent[10], session.id, 10**6)
    lied = replace(decode_frame(Masked, other, session.id, 10**6), context_digest=honest.context_digest)      # a server that looks away gets garbage
    server.receive(13, encode_frame(session.id, lied))
    request = {one: decode_frame(Unmask, message, session.id, 10**6) for one, message in server.unmask().items()}
    for one in session.members[:3]:
        server.receive(one, clients[one].unmask(encode_frame(session.id, request[one])))
    total = server.total().total
    assert (total == 0).sum() < 5                                # 1000 zeros were summed; by chance one in 4e6 is
    counts = np.bincount(total & 15, minlength=16)
    assert chi2.ppf(1e-5, 15) < ((counts - 62.5) ** 2 / 62.5).sum() < chi2.ppf(1 - 1e-5, 15)


@pytest.mark.parametrize("change", ["context", "width", "bits", "members", "round", "threshold", "name", "query", "keys"])
def test_every_thing_told_changes_the_masks(change):
    """Two clients, told all but one thing alike, add masks that do not cancel."""
    session, keys = session_of(5, 3, queries=3), KeyList((Keys(10, bytes(32), (), ()),))
    ask = Ask(0, session.members, 8, 16)
    said = (session, keys, ask, b"model")
    other = {"context": (session, keys, ask, b"another"), "width": (session, keys, replace(ask, width=9), b"model"),
             "bits": (session, keys, replace(ask, modulus_bits=17), b"model"),
             "members": (session, keys, replace(ask, members=session.members[:4]), b"model"),
             "round": (replace(session, round=1), keys, ask, b"model"),
             "threshold": (replace(session, threshold=4), keys, ask, b"model"),
             "name": (replace(session, name=b"other"), keys, ask, b"model"),
             "query": (session, keys, replace(ask, query=1), b"model"),
             "keys": (session, KeyList((Keys(11, bytes(32), (), ()),)), ask, b"model")}[change]
    assert pair_mask_key(b"s" * 32, mask_context(*said), 10, 11) == pair_mask_key(b"s" * 32, mask_context(*said), 11, 10)
    assert pair_mask_key(b"s" * 32, mask_context(*said), 10, 11) != pair_mask_key(b"s" * 32, mask_context(*other), 10, 11)


def test_keys_are_fresh_for_each_query_and_client():
    session = session_of(4, 3, queries=3)
    made = [Client(session, one).state for one in session.members]
    secrets = [key for one in made for key in (one.sealing, *(k for s in one.secrets for k in (s.mask, s.seed)))]
    assert len(set(secrets)) == len(secrets) == 4 * 7


# What a client refuses


@pytest.fixture
def table():
    """A session of five in which the first query is under way, with client 10 under test; 14 has sent no row."""
    session = session_of(5, 3, queries=2)
    rows = {one: np.arange(3) + one for one in session.members}
    server, clients, sent = carried(session, rows, 16, stop={14})
    requests = {one: decode_frame(Unmask, message, session.id, 10**6) for one, message in server.unmask().items()}
    return session, clients, requests, server, sent


def lists(alive, dropped, query=0):
    return SurvivorLists(query, tuple(alive), tuple(dropped))


def refused(step, message, text, kind=Refused):
    """The step refuses with this text, and the client is as before."""
    client = step.__self__
    before = client.state
    with pytest.raises(kind, match=text):
        step(message)
    assert client.state == before


def test_a_second_unmask_request_is_refused(table):
    session, clients, requests, *_ = table
    clients[10].unmask(encode_frame(session.id, requests[10]))
    refused(clients[10].unmask, encode_frame(session.id, requests[10]), "unmasked already: once is all it gets")
    other = replace(requests[10], lists=lists((10, 11, 12), (13, 14)))
    refused(clients[10].unmask, encode_frame(session.id, other), "unmasked already")


def test_overlapping_lists_are_refused(table):
    session, clients, requests, *_ = table
    bad = SurvivorLists.__new__(SurvivorLists)
    bad.__dict__.update(query=0, alive=(10, 11, 12, 13), dropped=(13, 14))
    refused(clients[10].unmask, encode_frame(session.id, replace(requests[10], lists=bad)), "both as alive and as dropped")


@pytest.mark.parametrize(("alive", "dropped"), [
    ((10, 11, 12, 13), ()), ((10, 11, 12), (14,)), ((10, 11, 12, 13, 14), (15,)), ((10, 11, 12, 13), (14, 15)), ((11, 12, 13), (10, 14)), ((), ()),
])
def test_lists_that_are_not_the_members_answered_with_are_refused(table, alive, dropped):
    session, clients, requests, *_ = table
    message = encode_frame(session.id, replace(requests[10], lists=lists(alive, dropped)))
    refused(clients[10].unmask, message, "not exactly the members this client answered with, itself alive")


def test_fewer_survivors_than_the_threshold_are_refused(table):
    session, clients, requests, *_ = table
    message = encode_frame(session.id, replace(requests[10], lists=lists((10, 11), (12, 13, 14))))
    refused(clients[10].unmask, message, "2 rows came, and the threshold is 3", TooFew)


def test_a_query_that_was_not_answered_is_not_unmasked(table):
    session, clients, requests, *_ = table
    refused(clients[14].unmask, encode_frame(session.id, replace(requests[10], to=14)), "query 0 was not answered by this client")
    message = encode_frame(session.id, replace(requests[10], lists=lists((10, 11, 12, 13), (14,), query=1)))
    refused(clients[10].unmask, message, "query 1 was not answered")


def test_boxes_for_another_or_damaged_ones_are_refused(table):
    session, clients, requests, *_ = table
    for wrong, text in ((replace(requests[11], to=10), "do not open"), (requests[11], "are for another client"),
                        (replace(requests[10], boxes=requests[10].boxes[:-1]), "not one for each of the others"),
                        (replace(requests[10], boxes=bytes(len(requests[10].boxes))), "do not open")):
        refused(clients[10].unmask, encode_frame(session.id, wrong), text)
    clients[10].unmask(encode_frame(session.id, requests[10]))          # and the right one is still answered


def ask_refused(client, session, ask, text, kind=Refused):
    before = client.state
    with pytest.raises(kind, match=text):
        client.masked_row(encode_frame(session.id, ask), np.arange(3))
    assert client.state == before


def test_a_query_is_answered_once_and_never_an_earlier_one(table):
    session, clients, *_ = table
    ask = Ask(0, session.members, 3, 16)
    ask_refused(clients[10], session, ask, "query 0 was answered")
    clients[10].masked_row(encode_frame(session.id, replace(ask, query=1)), np.arange(3))
    ask_refused(clients[10], session, replace(ask, query=1), "query 1 was answered")
    ask_refused(clients[10], session, replace(ask, query=2), "beyond the session's 2")
    clients[14].masked_row(encode_frame(session.id, replace(ask, query=1)), np.arange(3))
    ask_refused(clients[14], session, ask, "answered or skipped")


def test_a_changed_list_of_members_is_refused(table):
    session, clients, *_ = table
    ask_refused(clients[10], session, Ask(1, session.members[:4], 3, 16), "the list of members changed since the last query")


def test_who_is_asked_must_be_known_and_enough(table):
    session, *_ = table
    fresh = session_of(5, 3, round=7)
    clients = {one: Client(fresh, one) for one in fresh.members}
    heard = encode_frame(fresh.id, KeyList(tuple(decode_frame(Keys, clients[one].keys(), fresh.id, 10**6) for one in (10, 11, 12, 13))))
    ask_refused(clients[10], fresh, Ask(0, (10, 11, 12), 3, 16), "whose keys never came")      # nobody's did yet
    clients[10].shares(heard)
    ask_refused(clients[10], fresh, Ask(0, (10, 11, 12, 14), 3, 16), "whose keys never came")
    ask_refused(clients[10], fresh, Ask(0, (11, 12, 13), 3, 16), "not for this client")
    ask_refused(clients[10], fresh, Ask(0, (10, 11), 3, 16), "2 members are left, and the threshold is 3", TooFew)
    ask_refused(clients[10], fresh, Ask(0, (10, 11, 12), 4, 16), "the query is for a row of 4 entries, and this client's has 3")
    ask_refused(clients[10], session, Ask(0, (10, 11, 12), 3, 16), "belongs to another session")


def test_lists_of_keys_are_refused_unless_they_fit():
    session = session_of(4, 3)
    clients = {one: Client(session, one) for one in session.members}
    keys = [decode_frame(Keys, clients[one].keys(), session.id, 10**6) for one in session.members]
    stranger = replace(keys[0], sender=99)
    for entries, text, kind in (((*keys, stranger), "was not invited", Refused), (keys[1:], "not this client", Refused),
                                ((replace(keys[0], sealing=bytes(32)), *keys[1:]), "with the keys it sent", Refused),
                                (keys[:2], "2 clients sent keys, and the threshold is 3", TooFew),
                                ((*keys[:3], replace(keys[3], masking=(), commitments=())), "keys for 0 of 1 queries", Refused),
                                ((*keys[:3], replace(keys[3], sealing=bytes(32))), "agrees on zero", Refused)):
        refused(clients[10].shares, encode_frame(session.id, KeyList(tuple(entries))), text, kind)
    clients[10].shares(encode_frame(session.id, KeyList(tuple(keys))))
    refused(clients[10].shares, encode_frame(session.id, KeyList(tuple(keys))), "a second list of keys came")


@pytest.mark.parametrize(("count", "threshold"), [(4, 2), (5, 2), (4, 1), (4, 5), (4, 0), (1, 1)])
def test_thresholds_are_more_than_half(count, threshold):
    with pytest.raises(Refused, match=r"more than half of the|needs 2\.\."):
        session_of(count, threshold)


def test_sessions_say_what_they_need():
    with pytest.raises(Refused, match=r"threshold must be at least 2 and more than half of the 10 members, at most all of them; got 5\. Write 6 or more\."):
        session_of(10, 5)
    for change in ({"name": b""}, {"name": b"x" * 65}, {"queries": 0}, {"queries": 257}, {"signed": 2}):
        with pytest.raises(Refused, match="a session needs a name of"):
            replace(session_of(4, 3), **change)
    for members in ((1, 3, 2), (1, 1, 2)):
        with pytest.raises(Refused, match="in increasing order, each once"):
            replace(session_of(3, 2), members=members)


def test_limits_are_themselves_allowed():
    assert len(session_of(2**14, 2**13 + 1).members) == 2**14
    with pytest.raises(Refused, match=r"needs 2\.\.16384 members, got 16385"):
        session_of(2**14 + 1, 2**13 + 1)
    for change in ({"name": b"x"}, {"name": b"x" * 64}, {"queries": 256}, {"signed": 1}, {"threshold": 4}):
        replace(session_of(4, 3), **change)


@pytest.mark.parametrize(("count", "queries"), [(2, 1), (5, 3), (300, 256)])
def test_a_message_may_be_as_long_as_the_longest_and_no_longer(count, queries):
    """A key and a commitment of 32 bytes and a box of two shares of 33 bytes, sealed with 16, for each query and member; 256 for each besides."""
    session = session_of(count, count // 2 + 1, queries)
    longest = 1024 + count * (256 + (32 + 32 + 2 * 33 + 16) * queries)
    assert session.max_message_bytes == longest
    assert Run(b"test", session.members).max_message_bytes == 1024 + 256 * count
    frame = len(encode_frame(session.id, Shares(10, bytes(32), b"")))
    decode_frame(Shares, encode_frame(session.id, Shares(10, bytes(32), bytes(longest - frame))), session.id, longest)
    with pytest.raises(Refused, match=f"a message has {longest + 1} bytes where at most {longest} are needed"):
        decode_frame(Shares, encode_frame(session.id, Shares(10, bytes(32), bytes(longest - frame + 1))), session.id, longest)


def test_an_invitation_may_be_as_long_as_for_all_members_and_more():
    for opened in (session_of(2**14, 2**13 + 1), Run(b"x" * 64, tuple(range(2**14)))):
        assert decode_invitation(type(opened), encode_frame(opened.id, opened)) == opened
    long = encode_frame(bytes(32), Shares(0, bytes(32), bytes(2**19)))
    with pytest.raises(Refused, match=f"a message has {len(long)} bytes where at most {1024 + 16 * 2**14} are needed"):
        decode_invitation(Session, long)


@pytest.mark.parametrize("names", [(2, 1), (1, 1), (1, 3, 2)])
def test_every_list_of_names_is_in_order_and_names_nobody_twice(names):
    keys = [Keys(one, bytes(32), (bytes(32),), (bytes(32),)) for one in names]
    signed = [Signed(one, 0, bytes(64)) for one in names]
    lists = SurvivorLists(0, (1, 2, 3), ())
    for make, what in ((lambda: SurvivorLists(0, names, (9,)), "survivors"), (lambda: SurvivorLists(0, (9,), names), "dropped"), (lambda: Ask(0, names, 1, 8), "members"),
                       (lambda: Run(b"x", names), "members"), (lambda: KeyList(tuple(keys)), "senders in a list of keys"),
                       (lambda: RunKeyList(tuple(RunKeys(one, bytes(32)) for one in names)), "senders in a list of keys"),
                       (lambda: Unmask(1, lists, b"", tuple(signed)), "signers")):
        with pytest.raises(Refused, match=f"{what} must be in increasing order, each once"):
            make()


def test_runs_rows_and_keys_have_limits_that_are_allowed():
    Run(b"x", (0, 1)), Run(b"x" * 64, (3, 4), signed=1)
    for name, members, signed in ((b"", (0, 1), 0), (b"x" * 65, (0, 1), 0), (b"x", (0,), 0), (b"x", (), 0), (b"x", tuple(range(2**14 + 1)), 0), (b"x", (0, 1), 2)):
        with pytest.raises(Refused, match=r"a run needs a name of 1\.\.64 bytes and 2\.\.16384 members"):
            Run(name, members, signed)
    for width, bits, entry in ((0, 1, 1), (2**28, 8, 1), (5, 9, 2), (5, 32, 4), (5, 33, 5), (2**28, 62, 8)):
        assert Ask(0, (1, 2), width, bits).row_bytes == width * entry
    for width, bits in ((1, 0), (1, 63), (2**28 + 1, 8)):
        with pytest.raises(Refused, match=f"rows may have up to 268435456 entries modulo 2.1..2.62; the query is for {width} modulo 2.{bits}"):
            Ask(0, (1, 2), width, bits)
    for size in (0, 64):
        Keys(1, bytes(32), (bytes(32),), (bytes(32),), bytes(size))
        RunKeys(1, bytes(32), bytes(size))
    for size in (1, 63, 65):
        with pytest.raises(Refused, match="a signature of 64 bytes or none"):
            Keys(1, bytes(32), (bytes(32),), (bytes(32),), bytes(size))
        with pytest.raises(Refused, match="a signature has 64 bytes, or there is none"):
            RunKeys(1, bytes(32), bytes(size))
    with pytest.raises(Refused, match="a commitment for each mask key"):
        Keys(1, bytes(32), (bytes(32),), ())


@pytest.mark.parametrize(("count", "queries"), [(2, 256), (12, 40)])
def test_no_message_of_a_session_is_longer_than_a_receiver_allows(count, queries):
    """Keys for every query, and boxes of shares for every query and member, are the longest."""
    session = session_of(count, count // 2 + 1, queries)
    server, clients, _ = carried(session, {one: np.array([one]) for one in session.members}, 62)
    assert finished(server, clients).total.tolist() == [sum(session.members)]


def test_a_client_hides_among_its_own_minimum():
    with pytest.raises(Refused, match="the session's threshold is 3, and this client requires 4 or more"):
        Client(session_of(4, 3), 10, minimum=4)
    with pytest.raises(Refused, match="client 9 is not among the 4 members"):
        Client(session_of(4, 3), 9)


# What a server refuses


def server_refuses(server, sender, message, text):
    with pytest.raises(Refused, match=text):
        server.receive(sender, message)


def test_a_server_refuses_what_is_out_of_order_repeated_or_from_another():
    session, other = session_of(4, 3, queries=2), session_of(4, 3, queries=2, round=1)
    server, clients = Server(session), {one: Client(session, one) for one in session.members}
    for step in (server.unmask, server.total):
        with pytest.raises(Refused, match="no query is under way"):
            step()
    with pytest.raises(TooFew, match="0 of 4 clients sent keys"):
        server.key_list()
    with pytest.raises(Refused, match="cannot be asked"):
        server.ask(3, 16)
    server.receive(10, clients[10].keys())
    server_refuses(server, 10, clients[10].keys(), "sent its keys already")
    server_refuses(server, 11, clients[10].keys(), "a message from client 11 says that it is from 10")
    server_refuses(server, 11, Client(other, 11).keys(), "belongs to another session")
    server_refuses(server, 99, encode_frame(session.id, Keys(99, bytes(32), (bytes(32),) * 2, (bytes(32),) * 2)), "client 99 was not invited")
    server_refuses(server, 11, encode_frame(session.id, Keys(11, bytes(32), (), ())), "keys for 0 of 2 queries")
    for one in (11, 12, 13):
        server.receive(one, clients[one].keys())
    listed = server.key_list()
    with pytest.raises(Refused, match="the server is not at this step"):
        server.key_list()
    server_refuses(server, 10, clients[10].keys(), "Keys came out of order")
    shares = {one: clients[one].shares(message) for one, message in listed.items()}
    server.receive(10, shares[10])
    server_refuses(server, 10, shares[10], "or its shares already")
    opened = decode_frame(Shares, shares[11], session.id, 10**6)
    server_refuses(server, 11, encode_frame(session.id, replace(opened, heard=bytes(32))), "answers another list of keys")
    server_refuses(server, 11, encode_frame(session.id, replace(opened, boxes=b"")), "not a box for each")
    for one in (11, 12, 13):
        server.receive(one, shares[one])
    asked = server.ask(3, 16)
    server_refuses(server, 10, shares[10], "Shares came out of order")
    row = clients[10].masked_row(asked[10], np.arange(3))
    server.receive(10, row)
    server_refuses(server, 10, row, "answered this one already")
    server_refuses(server, 11, row + bytes(10**5), "where at most")
    opened = decode_frame(Masked, clients[11].masked_row(asked[11], np.arange(3)), session.id, 10**6)
    server_refuses(server, 11, encode_frame(session.id, replace(opened, query=1)), "answers another query")
    server_refuses(server, 11, encode_frame(session.id, replace(opened, row=opened.row + b"\0")), "a row has 7 bytes where 3 entries modulo")
    with pytest.raises(TooFew, match="1 of 4 clients sent a row"):
        server.unmask()
    with pytest.raises(Refused, match="the session is not signed"):
        server.confirm()
    server.receive(11, encode_frame(session.id, opened))
    server.receive(12, clients[12].masked_row(asked[12], np.arange(3)))
    requests = server.unmask()
    given = {one: clients[one].unmask(message) for one, message in requests.items()}
    opened = decode_frame(Unmasked, given[10], session.id, 10**6)
    for change, text in (({"query": 1}, "answers another query"), ({"heard": bytes(32)}, "answers other lists"),
                         ({"shares": b""}, "not a share for each"), ({"shares": b"\xff" * len(opened.shares)}, "not a number of the field")):
        server_refuses(server, 10, encode_frame(session.id, replace(opened, **change)), text)
    for one in (10, 11, 12):
        server.receive(one, given[one])
    server_refuses(server, 10, given[10], "gave its shares already")
    assert server.total().total.tolist() == [0, 3, 6]
    server_refuses(server, 10, given[10], "no answer is expected now")


def test_a_wrong_share_is_found_and_no_sum_comes_of_it(table):
    session, clients, requests, server, _ = table
    given = {one: decode_frame(Unmasked, clients[one].unmask(encode_frame(session.id, requests[one])), session.id, 10**6) for one in requests}
    server.receive(10, encode_frame(session.id, replace(given[10], shares=bytes(len(given[10].shares)))))
    for one in (11, 12):
        server.receive(one, encode_frame(session.id, given[one]))
    with pytest.raises(Refused, match=r"do not fit what it announced|do not belong together"):
        server.total()


def test_every_kind_of_message_says_why_it_is_refused(table):
    session, clients, requests, *_ = table
    good = encode_frame(session.id, requests[10])
    for message, text in ((b"", "no message of version 1"), (good[:-1], "damaged"), (good[:20], "no message of version 1"), (b"ftt" + good[3:], "no message"),
                          (good[:3] + b"\3" + good[4:], "no message of version 1 or 2"), (good[:3] + b"\2" + good[4:], "kind 9 are not known in version 2"), (good[:4] + b"\xee" + good[5:], "kind 238 are not known"),
                          (good + b"\0", "damaged"), ("text", "no message"), (good[:60] + bytes([good[60] ^ 1]) + good[61:], "damaged"),
                          (good[:9] + bytes([good[9] ^ 1]) + good[10:], "another session"), (good + bytes(10**6), "where at most"),
                          (encode_frame(session.id, Ask(0, (1,), 1, 1)), "Ask came out of order: Unmask is what is expected now")):
        refused(clients[10].unmask, message, text)


@pytest.mark.parametrize(("width", "bits"), [(3, 0), (3, 63), (2**28 + 1, 8)])
def test_widths_and_moduli_have_limits(width, bits):
    with pytest.raises(Refused, match="rows may have up to"):
        Ask(0, (1, 2), width, bits)
