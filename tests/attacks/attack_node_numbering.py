"""Claimed: a question that differs in its number only gets the answer it had, with the noise it had.

The attacker is a server that departs from the protocol: in one round it asks the same question under twelve numbers, and takes the mean
of the noisy sums. As nodes are, all answers are one, and one is charged. With the number in the digest by which a node knows a question
again, and no charge for answers, the noise is averaged away.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from unittest import mock

from departing_server import PRIVATE, DepartingServer, average_error, noiseless, nodes, train_question, truth, without
from outcome import Outcome

from fedtail.wire import pack

TIMES = 12


def ask_under_numbers(*off: str) -> tuple[int, float, float]:
    """How many different answers came, and how far their mean and the first one are from the exact sum."""
    with nodes(PRIVATE) as hospitals, without(*off):
        server, question = DepartingServer(hospitals), train_question(hospitals.method)
        server.begin(0)
        sums = [server.read(replace(question, number=k)) for k in range(TIMES)]
    exact = truth(noiseless(question), list(range(30)))[1:]
    return len({tuple(one.tolist()) for one in sums}), average_error(sums, exact), average_error(sums[:1], exact)


def attack() -> Outcome:
    """Whether the answers are one, and many without the defences."""
    held, mean, first = ask_under_numbers()
    with mock.patch("fedtail.deployment.node.question_digest", lambda one, asked: hashlib.sha256(pack(one)).digest()):
        open, lower, higher = ask_under_numbers("fedtail.deployment.data_budget:DataBudget.charge")
    return Outcome(held == 1 and mean == first and open == TIMES and lower < 0.6 * higher,
                   f"{TIMES} numbers, {held} answer, {mean / first:.2f} times the error of one; with the number in the digest and no charge {open} "
                   f"answers, whose mean has {lower / higher:.2f} times the error of one ({TIMES**-0.5:.2f} expected)")
