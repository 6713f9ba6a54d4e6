"""Claimed: a round that was held to its end is not held again for nothing: fresh noise is charged, or refused.

The attacker is a server that departs from the protocol: it ends a round of a private training, and begins it anew with the same contents,
eleven times, nodes being started again in between. As nodes are, few of these rounds are answered, and each is charged to the epsilon of
the data set; where the policy allows no repeats, none. With the record on disk switched off the noise is averaged away.
"""

from __future__ import annotations

from outcome import Outcome

from departing_server import PRIVATE, DepartingServer, averaged_noise, nodes, noiseless, train_question, truth, without

BUDGET = "fedtail.deployment.data_budget:DataBudget"
OFF = tuple(f"{BUDGET}.{name}" for name in ("begin_round", "end_round", "charge"))
TIMES = 12


def replay(repeats: int, *off: str) -> tuple[int, float]:
    """How many replays were answered, and how much of the noise is left in the mean of the answers."""
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
    return len(found) - 1, averaged_noise(found, exact)


def attack() -> Outcome:
    """Whether replays are refused, or within the budget of three rounds; and free without the record."""
    none, many, (open, less) = replay(0)[0], replay(1000)[0], replay(0, *OFF)
    return Outcome(none == 0 and many <= 2 and open == TIMES - 1 and less < 0.5,
                   f"of {TIMES - 1} replays {none} are answered where none is allowed, {many} where the epsilon is for 3 rounds; with the record "
                   f"switched off {open}, whose mean has {less:.2f} times the noise of one ({TIMES**-0.5:.2f} expected)")
