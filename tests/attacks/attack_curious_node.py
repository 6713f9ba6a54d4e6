"""Claimed: integer noise over nodes is at least the planned noise for a node that knows its own clients' shares.

The attacker is the node that holds most clients: it follows the protocol, stores the shares that it added, and takes them off the
released sums. Rounds are held over three nodes, some of which fail, in every schedule of secure sums and in the clear;
of each sum that is used, the shares of all other nodes are counted.
"""

from __future__ import annotations

import warnings

from outcome import Outcome

import fedtail
from fedtail.privacy import guarantee
from fedtail.privacy.events import NoSampling, RoundEvent

from remote_cases import LOCAL, TASK, Sites

NODES, PLANNED, ROUNDS = 3, 20, 4


def unknown_shares(schedule: str, channel) -> list[int]:
    """Shares of other nodes in each sum that moved the model."""
    sites = Sites(nodes=NODES, vanish={1: {3, 4, 9}, 2: {7, 12}})
    fleet, found, last = sites.fleet(schedule=schedule), [], [TASK.params()]
    method = fedtail.dp_fedavg(30, 0.1, 1.0, cohort_size=30, noise="discrete", planned_clients=PLANNED, **LOCAL)

    def used(progress) -> None:
        moved = not progress.trained.state.params.equal(last[-1])
        last.append(progress.trained.state.params)
        if moved:
            answered = fleet.reports[-1]
            counts = [10 for node in range(NODES) if node not in answered.problems]
            found.append(sum(counts) - max(counts))

    fedtail.train(method, TASK, fleet=fleet, rounds=ROUNDS, channel=channel, on_round=used)
    return found


def epsilon(shares: int) -> float:
    """For somebody who does not know so many of the shares that were planned as 30, each then a 30th of the noise."""
    release = fedtail.PrivateMean(0.1, fedtail.DiscreteNoise(4.0, 30), 30.0).declares.mechanism.release(18, "the updates")
    known = type(release)(release.sensitivity, release.variance, shares, release.width)
    return guarantee([(RoundEvent((known,), NoSampling()), 10)], 1e-4).epsilon


def attack() -> Outcome:
    """Whether the others' shares are as many as planned in every sum, and a plan that relies on all nodes is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [count for schedule in ("ahead", "simple", "all-or-nothing")
                 for count in unknown_shares(schedule, fedtail.SecureChannel(PLANNED, minimum_contributors=3))]
        found += unknown_shares("simple", fedtail.IntegerChannel())
    greedy = fedtail.dp_fedavg(30, 0.1, 1.0, cohort_size=30, noise="discrete", planned_clients=30, **LOCAL)
    try:
        fedtail.train(greedy, TASK, fleet=Sites(nodes=NODES).fleet(), rounds=0, channel=fedtail.SecureChannel(30, minimum_contributors=3))
        refused = False
    except ValueError:
        refused = True
    return Outcome(refused and bool(found) and min(found) >= PLANNED,
                   f"{len(found)} sums used, with {min(found, default=0)} or more shares of others, {PLANNED} planned; relying on all three "
                   f"nodes is {'refused' if refused else 'not refused'} (epsilon {epsilon(30):.2f} would be {epsilon(20):.2f})")
