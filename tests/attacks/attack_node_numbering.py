"""Claimed: a question that differs in its number only gets the answer it had, with the noise it had.

The attacker is a server that departs from the protocol: in one round it asks the same question under twelve numbers, and takes the mean
of the noisy sums. As nodes are, one is answered, and one is charged. With the number in the digest by which a node knows a question
again, and no charge for answers, the noise is averaged away.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from unittest import mock

from outcome import Outcome

from fedtail.wire import pack

from departing_server import PRIVATE, DepartingServer, averaged_noise, nodes, noiseless, train_question, truth, without

TIMES = 12


def ask_under_numbers(*off: str) -> tuple[int, float]:
    """How many different answers came, and how much of the noise is left in their mean."""
    with nodes(PRIVATE) as hospitals, without(*off):
        server, question = DepartingServer(hospitals), train_question(hospitals.method)
        server.begin(0)
        sums = [server.read(replace(question, number=k)) for k in range(TIMES)]
    exact = truth(noiseless(question), list(range(30)))[1:]
    found = [one for one in sums if one is not None]
    return len(found), averaged_noise(found, exact)


def attack() -> Outcome:
    """Whether the answers are one, and many without the defences."""
    held, left = ask_under_numbers()
    with mock.patch("fedtail.deployment.node.question_digest", lambda one, asked: hashlib.sha256(pack(one)).digest()):
        open, less = ask_under_numbers("fedtail.deployment.data_budget:DataBudget.charge")
    return Outcome(held == 1 and left > 0.999 and open == TIMES and less < 0.5,
                   f"{TIMES} numbers, {held} answer, whose mean has {left:.2f} times the noise of one; with the number in the digest and no charge "
                   f"{open} answers, whose mean has {less:.2f} times the noise of one ({TIMES**-0.5:.2f} expected)")
