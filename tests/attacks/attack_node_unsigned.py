"""Claimed: a node whose operator has given it an identity, and pinned those of the others, answers no unsigned session.

The attacker is a server that departs from the protocol: it invites three nodes to sessions without signatures, dropout-tolerant and
all-or-nothing. With the identity of the node's settings switched off, the nodes answer.
"""

from __future__ import annotations

from dataclasses import replace

from outcome import Outcome

from fedtail.deployment.keys import make_identity

from departing_server import DepartingServer, alike, nodes, train_question, truth, without


def reads_sum(schedule: str, *off: str) -> bool:
    """Whether a sum is read in an unsigned session with these defences switched off."""
    with nodes() as hospitals, without(*off):
        pinned = tuple(make_identity(one.folder) for one in hospitals.settings.values())
        hospitals.settings = {k: replace(one, identity="identity", pinned=pinned, colluding=0) for k, one in hospitals.settings.items()}
        hospitals.restart()
        server, question = DepartingServer(hospitals, schedule=schedule), train_question(hospitals.method)
        server.begin(0)
        return alike(server.read(question), truth(question, list(range(30))))


def attack() -> Outcome:
    """Whether both kinds of session are refused, and answered without identities."""
    held = [reads_sum(one) for one in ("simple", "all-or-nothing")]
    open = [reads_sum(one, "fedtail.deployment.settings:NodeSettings.own_identity") for one in ("simple", "all-or-nothing")]
    return Outcome(not any(held) and all(open), f"of 2 kinds of unsigned sessions {sum(held)} are answered by nodes with identities, and {sum(open)} by "
                                                "the same nodes without")
