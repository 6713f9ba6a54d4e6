"""Claimed: a round that was held to its end is not held again for nothing: fresh noise is charged, or refused.

The attacker is a server that departs from the protocol: it ends a round of a private training, and begins it anew with the same contents,
eleven times, nodes being started again in between. As nodes are, few of these rounds are answered, and each is charged to the epsilon of
the data set; where the policy allows no repeats, none. With the record on disk switched off the noise is averaged away.
"""

from __future__ import annotations

from departing_server import PRIVATE, DepartingServer, average_error, noiseless, nodes, train_question, truth, without
from outcome import Outcome

BUDGET = "fedtail.deployment.data_budget:DataBudget"
OFF = tuple(f"{BUDGET}.{name}" for name in ("begin_round", "end_round", "charge"))
TIMES = 12


def replay(repeats: int, *off: str) -> tuple[int, float, float]:
    """How many replays were answered, and how far the mean of answers and the first one are from the exact sum."""
    with nodes(PRIVATE, repeats=repeats) as hospitals, without(*off):
        server, question, sums = DepartingServer(hospitals), train_question(hospitals.method), []
        for _ in range(TIMES):
            server.begin(0)
            sums.append(server.read(question))
            server.close_round(True)
            server.finish()
            hospitals.restart()
        found = [one for one in sums if one is not None]
    exact = truth(noiseless(question), list(range(30)))[1:]
    return len(found) - 1, average_error(found, exact), average_error(found[:1], exact)


def attack() -> Outcome:
    """Whether replays are refused, or within the budget of three rounds; and free without the record."""
    none, _, _ = replay(0)
    many, _, _ = replay(1000)
    open, lower, higher = replay(0, *OFF)
    return Outcome(none == 0 and many <= 2 and open == TIMES - 1 and lower < 0.6 * higher,
                   f"of {TIMES - 1} replays {none} are answered where none is allowed, {many} where the epsilon is for 3 rounds; with the record "
                   f"switched off {open}, whose mean has {lower / higher:.2f} times the error of one")
