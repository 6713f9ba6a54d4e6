"""Claimed: a server that chooses the threshold of the tail reads no single client's row, with the policy that `fedtail node init` writes.

The attacker is a server that departs from the protocol: nodes accepted an experiment of a tail, without noise. It counts clients above
thresholds until one is left, which it may, and asks for the updates of those above (1). Or it leaves others in the tail by a weight of
1e-12, so that many contribute by number (2). Or it asks twice in one round, with a threshold below all losses and one above the smallest,
and takes the difference (3). Nodes answer zeros where too few of their clients are in a sum by weight, and have one threshold in a round;
with these defences switched off each way reads the row of one client.
"""

from __future__ import annotations

import logging
from unittest import mock

import torch
from outcome import Outcome
from torch import Tensor

from fedtail.algorithm import Method
from fedtail.questions import Count, Train

from departing_server import TAIL, TASK, DepartingServer, alike, nodes, truth, without

LEFT_OUT = "fedtail.deployment.node:Node._count_left_out"
ONE_RULE = "fedtail.deployment.data_budget:DataBudget._refuse_other_weights"
PARAMS = torch.randn(TASK.params().shape, generator=torch.Generator().manual_seed(0))      # at which no two losses are alike
LEAST, MOST, CLIENTS = 0.0, 16.0, 30      # of the losses


def above(method: Method, low: float, high: float, share: float) -> Train:
    """The question to train under a dual of the server's: full weight from the loss `high` on, `share` of it from `low` to `high`."""
    member = method.members[0]
    return Train(member.local, member.risk, torch.tensor([low, high, share, 0.0], dtype=torch.float64), member.aggregate)


def largest_and_smallest(method: Method, server: DepartingServer) -> tuple[float, float]:
    """A threshold above which one client lies, and one above which all lie but one, by counts that the server asks for."""
    found = []
    for wanted in (1, CLIENTS - 1):
        low, high, count = LEAST, MOST, -1
        while count != wanted:
            middle = (low + high) / 2
            sums = server.read(Count(above(method, middle, middle, 1.0)))
            assert sums is not None, server.said
            count = round(float(sums[0]))
            low, high = (middle, high) if count > wanted else (low, middle)
        found.append(middle)
    return found[0], found[1]


def begun(hospitals: object) -> DepartingServer:
    """A server that began a round with everybody, with a model of its choice."""
    server = DepartingServer(hospitals)
    server.begin(0, params=PARAMS)
    return server


def reads_rows(high: float, low: float, way: int, *off: str) -> bool:
    """Whether the row of one client is read in one of the three ways; `high` and `low` are the server's thresholds."""
    with nodes(TAIL) as hospitals, without(*off):
        server, method = begun(hospitals), hospitals.method
        alone = [k for k in range(CLIENTS) if exact(above(method, high, high, 1.0), [k]).any()]
        if way == 1:
            return alike(server.read(above(method, high, high, 1.0)), exact(above(method, high, high, 1.0), alone))
        if way == 2:
            question = above(method, LEAST, high, 1e-12)
            return alike(server.read(question), exact(question, alone))
        everybody, but_one = (above(method, one, one, 1.0) for one in (LEAST - 1, low))
        first, second = server.read(everybody), server.read(but_one)
        left = [k for k in range(CLIENTS) if not exact(but_one, [k]).any()]
        return first is not None and second is not None and alike(first - second, exact(everybody, left))


def exact(question: Train, ids: list[int]) -> Tensor:
    """The sum of these clients' rows at the model of the attack."""
    return truth(question, ids, params=PARAMS)


def attack() -> Outcome:
    """Whether no way reads a row as nodes are, and each does without its defence."""
    logging.getLogger("fedtail.node").setLevel(logging.CRITICAL + 1)
    try:
        with nodes(TAIL) as hospitals, mock.patch("fedtail.deployment.data_budget.DataBudget.charge"):      # many counts, over rounds
            high, low = largest_and_smallest(hospitals.method, begun(hospitals))
        held = [reads_rows(high, low, way) for way in (1, 2, 3)]
        open = [reads_rows(high, low, way, off) for way, off in ((1, LEFT_OUT), (2, LEFT_OUT), (3, ONE_RULE))]
    finally:
        logging.getLogger("fedtail.node").setLevel(logging.NOTSET)
    return Outcome(not any(held) and all(open), f"of 3 ways to read one client's row by thresholds {sum(held)} succeed against the policy that is "
                                                f"written, and {sum(open)} with its defence switched off")
