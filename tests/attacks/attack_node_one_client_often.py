"""Claimed: a server cannot put one client into a cohort more than once.

The attacker is a server that departs from the protocol: the cohort of 22 that it sends has one client of the second node twenty times, and
one client of each other node. With the check of cohorts switched off the sum is twenty times that client's update, and two more.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from outcome import Outcome

from departing_server import DepartingServer, alike, nodes, train_question, truth, without

READ, OFTEN = 13, 20


def reads_twenty(*off: str) -> bool:
    """Whether the sum has the row of one client twenty times with these defences switched off."""
    def forged(node, cohort):
        if node != 1:
            return cohort
        return replace(cohort, ids=cohort.ids.repeat(OFTEN), key=cohort.key.repeat(OFTEN), importance=cohort.importance.repeat(OFTEN))

    with nodes() as hospitals, without(*off):
        server, question = DepartingServer(hospitals), train_question(hospitals.method)
        server.forged = forged
        server.begin(0, ids=torch.tensor([0, READ, 20]))
        return alike(server.read(question), OFTEN * truth(question, [READ]) + truth(question, [0, 20]))


def attack() -> Outcome:
    """Whether the cohort is refused, and answered without the check."""
    held, open = reads_twenty(), reads_twenty("fedtail.deployment.agreement:Agreement.check_cohort")
    return Outcome(not held and open, f"a cohort with one client {OFTEN} times is {'answered' if held else 'refused'}; unchecked, the sum has its row "
                                      f"{OFTEN if open else 'not so many'} times")
