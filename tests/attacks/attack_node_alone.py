"""Claimed: over nodes, no round is amplified that was held only because one client was sampled.

The attacker sees whether a round was held. Secure sums need two nodes and `threshold` clients, so that a client alone at its
node may decide by itself whether the round is held, and then its participation is known. Cohorts are drawn, and the rule
that begins a masked round is asked twice, with the client and without: the share of the rounds held with it that hang on it must not be
more than what the ledger takes as revealed.
"""

from __future__ import annotations

import torch
from outcome import Outcome

import fedtail
from fedtail.algorithm import planned_round
from fedtail.deployment import ClientRegistry, RemoteFleet
from fedtail.deployment.masking import DropoutTolerant
from fedtail.privacy.minimum_cohort import reveal_probability

SIZES, RATE, THRESHOLD, ROUNDS = (1, 20, 20), 0.1, 3, 4000


def attack() -> Outcome:
    """Whether the ledger takes as many rounds as revealed as are."""
    node = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))
    count = len(node)
    registry = ClientRegistry(torch.arange(count), torch.ones(count, dtype=torch.float64), node, torch.arange(count))
    fleet = RemoteFleet(lambda messages: {}, registry)
    method = fedtail.FederatedAlgorithm(fedtail.Poisson(RATE), fedtail.LocalSGD(learning_rate=0.1), fedtail.Mean(),
                                        fedtail.PrivateMean(1.0, fedtail.DiscreteNoise(1.0, 2), total=RATE * count), fedtail.SGD(1.0))
    planned = planned_round(method, fleet, fedtail.SecureChannel(THRESHOLD, minimum_contributors=2), 5)
    masking, held, decided = DropoutTolerant(lambda messages: {}, b"run", ahead=False), 0, 0
    for round in range(ROUNDS):
        counts = registry.clients_per_node(method.sample(registry, 0, round))
        without = {one: size for one, size in counts.items() if one != 0}
        if masking._next_session(counts, THRESHOLD) is not None:
            held += 1
            decided += masking._next_session(without, THRESHOLD) is None
    known, revealed = decided / held, planned.sampling.revealed
    counted = reveal_probability(RATE, count, THRESHOLD)
    return Outcome(revealed >= known, f"{100 * known:.2f}% of the rounds held hang on the client, {100 * revealed:.2f}% are taken as "
                                      f"revealed (by clients alone it would be {100 * counted:.2f}%)")
