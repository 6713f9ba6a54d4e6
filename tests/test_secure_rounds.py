"""Secure sums round after round: which messages share an exchange, all-or-nothing sums, and signed sessions."""

from dataclasses import replace

import numpy as np
import pytest

from fedtail.secure import (
    AllOrNothingClient,
    AllOrNothingRounds,
    AllOrNothingServer,
    Client,
    Identity,
    LocalClients,
    Missing,
    Participant,
    Refused,
    Rounds,
    Run,
    Server,
    Session,
    TooFew,
)
from fedtail.secure.frames import decode_bundle, decode_frame, encode_bundle, encode_frame
from fedtail.secure.masks import add_masks, own_mask_key, pair_mask_key
from fedtail.secure.messages import (
    Ask,
    AskAll,
    Confirm,
    KeyList,
    Keys,
    Masked,
    MaskedForAll,
    RunKeyList,
    RunKeys,
    Signed,
    SurvivorLists,
    Unmask,
    Unmasked,
)
from fedtail.secure.primitives import make_key_agreement, public_key
from fedtail.secure.shamir import restore_secret


def test_each_exchange_of_the_simple_schedule():
    clients = LocalClients(range(4), b"run")
    rounds = Rounds(clients)
    for round in range(3):
        rounds.open(Session(b"run", round, (0, 1, 2, 3), 3, queries=2))
        for query in range(2):
            clients.rows = {one: np.full(2, round + query + one) for one in range(4)}
            assert rounds.sum(2, 20).total.tolist() == [6 + 4 * (round + query)] * 2
    assert clients.exchanges == 3 * (2 + 2 * 2)


def test_four_exchanges_a_round_when_keys_travel_with_the_round_before():
    """Cohorts change from round to round: newcomers take part in the exchanges before with their keys only."""
    clients, cohorts = LocalClients(range(8), b"run"), [(0, 1, 2, 3), (2, 3, 4, 5, 6), (0, 1, 6, 7)]
    sessions = [Session(b"run", round, members, 3, queries=2) for round, members in enumerate(cohorts)]
    rounds, taken = Rounds(clients), []
    rounds.open(sessions[0])
    assert clients.exchanges == 2
    for round, session in enumerate(sessions):
        before = clients.exchanges
        if round:
            rounds.open(session)
        for query in range(2):
            clients.rows = {one: np.full(3, 10 * round + one) for one in range(8)}
            ahead = sessions[round + 1] if query == 0 and round + 1 < len(sessions) else None
            assert rounds.sum(3, 20, ahead=ahead).total.tolist() == [sum(10 * round + one for one in cohorts[round])] * 3
        taken.append(clients.exchanges - before)
    assert taken == [4, 4, 4]
    assert not clients.refused


def test_a_query_that_fails_does_not_spoil_the_next_round():
    clients = LocalClients(range(4), b"run", vanish={0: {2}, 1: {2}})
    first, second = (Session(b"run", round, (0, 1, 2, 3), 3) for round in range(2))
    rounds = Rounds(clients)
    rounds.open(first)
    clients.rows = {one: np.ones(1, int) for one in range(4)}
    with pytest.raises(TooFew):
        rounds.sum(1, 8, ahead=replace(second, threshold=2, members=(2, 3)))
    before = clients.exchanges
    rounds.open(replace(second, threshold=2, members=(2, 3)))
    assert clients.exchanges == before
    assert rounds.sum(1, 8).total.tolist() == [2]


def test_a_set_up_that_fails_does_not_spoil_the_sum_it_travels_with():
    clients = LocalClients(range(6), b"run", vanish={4: {2}, 5: {2}})
    first, second = Session(b"run", 0, (0, 1, 2, 3), 3), Session(b"run", 1, (3, 4, 5), 2)
    rounds = Rounds(clients)
    rounds.open(first)
    clients.rows = {one: np.ones(1, int) for one in range(6)}
    assert rounds.sum(1, 8, ahead=second).total.tolist() == [4]
    with pytest.raises(TooFew, match="1 of 3 clients sent keys"):
        rounds.open(second)


@pytest.mark.parametrize("queries", [1, 2, 3])
def test_a_client_is_done_when_its_last_query_is_unmasked(queries):
    clients = LocalClients(range(3), b"run")
    rounds = Rounds(clients)
    rounds.open(Session(b"run", 0, (0, 1, 2), 2, queries))
    clients.rows = {one: np.ones(1, int) for one in range(3)}
    members = [one for participant in clients.participants.values() for one in participant._clients.values()]
    assert [one.is_done for one in members] == [False] * 3
    for query in range(queries):
        rounds.sum(1, 8)
        assert [one.is_done for one in members] == [query == queries - 1] * 3


def test_rounds_are_opened_first():
    with pytest.raises(Refused, match=r"no round is open\. Write rounds\.open\(session\) first\."):
        Rounds(LocalClients(range(3), b"run")).sum(1, 8)


def test_an_answer_that_is_no_bundle_counts_as_none():
    clients = LocalClients(range(4), b"run")

    def exchange(contents):
        return {one: b"rubbish" if one == 3 else answer for one, answer in clients(contents).items()}

    rounds = Rounds(exchange)
    rounds.open(Session(b"run", 0, (0, 1, 2, 3), 3))
    clients.rows = {one: np.ones(1, int) for one in range(4)}
    assert rounds.sum(1, 8).survivors == (0, 1, 2)


def test_participants_saved_between_exchanges_go_on():
    """As on a node where every message starts a process: nothing but the saved bytes survives."""
    clients = LocalClients(range(4), b"run")

    def exchange(contents):
        clients.participants = {one: Participant.restore(p.save()) for one, p in clients.participants.items()}
        return clients(contents)

    rounds = Rounds(exchange)
    for round in range(2):
        rounds.open(Session(b"run", round, (0, 1, 2, 3), 3, queries=2))
        for _ in range(2):
            clients.rows = {one: np.full(2, one) for one in range(4)}
            assert rounds.sum(2, 20).total.tolist() == [6, 6]


def participant_refuses(participant, message, text):
    before = participant.save()
    answer, why = participant.answer(encode_bundle([message]), lambda round, ask: (np.zeros(ask.width, int), b""))
    assert answer == encode_bundle([])
    assert text in str(why[0])
    assert participant.save() == before


def test_invitations_that_are_refused():
    session = Session(b"run", 5, (0, 1, 2), 2)
    participant = Participant(0, b"run", minimum=2)
    for wrong, text in ((replace(session, name=b"other"), "is for another run"), (replace(session, members=(1, 2, 3)), "not among the 3 members")):
        participant_refuses(participant, encode_frame(wrong.id, wrong), text)
    participant_refuses(Participant(0, b"run", minimum=3), encode_frame(session.id, session), "requires 3 or more")
    participant_refuses(participant, encode_frame(bytes(32), session), "does not fit its own digest")
    participant_refuses(participant, encode_frame(session.id, Ask(0, (0, 1), 1, 8)), "a session that this client is not in")
    participant.answer(encode_bundle([encode_frame(session.id, session)]), lambda round, ask: None)
    participant_refuses(participant, encode_frame(session.id, session), "came already")
    participant_refuses(participant, encode_frame(session.id, Keys(1, bytes(32), (), ())), "Keys is no message of a server")
    with pytest.raises(Refused):
        participant.answer(b"rubbish", lambda round, ask: None)


def test_a_round_is_not_opened_again_after_a_row_was_sent():
    clients = LocalClients(range(3), b"run")
    rounds, session = Rounds(clients), Session(b"run", 5, (0, 1, 2), 2)
    rounds.open(session)
    clients.rows = dict.fromkeys(range(3), np.ones(1, int))
    rounds.sum(1, 8)
    for again in (replace(session, threshold=3), replace(session, round=4)):
        participant_refuses(clients.participants[0], encode_frame(again.id, again), "a round in which this client has sent a row")


def sessions_left(participant, sessions):
    """Those whose messages it no longer takes."""
    heard = [participant.answer(encode_bundle([encode_frame(one.id, KeyList(()))]), lambda round, ask: None)[1] for one in sessions]
    return [one for one, why in zip(sessions, heard, strict=True) if "not in, or no longer" in str(why[0])]


def test_a_client_is_in_one_session_of_a_round_and_in_three_unfinished_ones():
    sessions, participant = [Session(b"run", round, (0, 1, 2), 2) for round in range(5)], Participant(0, b"run")
    for count, one in enumerate(sessions, 1):
        participant.answer(encode_bundle([encode_frame(one.id, one)]), lambda round, ask: None)
        assert sessions_left(participant, sessions[:count]) == sessions[:max(0, count - 3)]
    instead = replace(sessions[3], threshold=3)                # with both, it would send two rows in one round
    participant.answer(encode_bundle([encode_frame(instead.id, instead)]), lambda round, ask: None)
    assert sessions_left(participant, [*sessions, instead]) == [sessions[0], sessions[1], sessions[3]]


def test_a_client_leaves_what_is_done_when_it_is_invited_again():
    clients, (lost, done, following) = LocalClients(range(3), b"run"), [Session(b"run", round, (0, 1, 2), 2) for round in range(3)]
    rounds = Rounds(clients)
    clients.rows = dict.fromkeys(range(3), np.ones(1, int))
    for one in (lost, done):
        rounds.open(one)
    rounds.sum(1, 8)
    rounds.open(following)
    for participant in clients.participants.values():
        assert sessions_left(participant, [lost, done, following]) == [done]
    assert rounds.sum(1, 8).total.tolist() == [3]


def test_who_refused_what_is_kept():
    clients = LocalClients(range(4), b"run", minimum=3)
    for round in range(2):
        with pytest.raises(TooFew, match="0 of 3 clients sent keys"):
            Rounds(clients).open(Session(b"run", round, (0, 1, 2), 2))
    assert [one for one, _ in clients.refused] == [0, 1, 2] * 2
    assert all("this client requires 3 or more" in str(why) for _, why in clients.refused)
    rounds = Rounds(clients)
    rounds.open(Session(b"run", 2, (0, 1, 2), 3))
    assert len(clients.refused) == 6
    assert not rounds.server.refused


# All or nothing


def all_or_nothing(count=4, minimum=2, repetitions=1, vanish=None, lose=None):
    clients = LocalClients(range(count), b"run", minimum, vanish, lose, repetitions)
    clients.rows = {one: np.arange(3) + 10 * one for one in range(count)}
    return clients, AllOrNothingRounds(clients, Run(b"run", tuple(range(count))))


def test_all_or_nothing_takes_one_exchange_a_query():
    clients, rounds = all_or_nothing()
    assert clients.exchanges == 1                                # keys, once for the run
    for round in range(3):
        for query in range(2):
            done = rounds.sum(round, query, 3, 16)
            assert done.total.tolist() == [60, 64, 68]
            assert done.survivors == (0, 1, 2, 3)
    assert clients.exchanges == 1 + 3 * 2
    assert not clients.refused


def test_rows_may_be_longer_than_all_other_messages():
    clients, rounds = all_or_nothing(count=2)
    clients.rows = {one: np.arange(5000) * (one + 1) for one in range(2)}
    assert rounds.sum(0, 0, 5000, 62).total.tolist() == [3 * entry for entry in range(5000)]


@pytest.mark.parametrize("absent", ["vanish", "lose"])
def test_a_missing_row_leaves_nothing_and_the_rest_are_asked_again(absent):
    _, rounds = all_or_nothing(**{absent: {2: {1}}})
    with pytest.raises(Missing, match="no row came from 2, and all are needed: nothing is released") as why:
        rounds.sum(0, 0, 3, 16)
    assert why.value.missing == (2,)
    done = rounds.retry()
    assert done.total.tolist() == [40, 43, 46]
    assert done.survivors == (0, 1, 3)
    assert rounds.sum(0, 1, 3, 16).total.tolist() == [60, 64, 68]      # 2 is back; the list of keys travels with its first query


def test_who_sends_no_keys_is_not_in_the_run():
    _, rounds = all_or_nothing(vanish={1: {0}})
    assert rounds.sum(0, 0, 3, 16).survivors == (0, 2, 3)


def test_all_or_nothing_rows_differ_in_every_query_round_and_attempt():
    """The same row, asked for thrice, looks different each time: masks are labelled, keys are not renewed."""
    clients, rounds = all_or_nothing()
    seen = set()

    def exchange(contents):
        answers = clients(contents)
        seen.update(decode_bundle(answers[0]))
        return answers

    rounds._exchange = exchange
    for place in ((0, 0), (0, 1), (1, 0)):
        rounds.sum(*place, 3, 62)
    rows = {decode_frame(MaskedForAll, one, rounds.server.run.id, 10**6).masked.row for one in seen}
    assert len(rows) == 3


def asked(round, query, attempt, members, width=3):
    return AskAll(round, attempt, Ask(query, members, width, 16))


def run_client(**options):
    run = Run(b"run", (0, 1, 2, 3))
    clients = {one: AllOrNothingClient(run, one, **options) for one in run.members}
    keys = RunKeyList(tuple(decode_frame(RunKeys, clients[one].keys(), run.id, 10**6) for one in run.members))
    return run, clients[0], keys


def test_what_an_all_or_nothing_client_refuses():
    run, client, keys = run_client(minimum=3, repetitions=1)
    everybody = (0, 1, 2, 3)

    def refuses(step, message, text, kind=Refused):
        before = client.state
        with pytest.raises(kind, match=text):
            step(message)
        assert client.state == before

    def answer(message):
        return client.masked_row(message, np.arange(3))

    refuses(answer, encode_frame(run.id, asked(0, 0, 0, everybody)), "whose keys never came")
    for wrong in (keys.entries[1:], (replace(keys.entries[0], public=bytes(32)), *keys.entries[1:]), (*keys.entries, replace(keys.entries[0], sender=9))):
        refuses(client.store_key_list, encode_frame(run.id, RunKeyList(tuple(wrong))), "names somebody who was not invited, or not this client")
    client.store_key_list(encode_frame(run.id, keys))
    client.store_key_list(encode_frame(run.id, keys))
    refuses(client.store_key_list, encode_frame(run.id, RunKeyList(keys.entries[:3])), "another list of keys came than before")
    refuses(answer, encode_frame(run.id, asked(0, 0, 1, everybody)), "a retry of nothing")
    refuses(answer, encode_frame(run.id, asked(0, 0, 0, (1, 2, 3))), "not for this client")
    refuses(answer, encode_frame(run.id, asked(0, 0, 0, (0, 1))), "the query has 2 members, and this client requires 3", TooFew)
    refuses(answer, encode_frame(run.id, asked(0, 0, 0, everybody, width=4)), "the query is for a row of 4")
    refuses(answer, encode_frame(bytes(32), asked(0, 0, 0, everybody)), "another session")
    answer(encode_frame(run.id, asked(5, 1, 0, everybody)))
    for again in (asked(5, 1, 0, everybody), asked(5, 1, 0, (0, 1, 2)), asked(5, 1, 1, everybody), asked(5, 1, 2, (0, 1, 2))):
        refuses(answer, encode_frame(run.id, again), "was answered; a retry is for fewer members, and at most 1 times")
    for past in (asked(4, 9, 0, everybody), asked(5, 0, 0, everybody)):
        refuses(answer, encode_frame(run.id, past), "in the past")
    answer(encode_frame(run.id, asked(5, 1, 1, (0, 1, 2))))
    run, client, keys = run_client()                             # by default rows are not said to have noise
    client.store_key_list(encode_frame(run.id, keys))
    answer(encode_frame(run.id, asked(0, 0, 0, everybody)))
    refuses(answer, encode_frame(run.id, asked(0, 0, 1, (0, 1, 2))), "at most 0 times")
    with pytest.raises(Refused, match="client 7 is not among the 4 members"):
        AllOrNothingClient(run, 7)


def test_what_an_all_or_nothing_server_refuses():
    run, client, _ = run_client()
    server = AllOrNothingServer(run)
    for step in (server.total, server.retry):
        with pytest.raises(Refused):
            step()
    with pytest.raises(TooFew, match="0 clients sent keys"):
        server.key_list()
    with pytest.raises(Refused, match="speaks for another"):
        server.receive(1, client.keys())
    server.receive(0, client.keys())
    with pytest.raises(Refused, match="sent keys already"):
        server.receive(0, client.keys())
    other = AllOrNothingClient(run, 1)
    server.receive(1, other.keys())
    listed = server.key_list()
    with pytest.raises(Refused, match="no answer is expected now"):
        server.receive(0, client.keys())
    with pytest.raises(TooFew, match="each with its keys on the list"):
        server.ask(0, 0, 3, 16, members=(0, 1, 2))
    message = server.ask(0, 0, 3, 16, b"told")[0]
    client.store_key_list(listed[0])
    odd = AllOrNothingClient.restore(client.save())
    with pytest.raises(Refused, match="has another context"):
        server.receive(0, odd.masked_row(message, np.arange(3), b"other"))
    row = client.masked_row(message, np.arange(3), b"told")
    opened = decode_frame(MaskedForAll, row, run.id, 10**6)
    for wrong, text in ((replace(opened, attempt=1), "another query or attempt"), (replace(opened, round=1), "another query or attempt")):
        with pytest.raises(Refused, match=text):
            server.receive(0, encode_frame(run.id, wrong))
    with pytest.raises(Refused, match="is no member of the query, answered already, or speaks for another"):
        server.receive(1, row)
    server.receive(0, row)
    with pytest.raises(Refused, match="answered already"):
        server.receive(0, row)
    with pytest.raises(Missing):
        server.total()


def test_a_run_is_joined_once():
    clients, rounds = all_or_nothing()
    run, invited = rounds.server.run, encode_bundle([encode_frame(rounds.server.run.id, rounds.server.run)])
    again = [clients.participants[0].answer(invited, lambda round, ask: None) for _ in range(2)]
    assert again[0] == again[1]                # nobody's keys are listed yet: the same ones again
    rounds.sum(0, 0, 3, 8)
    participant_refuses(clients.participants[0], encode_frame(run.id, run), "came already")
    other = Run(b"other", (0, 1))
    participant_refuses(Participant(0, b"run"), encode_frame(other.id, other), "is to another run")
    with pytest.raises(Refused, match="a run needs a name"):
        Run(b"", (0, 1))


# Signed sessions: a server that departs from the protocol


def known(count):
    """Identities that have pinned each other."""
    secrets = {one: bytes([one + 1]) * 32 for one in range(count)}
    pinned = {one: Identity(secret, {}).public_key for one, secret in secrets.items()}
    return {one: Identity(secret, pinned) for one, secret in secrets.items()}


@pytest.mark.parametrize("signed", [0, 1])
def test_participants_of_a_run_saved_between_exchanges_go_on(signed):
    identities = known(4) if signed else {}
    clients = LocalClients(range(4), b"run", minimum=3, vanish={2: {2}}, repetitions=2, identities=identities)
    clients.rows = {one: np.arange(3) + 10 * one for one in range(4)}

    def exchange(contents):
        saved = {one: p.save() for one, p in clients.participants.items()}
        clients.participants = {one: Participant.restore(state, identities.get(one)) for one, state in saved.items()}
        assert {one: p.save() for one, p in clients.participants.items()} == saved
        return clients(contents)

    rounds = AllOrNothingRounds(exchange, Run(b"run", (0, 1, 2, 3), signed))
    assert rounds.sum(0, 0, 3, 16).total.tolist() == [60, 64, 68]
    with pytest.raises(Missing):
        rounds.sum(0, 1, 3, 16)
    if signed:                                                        # who signs gives no retry
        with pytest.raises(Missing):
            rounds.retry()
        assert clients.refused
        assert all("a retry is for fewer members, and at most 0 times." in str(why) for _, why in clients.refused)
    else:
        assert rounds.retry().total.tolist() == [40, 43, 46]
        assert not clients.refused
    session = Session(b"run", 0, (0, 1, 2, 3), 3, signed=signed)      # and a session beside the run
    beside = Rounds(exchange)
    beside.open(session)
    assert beside.sum(3, 16).total.tolist() == [60, 64, 68]
    for again, text in ((replace(session, threshold=4), "has sent a row"), (Session(b"run", 1, (0, 1, 2), 2, signed=signed), "this client requires 3 or more")):
        participant_refuses(Participant.restore(clients.participants[0].save(), identities.get(0)), encode_frame(again.id, again), text)


def signed_session(count=7, threshold=4, queries=1, round=0):
    return Session(b"run", round, tuple(range(count)), threshold, queries, signed=1)


@pytest.mark.parametrize("lost", [(), (1,), (2,), (3,), (4,)])
def test_signed_sums_take_an_exchange_more_and_survive_drops(lost):
    clients = LocalClients(range(5), b"run", vanish={0: lost, 3: lost}, identities=known(5))
    rounds = Rounds(clients)
    clients.rows = {one: np.arange(3) + 10 * one for one in range(5)}
    rounds.open(signed_session(5, 3))
    done = rounds.sum(3, 20)
    assert done.survivors == ((1, 2, 4) if lost in ((1,), (2,)) else tuple(range(5)))
    assert done.total.tolist() == [sum(10 * one + k for one in done.survivors) for k in range(3)]
    assert clients.exchanges == 2 + 3


def test_six_exchanges_a_signed_round_of_two_queries():
    clients = LocalClients(range(4), b"run", identities=known(4))
    rounds = Rounds(clients)
    sessions = [signed_session(4, 3, queries=2, round=round) for round in range(3)]
    clients.rows = dict.fromkeys(range(4), np.ones(2, int))
    rounds.open(sessions[0])
    for round in range(2):
        before = clients.exchanges
        if round:
            rounds.open(sessions[round])
        assert rounds.sum(2, 8, ahead=sessions[round + 1]).total.tolist() == [4, 4]
        assert rounds.sum(2, 8).total.tolist() == [4, 4]
        assert clients.exchanges - before == 6


def test_swapped_keys_are_found_out():
    """A server that puts its own keys in the place of a client's, to read its shares and take its masks away."""
    session, identities = signed_session(4, 3), known(4)
    clients = {one: Client(session, one, identity=identities[one]) for one in session.members}
    entries = [decode_frame(Keys, clients[one].keys(), session.id, 10**6) for one in session.members]
    own = Client(replace(session, signed=0), 3)
    swapped = decode_frame(Keys, own.keys(), replace(session, signed=0).id, 10**6)
    another = Client(replace(session, round=9), 3, identity=identities[3])
    replayed = decode_frame(Keys, another.keys(), replace(session, round=9).id, 10**6)
    for wrong in (swapped, replace(swapped, signature=entries[3].signature), replayed, replace(entries[2], sender=3)):
        with pytest.raises(Refused, match="the keys of client 3 are not signed by the identity pinned for it"):
            clients[0].shares(encode_frame(session.id, KeyList((*entries[:3], wrong))))
    stranger = Identity(identities[0].secret, {one: key for one, key in identities[0].pinned.items() if one != 3})
    with pytest.raises(Refused, match="not signed by the identity pinned"):
        Client.restore(clients[0].save(), stranger).shares(encode_frame(session.id, KeyList(tuple(entries))))
    clients[0].shares(encode_frame(session.id, KeyList(tuple(entries))))
    with pytest.raises(Refused, match=r"this client has no identity\. Give it Identity\(secret, pinned\)\."):
        Client(session, 0)


def rows_sent(session, identities=None):
    """A session up to the rows, all of them in; the server is then the adversary."""
    clients = {one: Client(session, one, identity=(identities or {}).get(one)) for one in session.members}
    server = Server(session)
    for one in session.members:
        server.receive(one, clients[one].keys())
    for one, message in server.key_list().items():
        server.receive(one, clients[one].shares(message))
    sent = {}
    for one, message in server.ask(3, 32).items():
        sent[one] = decode_frame(Masked, clients[one].masked_row(message, np.array([1, 10, 100]) * 2**one), session.id, 10**6)
    return server, clients, sent


# Each outsider is called dropped by four of the others, everybody calls 0 and 1 alive, and every list is of four or more.
VIEWS = {0: (2, 3, 4), 1: (5, 6), 2: (3, 4, 5), 3: (4, 5, 6), 4: (5, 6, 2), 5: (6, 2, 3), 6: (2, 3, 4)}


def view(one):
    dropped = tuple(sorted(VIEWS[one]))
    return SurvivorLists(0, tuple(k for k in range(7) if k not in dropped), dropped)


def requested(server, one, lists, signatures=()):
    return encode_frame(server.session.id, Unmask(one, lists, server._boxes_for(one, 0), signatures))


def test_a_server_that_lies_about_survivors_gets_a_smaller_sum_from_unsigned_clients():
    """Why an active server is not claimed against without signatures: seven clients, threshold four, and a sum over two.

    Every client is shown four survivors or more, but not the same: four shares of each outsider's mask key come out, and of
    the seeds of 0 and 1.
    """
    session = replace(signed_session(), signed=0)
    server, clients, sent = rows_sent(session)
    shares = {one: decode_frame(Unmasked, clients[one].unmask(requested(server, one, view(one))), session.id, 10**6).shares for one in range(7)}
    told, total = server._query.context, np.zeros(3, np.uint32)

    def secret(one, wanted):
        givers = [k for k in range(7) if (one in VIEWS[k]) == wanted][:4]
        return restore_secret({k + 1: shares[k][33 * one:33 * (one + 1)] for k in givers})

    outsiders = {one: secret(one, True) for one in range(2, 7)}
    assert outsiders == {one: clients[one].state.secrets[0].mask for one in range(2, 7)}
    for one in (0, 1):
        total += np.frombuffer(sent[one].row, "<u4")
        add_masks(total, [], [own_mask_key(secret(one, False), told, one)])
        add_masks(total, [], [pair_mask_key(make_key_agreement(outsiders[k])(server._keys[one].masking[0]), told, one, k) for k in outsiders])
    assert total.tolist() == [3, 30, 300]      # the rows of 0 and 1, by themselves


def test_signed_clients_do_not_unmask_what_fewer_than_the_threshold_signed():
    identities, session = known(7), signed_session()
    server, clients, _ = rows_sent(session, identities)
    signatures = {one: decode_frame(Signed, clients[one].confirm(encode_frame(session.id, Confirm(view(one)))), session.id, 10**6) for one in range(7)}
    for one in range(7):
        agreeing = tuple(signatures[k] for k in view(one).alive if view(k) == view(one))
        everybody = tuple(signatures[k] for k in view(one).alive)
        with pytest.raises(TooFew, match=f"{len(agreeing)} signed the lists, and the threshold is 4"):
            clients[one].unmask(requested(server, one, view(one), agreeing))
        with pytest.raises(Refused, match="or a signature of them is wrong"):
            clients[one].unmask(requested(server, one, view(one), everybody))
        with pytest.raises(Refused, match="lists were signed for this query already"):
            clients[one].confirm(encode_frame(session.id, Confirm(SurvivorLists(0, tuple(range(7)), ()))))


def test_only_the_lists_that_were_signed_are_unmasked():
    identities, session = known(7), signed_session()
    server, clients, _ = rows_sent(session, identities)
    lists, other = SurvivorLists(0, tuple(range(6)), (6,)), SurvivorLists(0, tuple(range(5)), (5, 6))
    with pytest.raises(Refused, match="the lists are not those this client signed"):
        clients[0].unmask(requested(server, 0, lists))          # it has signed none
    signatures = [decode_frame(Signed, clients[one].confirm(encode_frame(session.id, Confirm(lists))), session.id, 10**6) for one in range(5)]
    for wrong in (other, SurvivorLists(0, tuple(range(7)), ())):
        with pytest.raises(Refused, match="the lists are not those this client signed"):
            clients[0].unmask(requested(server, 0, wrong, tuple(signatures)))
    forged = replace(signatures[4], sender=5)
    for wrong in ((*signatures[:3], forged), (*signatures[:3], replace(signatures[3], query=1))):
        with pytest.raises(Refused, match="or a signature of them is wrong"):
            clients[0].unmask(requested(server, 0, lists, wrong))
    clients[0].unmask(requested(server, 0, lists, tuple(signatures[1:])))


def test_a_signed_server_refuses():
    session, identities = signed_session(4, 3), known(4)
    server, clients, sent = rows_sent(session, identities)
    bare = Client(replace(session, signed=0), 1)
    with pytest.raises(Refused, match="its signature is missing or not wanted"):
        Server(session).receive(1, encode_frame(session.id, decode_frame(Keys, bare.keys(), replace(session, signed=0).id, 10**6)))
    for one in range(3):
        server.receive(one, encode_frame(session.id, sent[one]))
    with pytest.raises(Refused, match="the server is not at this step"):
        server.unmask()
    signatures = {one: clients[one].confirm(message) for one, message in server.confirm().items()}
    server.receive(0, signatures[0])
    with pytest.raises(Refused, match="or signed already"):
        server.receive(0, signatures[0])
    with pytest.raises(TooFew, match="1 of 4 clients signed the lists"):
        server.unmask()


def test_signed_keys_of_a_run():
    identities, run = known(3), Run(b"run", (0, 1, 2), signed=1)
    clients = LocalClients(range(3), b"run", identities=identities)
    clients.rows = dict.fromkeys(range(3), np.ones(2, int))
    assert AllOrNothingRounds(clients, run).sum(0, 0, 2, 8).total.tolist() == [3, 3]
    made = {one: AllOrNothingClient(run, one, identity=identities[one]) for one in run.members}
    entries = [decode_frame(RunKeys, made[one].keys(), run.id, 10**6) for one in run.members]
    swapped = replace(entries[2], public=public_key(bytes(32)))
    with pytest.raises(Refused, match="the keys of client 2 are not signed"):
        made[0].store_key_list(encode_frame(run.id, RunKeyList((*entries[:2], swapped))))
