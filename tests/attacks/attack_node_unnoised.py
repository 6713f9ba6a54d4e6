"""Claimed: a node whose operator accepted an experiment with noise answers no question without it.

The attacker is a server that departs from the protocol: it asks to train as the experiment does, but for a plain mean instead of a
private one. Two defences of the node refuse it: the question is not one of the accepted experiment, and a policy with an epsilon lets
nothing leave without noise that clients add. With both switched off the exact sum is read.
"""

from __future__ import annotations

from outcome import Outcome

from departing_server import PRIVATE, DepartingServer, alike, nodes, noiseless, train_question, truth, without

AGREEMENT = "fedtail.deployment.agreement:Agreement.check_question"
BUDGET = "fedtail.deployment.data_budget:DataBudget._charge_releases"


def reads_exact_sum(*off: str) -> bool:
    """Whether the sum without noise is read with these defences switched off."""
    with nodes(PRIVATE) as hospitals, without(*off):
        server, question = DepartingServer(hospitals), noiseless(train_question(hospitals.method))
        server.begin(0)
        return alike(server.read(question), truth(question, list(range(30))))


def attack() -> Outcome:
    """Whether the sum is refused by each defence alone, and read without them."""
    with_both, one, other, neither = reads_exact_sum(), reads_exact_sum(BUDGET), reads_exact_sum(AGREEMENT), reads_exact_sum(AGREEMENT, BUDGET)
    return Outcome(not (with_both or one or other) and neither,
                   f"the sum of 30 clients without noise is {'read' if with_both or one or other else 'refused, by the agreement and by the budget alone'}; "
                   f"with both switched off it is {'read' if neither else 'not read'}")
