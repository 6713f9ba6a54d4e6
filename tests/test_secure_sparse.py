"""Secure sums with few neighbours: the bounds, the graph, the contract of all secure sums, and what clients refuse.

How often the events of the bounds happen is compared with a stated error rate; sums and refusals are exact.
"""

import itertools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, hypergeom, norm

from fedtail.secure import (
    KEYS,
    ROW,
    SHARES,
    UNMASK,
    Client,
    LocalClients,
    Participant,
    Refused,
    Rounds,
    Server,
    Session,
    SparseSession,
    TooFew,
    disclosure_probability,
    fewest_neighbours,
    loss_probability,
    secure_sum,
    sparse_session,
)
from fedtail.secure.encoding import decode, encode
from fedtail.secure.frames import decode_frame, encode_bundle, encode_frame
from fedtail.secure.masks import add_masks, box_key, mask_context, own_mask_key, pair_mask_key, row_from_bytes
from fedtail.secure.messages import Ask, Confirm, KeyList, Keys, Masked, Shares, SurvivorLists, Unmask, Unmasked
from fedtail.secure.participant import ParticipantState
from fedtail.secure.primitives import make_key_agreement, unseal
from fedtail.secure.shamir import restore_secret
from fedtail.secure.sparse_graph import circle_order, clients_in_share, hypergeometric_tail, neighbours_of
from fedtail.secure.sparse_messages import Neighbours, SparseAsk, SparseUnmask
from test_secure import NEVER, assert_sums_as_modelled, carried, finished, plain, refused, seeded, words

NAMES = tuple(range(10, 34, 2))      # twelve clients; places and names differ


def few(members=NAMES, queries=1, round=0, dropped=0.1, corrupted=0.05, threshold=None):
    session = sparse_session(b"test", round, members, threshold or len(members) // 2 + 1, corrupted, dropped, queries)
    assert isinstance(session, SparseSession)
    return session


def members_of(session, **settings):
    return {one: Client(session, one, **settings) for one in session.members}


# The bounds


@pytest.mark.parametrize(("others", "marked", "drawn", "least"), [(9, 3, 4, 2), (99, 10, 12, 5), (999, 100, 46, 26), (9999, 1000, 54, 30), (20, 0, 6, 1), (20, 6, 6, 0), (20, 3, 6, 4)])
def test_tails_are_hypergeometric(others, marked, drawn, least):
    assert float(hypergeometric_tail(others, marked, drawn, least)) == pytest.approx(hypergeom.sf(least - 1, others, marked, drawn), rel=1e-8, abs=1e-300)


def parts_of(stay, half, count):
    """Into how many parts those who stay fall, each being a neighbour of who is at most `half` places away; by search."""
    left, parts = set(stay), 0
    while left:
        parts, waiting = parts + 1, [left.pop()]
        while waiting:
            one = waiting.pop()
            near = {(one + step) % count for step in range(-half, half + 1)} & left
            left -= near
            waiting += near
    return parts


@pytest.mark.parametrize(("count", "k", "corrupted", "dropped"), [(9, 4, 2, 3), (10, 4, 3, 3), (11, 6, 4, 4), (12, 4, 2, 2), (12, 2, 1, 2), (10, 6, 4, 4)])
def test_every_order_of_a_small_circle(count, k, corrupted, dropped):
    """All ways for the corrupted and the dropped to stand on it, by search: what happens is within the bounds, and not absurdly below."""
    bad = captured = apart = lost = ways = 0
    t, near = k // 2 + 1, [set(neighbours_of(one, np.arange(count), np.arange(count), k)) for one in range(count)]
    for ill in itertools.combinations(range(count), corrupted):
        healthy = [one for one in range(count) if one not in ill]
        taken = any(len(near[one] & set(ill)) >= t for one in healthy)
        for gone in itertools.combinations(healthy, dropped):      # the dropped are others than the corrupted: that is worst
            split = parts_of([one for one in healthy if one not in gone], k // 2, count) > 1
            ways, captured, apart, bad = ways + 1, captured + taken, apart + split, bad + (taken or split)
            lost += any(len(near[one] - set(gone)) < t for one in range(count))
    bound = disclosure_probability(count, k, t, corrupted, dropped)
    gaps = bound - (count - corrupted) * hypergeometric_tail(count - 1, corrupted, k, t)
    assert Fraction(bad, ways) <= bound
    assert Fraction(apart, ways) <= gaps
    assert gaps <= 60 * Fraction(apart, ways) or apart == 0
    assert disclosure_probability(count, k, t, corrupted, dropped, queries=3) == bound + 2 * gaps      # anew for each query
    assert Fraction(captured, ways) <= bound - gaps <= count * Fraction(captured, ways)
    assert Fraction(lost, ways) <= loss_probability(count, k, t, dropped) <= count * Fraction(lost, ways)


def independent_bounds(count, k, t, corrupted, dropped, queries):
    """The same in floating point, from scipy's distributions."""
    gaps = hypergeom.pmf(k, count, corrupted + dropped, k) * count * (count - 1) / 2 if corrupted + dropped >= k else 0.0
    secret = (count - corrupted) * hypergeom.sf(t - 1, count - 1, corrupted, k) + queries * gaps
    return secret, queries * count * hypergeom.cdf(t - 1, count - 1, count - 1 - dropped, k)


@pytest.mark.parametrize(("count", "gamma", "delta", "queries"), [
    (12, 0.05, 0.1, 1), (50, 0.1, 0.1, 1), (100, 0.05, 0.05, 2), (100, 0.2, 0.3, 1), (500, 0.33, 0.2, 3), (1000, 0.1, 0.3, 1), (10_000, 0.1, 0.2, 256), (10_000, 0.2, 0.05, 1), (16_384, 0.0, 0.1, 1)])
def test_the_fewest_neighbours_suffice_and_fewer_do_not(count, gamma, delta, queries):
    corrupted, dropped = clients_in_share(gamma, count), clients_in_share(delta, count)
    k, t = fewest_neighbours(count, corrupted, dropped, queries)
    assert k % 2 == 0
    assert k / 2 < t <= k < count - 1
    secret, lost = independent_bounds(count, k, t, corrupted, dropped, queries)
    assert secret <= 2**-40 * (1 + 1e-6)
    assert lost <= 2**-20 * (1 + 1e-6)
    assert float(disclosure_probability(count, k, t, corrupted, dropped, queries)) == pytest.approx(secret, rel=1e-6, abs=1e-300)
    assert float(loss_probability(count, k, t, dropped, queries)) == pytest.approx(lost, rel=1e-6, abs=1e-300)
    for fewer in range(max(2, k - 20), k, 2):
        for other in range(fewer // 2 + 1, fewer + 1):
            secret, lost = independent_bounds(count, fewer, other, corrupted, dropped, queries)
            assert secret > 2**-40 * (1 - 1e-6) or lost > 2**-20 * (1 - 1e-6)


@pytest.mark.parametrize(("bits", "harder"), [("security_bits", 60), ("correctness_bits", 40)])
def test_more_is_needed_for_more(bits, harder):
    base = fewest_neighbours(1000, 100, 100)
    assert base < fewest_neighbours(1000, 100, 100, **{bits: harder})
    for corrupted, dropped in ((200, 100), (100, 200)):
        assert base[0] < fewest_neighbours(1000, corrupted, dropped)[0]


def test_small_cohorts_and_hopeless_ones_have_every_pair():
    for members, gamma, delta, threshold in (((1, 2, 3, 4), 0.1, 0.1, 3), (tuple(range(100)), 0.1, 0.49, 51), (tuple(range(10)), 0.7, 0.1, 8)):
        session = sparse_session(b"test", 0, members, len(members) // 2 + 1, gamma, delta)
        assert type(session) is Session
        assert session.threshold == threshold      # more than half, and more than are corrupted
    for gamma, delta in ((1.0, 0.1), (-0.1, 0.1), (0.1, 0.5), (0.1, -0.1)):
        with pytest.raises(ValueError, match="corrupted must be in"):
            sparse_session(b"test", 0, NAMES, 7, gamma, delta)


def test_sums_are_over_all_but_the_share_that_may_drop_out():
    assert [few(dropped=share).threshold for share in (0.05, 0.1, 0.2)] == [11, 10, 9]
    assert few(dropped=0.2, threshold=11).threshold == 11      # fewer may leave where more have to stay
    assert clients_in_share(0.29, 100) == 29
    assert clients_in_share(0.1, 30) == 3
    assert clients_in_share(0.05, 12) == 1


# The graph


@pytest.mark.parametrize(("count", "k"), [(5, 2), (12, 6), (13, 8), (101, 40)])
def test_neighbours_are_k_others_of_each_other_and_a_circle(count, k):
    for seed in range(5):
        order, place = circle_order(bytes([seed]) * 32, count)
        near = {one: neighbours_of(one, order, place, k) for one in range(count)}
        assert all(len(set(some) - {one}) == k for one, some in near.items())
        assert all(one in near[other] for one, some in near.items() for other in some)
        steps = {(int(place[other]) - int(place[one])) % count for one, some in near.items() for other in some}
        assert steps == {step % count for step in range(-k // 2, k // 2 + 1)} - {0}


def test_the_circle_is_a_uniform_order():
    """Places of two clients over 8000 seeds: chi-square within its 1e-5 quantiles on both sides, so once in 50,000 by chance."""
    count, seeds = 6, 8000
    pairs = np.zeros((count, count))
    for seed in range(seeds):
        _, place = circle_order(seed.to_bytes(32, "big"), count)
        pairs[place[0], place[1]] += 1
    assert pairs.diagonal().sum() == 0
    cells = pairs[~np.eye(count, dtype=bool)]
    statistic = ((cells - seeds / 30) ** 2 / (seeds / 30)).sum()
    assert chi2.ppf(1e-5, 29) < statistic < chi2.ppf(1 - 1e-5, 29)


def test_what_the_bounds_count_happens_as_often_as_they_say():
    """Weak settings, 3000 orders: two frequencies within z = 4.4 of the exact tail (1e-5 each), the unions below their bounds."""
    count, k, t, corrupted, dropped, orders = 40, 6, 4, 10, 8, 3000
    captured = few_left = anybody = apart = 0
    for seed in range(orders):
        order, place = circle_order(seed.to_bytes(32, "little"), count)
        near = [neighbours_of(one, order, place, k) for one in range(corrupted, count)]      # 0..9 are corrupted, 10..17 drop
        ill = [sum(other < corrupted for other in some) for some in near]
        captured, anybody = captured + (ill[-1] >= t), anybody + (max(ill) >= t)
        few_left += sum(corrupted <= other < corrupted + dropped for other in near[-1]) > k - t
        apart += parts_of([int(place[one]) for one in range(corrupted + dropped, count)], k // 2, count) > 1
    for happened, expected in ((captured, hypergeometric_tail(count - 1, corrupted, k, t)), (few_left, hypergeometric_tail(count - 1, dropped, k, k - t + 1))):
        p = float(expected)
        assert 0.005 < p < 0.5
        assert abs(happened - orders * p) < norm.ppf(1 - 5e-6) * (orders * p * (1 - p)) ** 0.5
    alone = float((count - corrupted) * hypergeometric_tail(count - 1, corrupted, k, t))
    both = float(disclosure_probability(count, k, t, corrupted, dropped))
    assert 0 < anybody < orders * alone
    assert 0 < apart < orders * (both - alone) + 4.4 * (orders * (both - alone)) ** 0.5


def test_the_graph_follows_from_the_keys_of_everybody_and_from_the_session():
    session = few()
    graph = [session.share_holders(one, b"k" * 32) for one in NAMES]
    assert graph == [few().share_holders(one, b"k" * 32) for one in NAMES]
    assert graph != [session.share_holders(one, b"l" * 32) for one in NAMES]
    assert graph != [few(round=1).share_holders(one, b"k" * 32) for one in NAMES]
    assert all(sorted(holders.values()) == list(range(1, session.neighbours + 1)) for holders in graph)
    server, clients = Server(session), members_of(session)
    for one, client in clients.items():
        server.receive(one, client.keys())
    heard = {one: session.from_wire_message(decode_frame(Neighbours, message, session.id, 10**6)) for one, message in server.key_list().items()}
    (digest,) = {one.heard for one in heard.values()}
    assert digest == KeyList(tuple(decode_frame(Keys, clients[one].keys(), session.id, 10**6) for one in NAMES)).digest(session.id)
    for one in NAMES:
        assert [keys.sender for keys in heard[one].entries] == sorted(session.share_holders(one, digest))


# Sums: the contract of every session


@given(st.data())
@settings(max_examples=25)
def test_sums_are_plain_sums(data):
    count, bits, width = data.draw(st.integers(8, 14)), data.draw(st.integers(1, 62)), data.draw(st.integers(0, 5))
    rows = np.array(data.draw(st.lists(st.lists(st.integers(-2**63, 2**63 - 1), min_size=width, max_size=width), min_size=count, max_size=count)), np.int64)
    done = secure_sum(rows.reshape(count, width), count // 2 + 1, bits, corrupted=0.05)
    assert done.total.tolist() == plain(rows.reshape(count, width), range(count), bits)
    assert done.survivors == tuple(range(count))


@pytest.mark.parametrize("absent", ["vanish", "lose"])
def test_whoever_drops_out_at_any_exchange_the_sum_is_exact_and_with_one_too_many_there_is_none(absent):
    """Eight clients, of whom one may leave: every one at every exchange; then each of two pairs at every two exchanges."""
    rows, steps = np.arange(16).reshape(8, 2) * 1000 + 7, (KEYS, SHARES, ROW, UNMASK)
    assert few(tuple(range(8))).threshold == 7
    for one, at in itertools.product(range(8), steps):
        done = secure_sum(rows, 5, 20, corrupted=0.05, **{absent: {one: range(at, NEVER)}})
        assert done.survivors == tuple(k for k in range(8) if k != one or at > ROW)
        assert done.total.tolist() == plain(rows, done.survivors, 20)
    for pair in ((0, 1), (3, 6)):
        for leaves in itertools.product(steps, repeat=2):
            gone = {one: range(at, NEVER) for one, at in zip(pair, leaves, strict=True)}
            with pytest.raises(TooFew, match="nothing is released"):
                secure_sum(rows, 5, 20, corrupted=0.05, **{absent: gone})


@given(st.data())
@settings(max_examples=40)
def test_clients_come_and_go_over_several_queries(data):
    """Against the same model as sessions in which every pair shares a mask."""
    count, queries, bits = 12, data.draw(st.integers(1, 3)), data.draw(st.sampled_from([8, 32, 33, 62]))
    session = few(tuple(range(count)), queries, 3, dropped=0.2)
    assert loss_probability(count, session.neighbours, session.needed, count - session.threshold) == 0      # the model knows no bad luck
    misses = st.sets(st.integers(0, 1 + 2 * queries), max_size=2)
    absent = {one: data.draw(misses) for one in data.draw(st.sets(st.integers(0, count - 1), max_size=5))}
    clients = LocalClients(session.members, b"test", 2, absent)
    assert_sums_as_modelled(session, clients, absent, bits)


def test_keys_that_travel_ahead_and_participants_that_are_saved():
    """Sessions of both kinds, one after the other; every exchange starts from saved bytes alone."""
    clients = LocalClients(range(12), b"test")

    def exchange(contents):
        saved = {one: p.save() for one, p in clients.participants.items()}
        clients.participants = {one: Participant.restore(state) for one, state in saved.items()}
        assert {one: p.save() for one, p in clients.participants.items()} == saved
        return clients(contents)

    everybody = tuple(range(12))
    sessions = [few(everybody, 2), Session(b"test", 1, everybody, 7, 2), few(everybody, 2, 2), few(everybody[1:], 2, 3)]
    rounds = Rounds(exchange)
    rounds.open(sessions[0])
    for round, session in enumerate(sessions):
        if round:
            rounds.open(session)
        clients.rows = {one: np.full(2, round + one) for one in range(12)}
        for query in range(2):
            ahead = sessions[round + 1] if query == 0 and round < 3 else None
            assert rounds.sum(2, 20, ahead=ahead).total.tolist() == [sum(round + one for one in session.members)] * 2
    assert clients.exchanges == 2 + 4 * 4
    assert not clients.refused


def test_a_participant_without_such_sessions_is_saved_as_before():
    participant, session = Participant(0, b"test"), Session(b"test", 0, (0, 1, 2), 2)
    participant.answer(encode_bundle([encode_frame(session.id, session)]), lambda round, ask: None)
    (client,) = participant._clients.values()
    assert participant.save() == encode(ParticipantState(0, b"test", 2, 0, 0, (client.state,), ()))
    assert Client.restore(client.save()).state == client.state
    sparse = Client(few(), 10)
    assert Client.restore(sparse.save()).state == sparse.state


# What is secret


@pytest.mark.parametrize("bits", [16, 33, 62])
def test_masked_rows_are_uniform(bits):
    """Single rows, and sums over a client and its neighbours: each statistic within its 1e-5 quantiles on both sides, 30 of them."""
    session, width = few(), 10_000
    rows = dict.fromkeys(NAMES, np.zeros(width, int))
    clients = {one: Client(session, one, random=seeded(one)) for one in NAMES}
    server, clients, sent = carried(session, rows, bits, clients=clients)
    seen = {one: words(message, session, width, bits) for one, message in sent.items()}
    near = server._partners[10]
    for view in (seen[10], seen[32], seen[10] + sum(seen[one] for one in near), seen[10] - seen[12]):
        view = view & np.uint64(2**bits - 1)
        for low in (0, bits - 4):
            counts = np.bincount((view >> np.uint64(low)) & np.uint64(15), minlength=16)
            assert chi2.ppf(1e-5, 15) < ((counts - width / 16) ** 2 / (width / 16)).sum() < chi2.ppf(1 - 1e-5, 15)
    assert finished(server, clients).total.tolist() == [0] * width


def test_a_late_row_stays_hidden_when_its_sender_was_taken_as_dropped():
    session, width = few(), 10_000
    rows = dict.fromkeys(NAMES, np.zeros(width, int))
    clients = {one: Client(session, one, random=seeded(one)) for one in NAMES}
    server, clients, _ = carried(session, rows, 16, stop={32}, clients=clients)
    late = clients[32].masked_row(encode_frame(session.id, session.to_wire_message(Ask(0, NAMES, width, 16))), rows[32])
    query = server._query
    for one, message in server.unmask().items():
        server.receive(one, clients[one].unmask(message))
    secrets = server._restore_secrets(query)
    assert secrets[32] == clients[32].state.secrets[0].mask
    view = words(late, session, width, 16).astype(np.uint32)
    add_masks(view, [pair_mask_key(make_key_agreement(secrets[32])(server._keys[one].masking[0]), query.context, one, 32) for one in server._partners[32]], [])
    counts = np.bincount(view.astype(np.uint64) & np.uint64(15), minlength=16)
    assert chi2.ppf(1e-5, 15) < ((counts - width / 16) ** 2 / (width / 16)).sum() < chi2.ppf(1 - 1e-5, 15)
    own = own_mask_key(clients[32].state.secrets[0].seed, query.context, 32)
    add_masks(view, [], [own])
    assert not (view & np.uint32(0xFFFF)).any()                    # and that mask is all that hides it


def test_shares_go_to_neighbours_and_each_gives_one_of_two():
    """No client holds a share of who is not its neighbour; of each neighbour it gives the seed's or the mask key's."""
    session = few()
    server, clients, _ = carried(session, {one: np.array([one]) for one in NAMES}, 16, stop={14})
    requests = server.unmask()
    for one, client in clients.items():
        if one == 14:
            continue
        holders = session.share_holders(one, server._key_digest)
        held = client._held_shares(session.from_wire_message(decode_frame(SparseUnmask, requests[one], session.id, 10**6)))
        assert sorted(held) == sorted(holders)
        given = decode_frame(Unmasked, client.unmask(requests[one]), session.id, 10**6).shares
        for place, other in enumerate(sorted(holders)):
            seed, key = held[other][:33], held[other][33:]
            assert given[33 * place:33 * (place + 1)] == (key if other == 14 else seed)
        server.receive(one, encode_frame(session.id, Unmasked(one, 0, server._query.survivor_digest, given)))
    assert server.total().total.tolist() == [sum(NAMES) - 14]


def test_as_many_neighbours_as_agreed_restore_a_secret_and_no_fewer():
    session = few()
    server, clients, _ = carried(session, {one: np.array([one]) for one in NAMES}, 16)
    requests, near = server.unmask(), session.share_holders(10, server._key_digest)
    held = {point: clients[one]._held_shares(session.from_wire_message(decode_frame(SparseUnmask, requests[one], session.id, 10**6)))[10] for one, point in near.items()}
    for secret, half in ((clients[10].state.secrets[0].seed, slice(33)), (clients[10].state.secrets[0].mask, slice(33, 66))):
        for points in itertools.combinations(held, session.needed):
            assert restore_secret({point: held[point][half] for point in points}) == secret
        for points in itertools.combinations(held, session.needed - 1):
            try:
                assert restore_secret({point: held[point][half] for point in points}) != secret
            except Refused:
                continue                                           # no 32 bytes come of it


# What clients refuse


def test_a_graph_that_is_too_thin_is_refused():
    thin = SparseSession(b"test", 0, tuple(range(1000)), 900, 1, 0, 30, 17)
    with pytest.raises(Refused, match=r"with 30 neighbours each, 17 of whom restore a secret, rows are disclosed with probability up to .* where 100 of 1000 clients are "
                                      r"corrupted and 100 drop out; this client requires 2\^-40"):
        Client(thin, 0)
    Client(thin, 0, corrupted=0.03)
    Client(thin, 0, security_bits=15)
    with pytest.raises(Refused):
        Client(replace(thin, threshold=501), 0, corrupted=0.03)      # more may drop out
    with pytest.raises(Refused):
        Client(replace(thin, needed=16), 0, corrupted=0.045)
    Client(thin, 0, corrupted=0.045)
    gaps = SparseSession(b"test", 0, NAMES, 10, 1, 0, 4, 4)          # two corrupted and two dropped may split it: 2/15 for each query
    Client(gaps, 10, security_bits=2)
    with pytest.raises(Refused, match=r"probability up to 0\.27"):
        Client(replace(gaps, queries=2), 10, security_bits=2)
    participant = Participant(0, b"test", corrupted=0.1)
    answer, why = participant.answer(encode_bundle([encode_frame(thin.id, thin)]), lambda round, ask: None)
    assert answer == encode_bundle([])
    assert "rows are disclosed" in str(why[0])
    for policy in ({"corrupted": 0.03}, {"security_bits": 15}):
        assert not Participant(0, b"test", **policy).answer(encode_bundle([encode_frame(thin.id, thin)]), lambda round, ask: None)[1]
        assert not Participant.restore(participant.save(), **policy).answer(encode_bundle([encode_frame(thin.id, thin)]), lambda round, ask: None)[1]


@pytest.mark.parametrize(("change", "text"), [
    ({"signed": 1}, "a session with few neighbours cannot be signed"), ({"neighbours": 5}, "neighbours must be even"), ({"neighbours": 0}, "neighbours must be even"),
    ({"neighbours": 12, "needed": 8}, "in 2..10 for 12 members"), ({"needed": 3}, "more than half of the 6 neighbours"), ({"needed": 7}, "at most all of them"),
    ({"threshold": 6}, "more than half of the 12 members"), ({"members": (1, 1, 2)}, "in increasing order"),
])
def test_sessions_that_are_none(change, text):
    session = few()
    assert (session.neighbours, session.needed) == (6, 4)
    with pytest.raises(Refused, match=text):
        replace(session, **change)
    replace(session, neighbours=10, needed=10)
    replace(few(NAMES[:11]), neighbours=8, needed=5)


def test_an_old_client_reads_another_version_and_a_new_one_no_mixture():
    session = few()
    invitation = Server(session).invite()[10]
    assert invitation[:5] == b"fts\2\x10"                          # version 1 of the package compares the first four with fts\1
    for wrong, text in ((b"fts\1" + invitation[4:], "kind 16 are not known in version 1"), (b"fts\3" + invitation[4:], "no message of version 1 or 2")):
        answer, why = Participant(10, b"test").answer(encode_bundle([wrong]), lambda round, ask: None)
        assert answer == encode_bundle([])
        assert text in str(why[0])
    complete = Session(b"test", 0, NAMES, 7)
    client = Client(complete, 10)
    for message, text in ((SparseAsk(0, b"\xff\xf0", 1, 8), "SparseAsk came out of order: Ask is what"), (Ask(0, NAMES, 1, 8), "never came")):
        with pytest.raises(Refused, match=text):
            client.checked_query(encode_frame(complete.id, message))
    with pytest.raises(Refused, match="Ask came out of order: SparseAsk is what"):
        Client(session, 10).checked_query(encode_frame(session.id, Ask(0, NAMES, 1, 8)))


@pytest.fixture
def table():
    """Twelve clients in the first of two queries, 10 under test; the last of its neighbours has sent no row."""
    session = few(queries=2)
    clients, server = {one: Client(session, one, random=seeded(one)) for one in NAMES}, Server(session)
    for one, client in clients.items():
        server.receive(one, client.keys())
    listed = server.key_list()
    for one, message in listed.items():
        server.receive(one, clients[one].shares(message))
    near = sorted(session.share_holders(10, server._key_digest))
    sent = {}
    for one, message in server.ask(3, 16).items():
        if one != near[-1]:
            sent[one] = clients[one].masked_row(message, np.arange(3) + one)
            server.receive(one, sent[one])
    return session, clients, server, listed, near, sent


def request_to(server, one, lists):
    return encode_frame(server.session.id, server.session.to_wire_message(Unmask(one, lists, server._boxes_for(one, 0))))


def lists_without(*gone):
    return SurvivorLists(0, tuple(one for one in NAMES if one not in gone), tuple(sorted(gone)))


def test_the_request_to_unmask_may_name_as_many_dropped_as_were_agreed_and_no_more(table):
    _session, clients, server, _, near, _ = table
    far = [one for one in NAMES if one not in near and one != 10]
    refused(clients[10].unmask, request_to(server, 10, lists_without(near[0], near[1], far[0])), "9 rows came, and the threshold is 10", TooFew)
    refused(clients[10].unmask, request_to(server, 10, lists_without(10)), "itself alive")
    refused(clients[10].unmask, request_to(server, 10, SurvivorLists(0, NAMES[:11], ())), "not exactly the members")
    clients[10].unmask(request_to(server, 10, lists_without(near[0], near[1])))
    for again in (lists_without(near[0], near[1]), lists_without(), lists_without(near[2])):
        refused(clients[10].unmask, request_to(server, 10, again), "unmasked already: once is all it gets")


def test_a_client_whose_neighbours_left_gives_nothing():
    """More may leave than its neighbours can bear, with a probability that was agreed: its secrets are lost, so it answers nothing."""
    session = SparseSession(b"test", 0, NAMES, 8, 1, 0, 4, 3)
    clients = {one: Client(session, one, corrupted=0.0, security_bits=1, random=seeded(one)) for one in NAMES}
    server, clients, _ = carried(session, {one: np.array([one]) for one in NAMES}, 16, clients=clients)
    near = sorted(session.share_holders(10, server._key_digest))
    refused(clients[10].unmask, request_to(server, 10, lists_without(*near[:2])), "2 of this client's neighbours are left, and 3 restore its secrets", TooFew)
    clients[10].unmask(request_to(server, 10, lists_without(near[0])))
    fresh = {one: Client(session, one, corrupted=0.0, security_bits=1) for one in NAMES}
    other = Server(session)
    for one, client in fresh.items():
        other.receive(one, client.keys())
    listed = other.key_list()
    near = sorted(session.share_holders(10, other._key_digest))
    fresh[10].shares(listed[10])
    for one, text, kind in ((Ask(0, tuple(k for k in NAMES if k not in near[:2]), 1, 8), "2 of this client's neighbours are left", TooFew),
                            (Ask(0, NAMES[:7], 1, 8), "7 members are left, and the threshold is 8", TooFew)):
        refused(fresh[10].checked_query, encode_frame(session.id, session.to_wire_message(one)), text, kind)
    fresh[10].checked_query(encode_frame(session.id, session.to_wire_message(Ask(0, tuple(k for k in NAMES if k != near[0]), 1, 8))))


def test_too_few_neighbours_left_lose_the_sum():
    """Three of four neighbours of one client send rows and no shares: eight others have given theirs, and nothing is released."""
    session = SparseSession(b"test", 0, NAMES, 8, 1, 0, 4, 3)
    clients = {one: Client(session, one, corrupted=0.0, security_bits=1) for one in NAMES}
    server, clients, _ = carried(session, {one: np.array([one]) for one in NAMES}, 16, clients=clients)
    silent = sorted(session.share_holders(10, server._key_digest))[:2]
    for one, message in server.unmask().items():
        if one not in silent:
            server.receive(one, clients[one].unmask(message))
    with pytest.raises(TooFew, match=r"2 of client \d+'s neighbours gave their shares, and 3 restore its secret: nothing is released"):
        server.total()


def test_a_query_whose_member_is_a_neighbour_without_keys_is_refused(table):
    session, _, server, *_ = table
    client = Client(session, 10)
    other = {one: Client(session, one) for one in NAMES[1:]}
    keys = {one: decode_frame(Keys, member.keys(), session.id, 10**6) for one, member in {10: client, **other}.items()}
    digest = KeyList(tuple(keys.values())).digest(session.id)
    near = sorted(session.share_holders(10, digest))
    heard = encode_frame(session.id, Neighbours(digest, tuple(encode(keys[one]) for one in near[1:])))      # the first one's never came
    client.shares(heard)
    refused(client.checked_query, encode_frame(session.id, session.to_wire_message(Ask(0, NAMES, 3, 16))), "has a member whose keys never came")
    refused(client.checked_query, encode_frame(session.id, session.to_wire_message(Ask(0, NAMES[1:], 3, 16))), "not for this client")
    client.checked_query(encode_frame(session.id, session.to_wire_message(Ask(0, tuple(one for one in NAMES if one != near[0]), 3, 16))))
    assert server.members == NAMES


def test_lists_of_keys_are_those_of_the_graph(table):
    session, _clients, server, listed, near, _ = table
    fresh = Client(session, 10, random=seeded(10))                 # the same client, before it had heard any
    right = decode_frame(Neighbours, listed[10], session.id, 10**6)
    far = next(one for one in NAMES if one not in near and one != 10)
    stranger, own = encode(server._keys[far]), encode(server._keys[10])
    ordered = sorted([*right.keys, stranger], key=lambda one: int.from_bytes(one[:8], "big"))
    for wrong, text in ((replace(right, keys=tuple(ordered)), "is no neighbour of this client"), (replace(right, keys=(own, *right.keys)), "is no neighbour of this client"),
                        (replace(right, heard=bytes(32)), "is no neighbour of this client"), (replace(right, keys=right.keys[::-1]), "in increasing order"),
                        (replace(right, keys=(*right.keys[:2], right.keys[2][:-1])), "too early|bytes"),
                        (replace(right, keys=(encode(replace(server._keys[near[0]], masking=(), commitments=())), *right.keys[1:])), "has keys for 0 of 2 queries")):
        refused(fresh.shares, encode_frame(session.id, wrong), text)
    refused(fresh.shares, encode_frame(session.id, replace(right, keys=right.keys[:3])), "3 clients sent keys, and the threshold is 4", TooFew)
    refused(fresh.shares, encode_frame(session.id, KeyList(())), "KeyList came out of order")
    assert fresh.shares(listed[10])
    refused(fresh.shares, listed[10], "a second list of keys came; shares are given once")


def test_a_key_changed_on_the_way_excludes_its_receiver_instead_of_a_wrong_sum():
    """Found by the fuzzer: a client cannot compute the digest of keys it does not have, so it answers with one of what it received."""
    session = SparseSession(b"keys", 0, NAMES, 10, 1, 0, 4, 3)
    server, clients = Server(session), {one: Client(session, one, corrupted=0.0, security_bits=0) for one in NAMES}
    for one, client in clients.items():
        server.receive(one, client.keys())
    for one, message in server.key_list().items():
        if one == 10:
            right = decode_frame(Neighbours, message, session.id, 10**6)
            keys = [decode(Keys, each) for each in right.keys]
            wrong = replace(keys[0], masking=(bytes([9]) + bytes(31),))
            message = encode_frame(session.id, replace(right, keys=(encode(wrong), *right.keys[1:])))
            with pytest.raises(Refused, match="client 10 answers another list of keys"):
                server.receive(one, clients[one].shares(message))
        else:
            server.receive(one, clients[one].shares(message))
    asked = server.ask(3, 16)
    assert 10 not in asked
    for one, message in asked.items():
        server.receive(one, clients[one].masked_row(message, [one, 1, 0]))
    for one, message in server.unmask().items():
        server.receive(one, clients[one].unmask(message))
    done = server.total()
    assert done.survivors == tuple(one for one in NAMES if one != 10)
    assert done.total.tolist() == [sum(done.survivors), len(NAMES) - 1, 0]


def test_keys_changed_on_the_way_to_the_server_exclude_their_sender():
    session = SparseSession(b"keys", 0, NAMES, 10, 1, 0, 4, 3)
    server, clients = Server(session), {one: Client(session, one, corrupted=0.0, security_bits=0) for one in NAMES}
    for one, client in clients.items():
        keys = decode_frame(Keys, client.keys(), session.id, 10**6)
        changed = replace(keys, masking=(bytes([9]) + bytes(31),)) if one == 10 else keys
        server.receive(one, encode_frame(session.id, changed))
    for one, message in server.key_list().items():
        if one == 10:
            with pytest.raises(Refused, match="client 10 answers another list of keys"):
                server.receive(one, clients[one].shares(message))
        else:
            server.receive(one, clients[one].shares(message))
    assert 10 not in server.ask(3, 16)


def test_bits_for_members_are_exact(table):
    session, clients, server, *_ = table
    assert session.member_bits(NAMES) == b"\xff\xf0"
    for bits in (b"", b"\xff", b"\xff\xf1", b"\xff\xf8", b"\xff\xf0\0"):
        refused(clients[10].checked_query, encode_frame(session.id, SparseAsk(1, bits, 3, 16)), "a list of members is not 12 bits")
        request = decode_frame(SparseUnmask, request_to(server, 10, lists_without()), session.id, 10**6)
        refused(clients[10].unmask, encode_frame(session.id, replace(request, alive=bits)), "a list of members is not 12 bits")
    refused(clients[10].unmask, encode_frame(session.id, replace(request, dropped=b"\x80\0")), "both as alive and as dropped")
    refused(clients[10].checked_query, encode_frame(session.id, SparseAsk(1, b"\xff\xf0", 3, 63)), "rows may have up to")


def test_replays_and_messages_of_others_are_refused(table):
    session, clients, server, listed, near, sent = table
    requests = server.unmask()
    clients[10].unmask(requests[10])
    refused(clients[10].unmask, requests[10], "unmasked already")
    refused(clients[12].unmask, requests[10], "for another client|not one for each")
    refused(clients[10].checked_query, encode_frame(session.id, session.to_wire_message(Ask(0, NAMES, 3, 16))), "query 0 was answered")
    refused(clients[10].checked_query, encode_frame(session.id, session.to_wire_message(Ask(1, NAMES[:11], 3, 16))), "the list of members changed")
    refused(clients[10].confirm, encode_frame(session.id, Confirm(lists_without())), "unmasked already")
    other = few(queries=2, round=1)
    for message in (listed[12], requests[12]):
        kind = Neighbours if message is listed[12] else SparseUnmask
        moved = encode_frame(other.id, decode_frame(kind, message, session.id, 10**6))
        with pytest.raises(Refused, match="belongs to another session"):
            (clients[12].shares if kind is Neighbours else clients[12].unmask)(moved)
    for again in (sent[10], sent[12]):
        with pytest.raises(Refused):
            server.receive(10, again)
    assert [one for one in NAMES if one in requests] == [one for one in NAMES if one != near[-1]]


def test_lists_are_signed_in_no_such_session(table):
    session, clients, server, *_ = table
    with pytest.raises(Refused, match="the session is not signed"):
        clients[10].confirm(encode_frame(session.id, Confirm(lists_without())))
    with pytest.raises(Refused, match="the session is not signed"):
        server.confirm()


# Servers and neighbours that lie


def test_different_graphs_for_different_clients_are_found_out_and_give_no_sum():
    """A server that names another digest of the keys to half of the clients, each with the neighbours that follow from it."""
    session, bits = few(), 32
    server, clients = Server(session), members_of(session)
    for one, client in clients.items():
        server.receive(one, client.keys())
    listed = server.key_list()
    lied = b"another list of keys".ljust(32)
    keys = {one: encode(kept) for one, kept in server._keys.items()}
    misled = NAMES[6:]
    for one in misled:
        with pytest.raises(Refused, match="is no neighbour of this client"):      # its own neighbours under another digest
            Client.restore(clients[one].save()).shares(encode_frame(session.id, Neighbours(lied, decode_frame(Neighbours, listed[one], session.id, 10**6).keys)))
        listed[one] = encode_frame(session.id, Neighbours(lied, tuple(keys[other] for other in sorted(session.share_holders(one, lied)))))
    for one, message in listed.items():
        shares = clients[one].shares(message)
        if one in misled:
            with pytest.raises(Refused, match="answers another list of keys"):
                server.receive(one, shares)
            opened = decode_frame(Shares, shares, session.id, 10**6)
            shares = encode_frame(session.id, replace(opened, heard=session.key_confirmation(server._keys[one], server._key_lists[one], b"")))      # a server that looks away
        server.receive(one, shares)
    rows, total = {one: np.zeros(1000, int) for one in NAMES}, np.zeros(1000, np.uint32)
    for one, message in server.ask(1000, bits).items():
        masked = clients[one].masked_row(message, rows[one])
        if one in misled:
            with pytest.raises(Refused, match="has another context"):
                server.receive(one, masked)
        opened = decode_frame(Masked, masked, session.id, 10**6)
        total += np.frombuffer(opened.row, "<u4")
        add_masks(total, [], [own_mask_key(clients[one].state.secrets[0].seed, server._query.context if one not in misled else _context(clients[one], session), one)])
    assert (total == 0).sum() < 5                                   # even with every mask of one's own gone, pairs do not cancel
    counts = np.bincount(total & 15, minlength=16)
    assert chi2.ppf(1e-5, 15) < ((counts - 62.5) ** 2 / 62.5).sum() < chi2.ppf(1 - 1e-5, 15)


def _context(client, session):
    return mask_context(session, client.state.key_list, Ask(0, NAMES, 1000, 32), b"")


def test_a_server_that_chooses_the_graph_reads_a_row():
    """Why a server that departs from the protocol is not claimed against: it looks for a digest that gives a client neighbours of its own."""
    session, own = SparseSession(b"test", 0, NAMES, 11, 1, 0, 4, 3), {12, 18, 20, 26, 30}
    victim, tried = Client(session, 10, random=seeded(1)), (number.to_bytes(32, "big") for number in itertools.count())
    digest = next(one for one in tried if session.share_holders(10, one).keys() <= own)
    near = session.share_holders(10, digest)
    spies = {one: Client(session, one, random=seeded(one)) for one in near}
    keys = {one: decode_frame(Keys, spy.keys(), session.id, 10**6) for one, spy in spies.items()}
    given = decode_frame(Shares, victim.shares(encode_frame(session.id, Neighbours(digest, tuple(encode(keys[one]) for one in sorted(near))))), session.id, 10**6)
    row, announced = np.array([17, 4, 1]), decode_frame(Keys, victim.keys(), session.id, 10**6)
    sent = decode_frame(Masked, victim.masked_row(encode_frame(session.id, session.to_wire_message(Ask(0, NAMES, 3, 16))), row), session.id, 10**6)
    context = mask_context(session, victim.state.key_list, Ask(0, NAMES, 3, 16), b"")
    shares = {}
    for place, one in enumerate(sorted(near)):
        key = box_key(make_key_agreement(spies[one].state.sealing)(announced.sealing), digest, 10, one)
        shares[near[one]] = unseal(key, 0, given.boxes[82 * place:82 * (place + 1)], digest)[:33]
    seed = restore_secret(dict(list(shares.items())[:3]))
    read = row_from_bytes(sent.row, 3, 16).copy()
    pairs = {one: pair_mask_key(make_key_agreement(spy.state.secrets[0].mask)(announced.masking[0]), context, 10, one) for one, spy in spies.items()}
    add_masks(read, [], [own_mask_key(seed, context, 10), *pairs.values()])      # the victim has the smallest name, so it added them
    assert (read & 0xFFFF).tolist() == row.tolist()


def test_a_neighbour_that_lies_about_a_share_is_found_and_no_sum_comes_of_it(table):
    session, clients, server, _, near, _ = table
    given = {one: decode_frame(Unmasked, clients[one].unmask(message), session.id, 10**6) for one, message in server.unmask().items()}
    for one, opened in given.items():
        wrong = bytes(33) + opened.shares[33:] if one == near[0] else opened.shares
        server.receive(one, encode_frame(session.id, replace(opened, shares=wrong)))
    with pytest.raises(Refused, match=r"do not fit what it announced|do not belong together"):
        server.total()


def test_a_server_refuses_what_does_not_fit_the_graph(table):
    session, clients, server, listed, _near, _ = table
    given = decode_frame(Unmasked, clients[10].unmask(server.unmask()[10]), session.id, 10**6)
    for change, text in (({"shares": given.shares[33:]}, "not a share for each"), ({"shares": given.shares + bytes(33)}, "not a share for each"), ({"heard": bytes(32)}, "answers other lists")):
        with pytest.raises(Refused, match=text):
            server.receive(10, encode_frame(session.id, replace(given, **change)))
    other = Server(session)
    for one in NAMES:
        other.receive(one, Client(session, one, random=seeded(one)).keys())
    assert other.key_list() == listed
    shares = decode_frame(Shares, Client(session, 10, random=seeded(10)).shares(listed[10]), session.id, 10**6)
    for boxes in (shares.boxes[:-82], shares.boxes + bytes(82)):
        with pytest.raises(Refused, match="has not a box for each client and query"):
            other.receive(10, encode_frame(session.id, replace(shares, boxes=boxes)))


def test_sealed_shares_that_were_swapped_do_not_open(table):
    session, clients, server, *_ = table
    request = decode_frame(SparseUnmask, request_to(server, 10, lists_without()), session.id, 10**6)
    swapped = request.boxes[82:164] + request.boxes[:82] + request.boxes[164:]
    for boxes, text in ((swapped, "do not open"), (bytes(len(swapped)), "do not open"), (request.boxes[:-82], "not one for each"), (request.boxes + bytes(82), "not one for each")):
        refused(clients[10].unmask, encode_frame(session.id, replace(request, boxes=boxes)), text)


@pytest.mark.parametrize("queries", [1, 40])
def test_no_message_is_longer_than_a_receiver_allows(queries):
    session = few(tuple(range(100)), queries, corrupted=0.1, dropped=0.1)
    server, clients, _ = carried(session, {one: np.array([one]) for one in session.members}, 62)
    assert finished(server, clients).total.tolist() == [4950]
    assert session.max_message_bytes < Session(b"test", 0, session.members, 90, queries).max_message_bytes / 3
