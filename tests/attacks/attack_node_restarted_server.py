"""Claimed: a server that is started again on purpose gets no second sum of a round over another cohort, nor more rounds by new trainings.

The attacker is a server that departs from the protocol: it holds a round, is started again, and holds the round once more without one of
the clients: the difference of the sums is that client's row. Then it begins training after training. As nodes are, the second is refused,
and over all trainings so many rounds are answered as the policy says. With the record on disk switched off, the row is read.
"""

from __future__ import annotations

import torch
from outcome import Outcome

from departing_server import DepartingServer, alike, nodes, train_question, truth, without

BUDGET = "fedtail.deployment.data_budget:DataBudget"
OFF = tuple(f"{BUDGET}.{name}" for name in ("begin_round", "end_round", "charge"))
READ, TRAININGS, ALLOWED = 13, 8, 3      # the experiment has three rounds


def reads_row(*off: str) -> bool:
    """Whether the row of one client is read with these defences switched off."""
    with nodes() as hospitals, without(*off):
        question, sums = train_question(hospitals.method), []
        for ids in (torch.arange(30), torch.tensor([k for k in range(30) if k != READ])):
            server = DepartingServer(hospitals)
            server.begin(0, ids=ids)
            sums.append(server.read(question))
        return sums[1] is not None and alike(sums[0] - sums[1], truth(question, [READ]))


def trainings(*off: str) -> int:
    """How many of so many trainings, each by a new server, get a sum in their first round."""
    with nodes() as hospitals, without(*off):
        question, answered = train_question(hospitals.method), 0
        for k in range(TRAININGS):
            server = DepartingServer(hospitals, training=bytes([k]) * 16)
            server.begin(0)
            answered += server.read(question) is not None
            hospitals.restart()
        return answered


def attack() -> Outcome:
    """Whether the row stays hidden and trainings are counted, and neither without the record."""
    held, counted, open, uncounted = reads_row(), trainings(), reads_row(*OFF), trainings(*OFF)
    return Outcome(not held and counted == ALLOWED and open and uncounted == TRAININGS,
                   f"the second cohort is {'answered' if held else 'refused'}, and {counted} of {TRAININGS} trainings are answered, as many rounds as "
                   f"allowed; with the record switched off the row is {'read' if open else 'not read'}, and {uncounted} are answered")
