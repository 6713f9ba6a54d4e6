"""Signed sessions: no downgrade to unsigned ones, thresholds against colluding clients, and the channel and nodes that use them."""

from dataclasses import replace

import attack_signed_downgrade as departing
import numpy as np
import pytest
from typer.testing import CliRunner

import fedtail
from fedtail.channel import SignedGraph
from fedtail.cli import app
from fedtail.deployment.keys import make_identity, read_identity
from fedtail.deployment.settings import NodeSettings
from fedtail.deployment.site import Site
from fedtail.secure import (
    AllOrNothingClient,
    Client,
    Identity,
    LocalClients,
    Participant,
    Refused,
    Rounds,
    Run,
    Session,
    TooFew,
    signed_threshold,
    sparse_session,
)
from fedtail.secure.frames import decode_frame, encode_bundle, encode_frame
from fedtail.secure.messages import Ask, AskAll, KeyList, Keys

from remote_cases import LOCAL, PEOPLE, TASK, Sites, params_of

UNSIGNED = "the session is not signed, and this client has an identity: it answers signed sessions only."
METHOD = fedtail.fedavg(30, **LOCAL)
CHANNEL = fedtail.SecureChannel(20, minimum_contributors=3)


def own_identities(count, colluding=0, numbered=True):
    """Identities that have pinned each other, by number or as a tuple of keys in another order."""
    made = [Identity(bytes([one + 1]) * 32, ()) for one in range(count)]
    publics = [one.public_key for one in made]
    pinned = dict(enumerate(publics)) if numbered else tuple(reversed(publics))
    return {one: Identity(identity.secret, pinned, colluding) for one, identity in enumerate(made)}


@pytest.mark.parametrize("invitation", [Session(b"run", 0, tuple(range(7)), 4), sparse_session(b"run", 0, tuple(range(200)), 101, 0.1, 0.1), Run(b"run", tuple(range(7)))])
def test_a_client_with_an_identity_joins_nothing_unsigned(invitation):
    identity = own_identities(7)[0]
    participant = Participant(0, b"run", identity=identity)
    before = participant.save()
    answer, refused = participant.answer(encode_bundle([encode_frame(invitation.id, invitation)]), lambda *_: None)
    assert (answer, [str(why) for why in refused]) == (encode_bundle([]), [UNSIGNED])
    assert participant.save() == before
    bare = Participant(0, b"run")                                     # and what it joined before it had one, it leaves
    assert bare.answer(encode_bundle([encode_frame(invitation.id, invitation)]), lambda *_: None)[0] != encode_bundle([])
    restored = Participant.restore(bare.save(), identity)
    assert restored.save() == participant.save()
    assert Participant.restore(bare.save()).save() == bare.save()


def test_a_client_restored_with_an_identity_is_not_in_an_unsigned_session():
    client = Client(Session(b"run", 0, (0, 1, 2), 2), 0)
    with pytest.raises(Refused, match=UNSIGNED):
        Client.restore(client.save(), own_identities(3)[0])


def test_the_attacks_of_a_departing_server_and_why_each_fails():
    assert departing.sum_over_two({}) == [3, 30, 300]
    with pytest.raises(Refused, match=UNSIGNED):
        departing.sum_over_two(departing.identities())
    assert departing.row_by_collusion(4, departing.identities()) == [1, 10, 100]      # 2t = n + c: one too low
    with pytest.raises(Refused, match=r"the signed session is 4, and of 7 members, 1 of whom may collude with the server, this client requires 5"):
        departing.row_by_collusion(4, departing.identities(colluding=1))
    with pytest.raises(TooFew, match="4 signed the lists, and the threshold is 5"):
        departing.row_by_collusion(5, departing.identities(colluding=1))


@pytest.mark.parametrize("members", range(2, 13))
def test_the_threshold_is_the_smallest_for_which_no_two_lists_can_be_signed(members):
    """By search over how the honest clients are divided between two lists; colluding ones sign both."""
    for colluding in range(members):
        honest = members - colluding
        least = next(t for t in range(1, 2 * members) if not any(min(one, honest - one) + colluding >= t for one in range(honest + 1)))
        assert signed_threshold(members, colluding) == max(least, members // 2 + 1)
        assert 2 * signed_threshold(members, colluding) > members + colluding >= 2 * (signed_threshold(members, colluding) - 1)


@pytest.mark.parametrize("colluding", [0, 1, 2, 3])
def test_clients_check_the_threshold_against_those_who_may_collude(colluding):
    identity, needed = own_identities(7, colluding)[0], signed_threshold(7, colluding)
    for threshold in range(4, 8):
        session = Session(b"run", 0, tuple(range(7)), threshold, signed=1)
        if threshold < needed:
            with pytest.raises(Refused, match=f"this client requires {needed} or more"):
                Client(session, 0, identity=identity)
        else:
            Client(session, 0, identity=identity)
    with pytest.raises(ValueError, match="colluding must be 0 or more, got -1"):
        replace(identity, colluding=-1)


@pytest.mark.parametrize("colluding", [1, 2, 3])
def test_a_client_whose_fellows_may_all_collude_gives_no_row(colluding):
    identity, members = own_identities(7, colluding)[0], tuple(range(colluding + 1))
    threshold = signed_threshold(len(members), colluding)
    with pytest.raises(Refused, match=f"Sum over {colluding + 2} or more"):
        Client(Session(b"run", 0, members, threshold, signed=1), 0, identity=identity)
    with pytest.raises(Refused, match=f"Sum over {colluding + 2} or more"):
        AllOrNothingClient(Run(b"run", members, signed=1), 0, identity=identity)
    more = (*members, colluding + 1)
    Client(Session(b"run", 0, more, signed_threshold(len(more), colluding), signed=1), 0, identity=identity)
    run = Run(b"run", more, signed=1)
    client = AllOrNothingClient(run, 0, identity=identity)
    with pytest.raises(Refused, match=f"Sum over {colluding + 2} or more"):
        client.checked_query(encode_frame(run.id, AskAll(0, 0, Ask(0, members, 3, 16))))


def test_a_node_with_an_identity_has_no_answers_in_the_clear():
    with pytest.raises(ValueError, match=r"with masked_only=False it would answer in the clear\. Leave one of the two out\."):
        Site(lambda: None, masked_only=False, identity=own_identities(3)[0])


@pytest.mark.parametrize("colluding", [1, 2])
def test_signed_sums_with_colluding_clients_go_on_when_others_drop_out(colluding):
    needed = signed_threshold(7, colluding)
    clients = LocalClients(range(7), b"run", identities=own_identities(7, colluding, numbered=False), vanish={0: range(2, 9), 3: range(3, 9)})
    clients.rows, rounds = {one: np.full(2, 1 << one) for one in range(7)}, Rounds(clients)
    rounds.open(Session(b"run", 0, tuple(range(7)), needed, signed=1))
    done = rounds.sum(2, 20)
    assert done.survivors == (1, 2, 3, 4, 5, 6)
    assert done.total.tolist() == [126, 126]
    clients.vanish = {one: range(99) for one in range(7 - needed + 1)}
    with pytest.raises(TooFew, match=f"{needed - 1} of 7 clients sent keys"):
        rounds.open(Session(b"run", 1, tuple(range(7)), needed, signed=1))


def test_keys_pinned_without_numbers_are_each_somebody_elses():
    """Where the server gives the numbers, it cannot give one identity two of them, nor bring in a stranger."""
    session, known = Session(b"run", 0, (0, 1, 2, 3), 3, signed=1), own_identities(4, numbered=False)
    clients = {one: Client(session, one, identity=known[one]) for one in session.members}
    twin = Client(session, 3, identity=known[2])                      # the identity of 2 once more, under another number
    stranger = Client(session, 3, identity=Identity(bytes([99]) * 32, known[0].pinned))
    entries = [decode_frame(Keys, clients[one].keys(), session.id, 10**6) for one in session.members]
    for wrong in (twin, stranger):
        listed = KeyList((*entries[:3], decode_frame(Keys, wrong.keys(), session.id, 10**6)))
        with pytest.raises(Refused, match="the keys of client 3 are not signed by the identity pinned for it"):
            clients[0].shares(encode_frame(session.id, listed))
    clients[0].shares(encode_frame(session.id, KeyList(tuple(entries))))
    assert not known[0].is_signature_of(0, b"", b"")                          # numbers are known from a list of keys only


def trained(fleet=None, channel=CHANNEL, rounds=2):
    return params_of(fedtail.train(METHOD, TASK, **({"population": PEOPLE} if fleet is None else {"fleet": fleet}), rounds=rounds, channel=channel))


def test_a_signed_channel_in_the_simulator_gives_the_same_model():
    signed = replace(CHANNEL, graph=SignedGraph(colluding=3))
    assert trained(channel=signed).equal(trained(channel=fedtail.IntegerChannel()))
    assert signed.label == ("sums over at least 20 clients signed against a server that departs from the protocol with up to 3 colluding "
                            "participants, masked, all in one process")
    assert [SignedGraph(3).threshold(30, least) for least in (2, 17, 20)] == [17, 17, 20]
    with pytest.raises(TooFew, match="29 of 30 participants may collude: nobody is left to hide among"):
        SignedGraph(29).session(b"run", 0, tuple(range(30)), 20)
    with pytest.raises(ValueError, match="colluding must be 0 or more, got -1"):
        SignedGraph(-1)


def test_sessions_of_the_simulator_are_signed_and_their_clients_check_the_threshold(monkeypatch):
    opened = []
    monkeypatch.setattr(Rounds, "open", lambda self, session, open=Rounds.open: (opened.append((session, self._exchange)), open(self, session)))
    trained(channel=replace(CHANNEL, graph=SignedGraph(colluding=25)), rounds=1)
    session, clients = opened[0]
    assert (session.signed, session.threshold) == (1, 28)             # more than (30 + 25) / 2, not the channel's 20
    assert {one._identity.colluding for one in clients.participants.values()} == {25}


class SignedSites(Sites):
    """Nodes with identities that have pinned each other; the server knows none of it."""

    def __init__(self, nodes=5, colluding=0, known=None, **settings):
        self.known = known or own_identities(nodes, colluding, numbered=False)
        super().__init__(nodes, **settings)

    def fresh(self, node):
        site = super().fresh(node)
        site._identity = self.known[node]
        return site


@pytest.mark.parametrize("schedule", ["simple", "ahead"])
@pytest.mark.parametrize("restart", [False, True])
def test_nodes_sign_and_the_model_is_the_same(schedule, restart):
    signed = replace(CHANNEL, graph=SignedGraph(colluding=1))
    found = trained(SignedSites(colluding=1, restart=restart).fleet(schedule=schedule), signed)
    assert found.equal(trained(Sites().fleet(schedule=schedule)))
    assert not found.equal(TASK.params())


@pytest.mark.filterwarnings("ignore::fedtail.algorithm.RoundLostWarning")
def test_signed_nodes_go_on_when_one_is_gone_and_stop_when_too_few_are_left():
    for gone, answered in ((1, 24), (2, 0)):                          # of 5 nodes with 1 colluding, 4 must stay
        fleet = SignedSites(colluding=1, vanish={node: range(2, 99) for node in range(gone)}).fleet(schedule="simple")
        trained(fleet, replace(CHANNEL, threshold=2, graph=SignedGraph(colluding=1)), rounds=1)
        assert fleet.reports[0].answered == answered


@pytest.mark.filterwarnings("ignore::fedtail.algorithm.RoundLostWarning")
def test_nodes_with_identities_refuse_a_server_that_does_not_want_signatures():
    """The downgrade: to an unsigned session, to few neighbours, to an all-or-nothing run, to too low a threshold."""
    for schedule in ("simple", "ahead", "all-or-nothing"):
        sites = SignedSites()
        fleet = sites.fleet(schedule=schedule)
        assert trained(fleet, rounds=1).equal(TASK.params())          # no round is held
        assert set(fleet.reports[0].problems.values()) == {UNSIGNED}
        assert not sites.woken                                        # and no node computed anything
    fleet = SignedSites(colluding=2).fleet(schedule="simple")
    assert trained(fleet, replace(CHANNEL, threshold=2, graph=SignedGraph(colluding=0)), rounds=1).equal(TASK.params())
    assert set(fleet.reports[0].problems.values()) == {"the threshold of the signed session is 3, and of 5 members, 2 of whom may collude with the "
                                                       "server, this client requires 4 or more."}
    with pytest.raises(ValueError, match="a server may call a node missing and retry without it, which signatures do not prevent"):
        trained(SignedSites().fleet(schedule="all-or-nothing"), replace(CHANNEL, graph=SignedGraph()))


def test_a_node_reads_its_identity_from_its_own_settings(tmp_path):
    said = CliRunner().invoke(app, ["deploy", "identity", str(tmp_path / "north")])
    assert said.exit_code == 0, said.output
    assert CliRunner().invoke(app, ["deploy", "identity", str(tmp_path / "north")]).exit_code != 0      # keys are made once
    publics = [said.output.strip(), make_identity(tmp_path / "south")]
    assert (tmp_path / "north" / "identity.pub").read_text() == publics[0] + "\n"
    assert Identity(read_identity(tmp_path / "north" / "identity"), ()).public_key.hex() == publics[0]
    assert (tmp_path / "north" / "identity").stat().st_mode & 0o077 == 0
    text = 'name = "north"\nexperiment = "experiment.toml"\ndata = "d.npz"\n'
    signs = f'identity = "identity"\npinned = {publics}\ncolluding = 1\n'.replace("'", '"')
    (tmp_path / "north" / "node.toml").write_text(text + signs)
    identity = NodeSettings.read(tmp_path / "north" / "node.toml").make_site()._identity
    assert (identity.public_key.hex(), [one.hex() for one in identity.pinned], identity.colluding) == (publics[0], publics, 1)
    (tmp_path / "north" / "node.toml").write_text(text)
    assert NodeSettings.read(tmp_path / "north" / "node.toml").make_site()._identity is None
    for wrong, message in (('identity = "identity"\n', "Write identity and pinned"), ("colluding = 1\n", "Write identity and pinned"),
                           (signs.replace("colluding = 1", "colluding = -1"), "colluding must be 0 or more nodes, got -1"),
                           (signs.replace(publics[1], "zz"), "a pinned identity must be 64 hexadecimal digits, as in identity.pub; got 'zz'"),
                           (signs.replace('"identity"', '"key"'), "there is no identity"), (signs.replace('"identity"', '"node.toml"'), "holds no identity key")):
        (tmp_path / "north" / "node.toml").write_text(text + wrong)
        with pytest.raises(ValueError, match=message):
            NodeSettings.read(tmp_path / "north" / "node.toml").make_site()


@pytest.mark.filterwarnings("ignore::fedtail.algorithm.RoundLostWarning")
def test_an_identity_is_replaced_while_the_others_pin_both_and_the_old_one_is_refused_afterwards(tmp_path):
    """By the steps of docs/howto/deploy-node.md: new key, pinned beside the old one, used, and the old one no longer pinned."""
    names, signed = "abcde", replace(CHANNEL, graph=SignedGraph(colluding=1))
    publics = {name: make_identity(tmp_path / name) for name in names}
    files = dict.fromkeys(names, "identity")

    def holds(pinned):
        """Whether a round is held by nodes with these `pinned`, a list or one for each node, and why each refused that did."""
        known = {}
        for number, name in enumerate(names):
            mine = pinned[name] if isinstance(pinned, dict) else pinned
            (tmp_path / name / "node.toml").write_text(f'name = "{name}"\nexperiment = "e.toml"\ndata = "d.npz"\nidentity = "{files[name]}"\n'
                                                       f"pinned = {list(mine)}\ncolluding = 1\n".replace("'", '"'))
            known[number] = NodeSettings.read(tmp_path / name / "node.toml").own_identity()
        fleet = SignedSites(known=known).fleet(schedule="simple")
        return not trained(fleet, signed, rounds=1).equal(TASK.params()), set(fleet.reports[0].problems.values())

    old = list(publics.values())
    assert holds(old) == (True, set())
    refused = CliRunner().invoke(app, ["deploy", "identity", str(tmp_path / "b")])
    assert refused.exit_code != 0
    assert f"fedtail deploy identity {tmp_path / 'b' / 'identity-2'}" in refused.output.replace("\n", " ")
    made = CliRunner().invoke(app, ["deploy", "identity", str(tmp_path / "b" / "identity-2")])
    both = [*old, made.output.strip()]
    new = [one for one in both if one != publics["b"]]
    assert holds({**dict.fromkeys(names, old), "a": both}) == (True, set())      # one node after the other
    assert holds(both) == (True, set())
    files["b"] = "identity-2/identity"
    assert holds(both) == (True, set())
    assert holds({**dict.fromkeys(names, both), "a": new}) == (True, set())
    assert holds(new) == (True, set())
    assert not holds(old)[0]                                                     # the others must have pinned it first
    files["b"] = "identity"
    held, why = holds(new)
    assert not held
    assert any("are not signed by the identity pinned for it" in one for one in why)
