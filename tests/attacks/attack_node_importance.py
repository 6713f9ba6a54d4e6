"""Claimed: a server cannot have all clients of a cohort but one multiplied by zero.

The attacker is a server that departs from the protocol: sums are masked over three nodes and thirty clients, as the policy of the nodes
wants, but the factors for the clients' masses, which it sends with the cohort, are zero for all but one. With the check of cohorts
switched off it reads that client's update.
"""

from __future__ import annotations

from dataclasses import replace

from outcome import Outcome

from departing_server import DepartingServer, alike, nodes, train_question, truth, without

READ = 13       # a client of the second node


def reads_row(*off: str) -> bool:
    """Whether the row of one client is read with these defences switched off."""
    with nodes() as hospitals, without(*off):
        server, question = DepartingServer(hospitals), train_question(hospitals.method)
        server.forged = lambda node, cohort: replace(cohort, importance=(cohort.ids + 10 * node == READ).double())
        server.begin(0)
        return alike(server.read(question), truth(question, [READ]))


def attack() -> Outcome:
    """Whether the cohort is refused, and read as one row without the check."""
    held, open = reads_row(), reads_row("fedtail.deployment.agreement:Agreement.check_cohort")
    return Outcome(not held and open, f"a cohort of 30 in which 29 are multiplied by zero is {'answered' if held else 'refused'}; "
                                      f"unchecked, the row of the one is {'read' if open else 'not read'}")
