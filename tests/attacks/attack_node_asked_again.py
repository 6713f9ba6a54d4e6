"""Claimed: noise that clients add hides them also from a server that is started again on purpose, and asks again without a node.

The attacker is a server that departs from the protocol: it holds a round of a private training, is started again with the same contents,
and asks the same question, while it says that one of three nodes is silent. That node has one client in the round. The difference of the
two sums is the client's row with its own share of the noise, an eleventh of what is charged; where the node gives its row to one sum only,
there is no second one. Asked again in the same session the question is refused too.
"""

from __future__ import annotations

from unittest import mock

import torch
from outcome import Outcome

from departing_server import PRIVATE, DepartingServer, nodes, noiseless, train_question, truth, without

DEFENCE = "fedtail.deployment.node:Node._refuse_second_sum"
FILE = PRIVATE.replace("planned_clients = 12", "planned_clients = 11")      # any two of its nodes hold so many
ALONE = 23                                                   # the only client of the third node in the round
IDS = torch.tensor([*range(20), ALONE])


def asked_again(restarted: bool, *off: str) -> tuple[bool, float]:
    """Whether a second sum came, and its difference to the first less the client's row, over the noise of one sum."""
    own_threshold = mock.patch("fedtail.deployment.remote.clients_add_noise", return_value=False)      # lower than an honest server's
    with nodes(FILE, repeats=3) as hospitals, without(*off), own_threshold:
        question = train_question(hospitals.method)
        server = DepartingServer(hospitals)
        server.begin(0, ids=IDS)
        first = server.read(question)
        if restarted:
            server = DepartingServer(hospitals)
            server.begin(0, ids=IDS)
        exchange, count, last = server.exchange, 0, 2 if restarted else 0      # exchanges in which all answer: those of the keys

        def silent(letters):
            """The answers of all nodes, without the third once keys are exchanged."""
            nonlocal count
            count += 1
            return {node: reply for node, reply in exchange(letters).items() if node != 2 or count <= last}

        server.exchange = silent
        second = server.read(question)
    if second is None:
        return False, float("inf")
    exact = {name: truth(noiseless(question), ids)[1:] for name, ids in (("all", IDS.tolist()), ("alone", [ALONE]))}
    return True, float((first - second - exact["alone"]).norm() / (first - exact["all"]).norm())


def attack() -> Outcome:
    """Whether there is no second sum, and its difference to the first tells the row without the defence."""
    held = [asked_again(restarted)[0] for restarted in (True, False)]
    read, left = asked_again(True, DEFENCE)
    return Outcome(not any(held) and read and left < 0.5,
                   f"of 2 second sums {sum(held)} are answered; with the defence switched off the difference is the row of one client, with "
                   f"{left:.2f} times the noise of a sum ({21**-0.5:.2f} expected)")
