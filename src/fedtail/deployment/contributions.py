"""How many of a node's clients are in a sum, which the `smallest_tail` of its policy is about, and which methods need that."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedtail.algorithm import FederatedAlgorithm
from fedtail.channel.base import clients_add_noise
from fedtail.channel.plain import Plain
from fedtail.clients import Clients
from fedtail.engine.local_fleet import LocalFleet
from fedtail.questions import Count, Evaluate, Train
from fedtail.sampling import Cohort

log = logging.getLogger("fedtail.node")


@dataclass(frozen=True)
class Weights(Count):
    """The weight of each client in the sum of a question: a node asks it of its own clients, and no message can hold it."""

    gather: bool = True

    def rows(self, clients: Clients) -> Tensor:
        """The weight of each client that contributes to the counted question, (clients, 1) float64, zero for the others.

        Of training it is mass times density under the question's dual; in an evaluation every client has the same.
        """
        if not isinstance(self.question, Train):
            return super().rows(clients)
        weighted, chosen = self.question.weigh_clients(clients)
        return weighted.weight.double().where(chosen, 0.0)[:, None]


def effective_clients(weights: Tensor) -> int:
    """The effective number of clients in a sum with these weights, (clients,): (sum w)^2 / sum w^2, to the nearest whole number.

    Clients of equal weight are as many as they are, and beside one of far larger weight they are none: two are one where one of
    them has 79% of the weight or more. 0 where no weight is positive.

    >>> effective_clients(torch.tensor([1.0, 1.0, 0.5])), effective_clients(torch.tensor([1.0, 0.1, 1e-9]))
    (3, 1)
    """
    largest = float(weights.max()) if len(weights) else 0.0
    if not largest > 0:
        return 0
    share = weights / largest                       # squares of small weights are no zeros
    return int((share.sum() ** 2 / share.square().sum()).round())


def count_left_out(question: Any, fleet: LocalFleet, cohort: Cohort, least: int, round: int) -> int:
    """How many clients of `cohort`, all of one node, are to be in the sum of `question` and are too few: 0 for none.

    They are too few where their effective number by weight is below `least`. Then the node's answer is zeros, as if none were in
    the sum, and its log says so: a refusal would tell the server, who chooses the threshold of the tail, on which side of it they
    are. Clients that failed are in no sum; all are counted for this question alone, whoever contributed to others of the `round`
    that is open on `fleet`. Of a question that is read by group it is the number of clients in groups that are too small. Sums to
    which clients add noise rely on no number.
    """
    if least == 1 or clients_add_noise(question.mechanism):
        return 0
    if question.by_group:
        group, small = fleet.population.group, small_groups(question, fleet, cohort, least)
        return 0 if group is None else int(torch.isin(group[cohort.ids], torch.tensor(small, dtype=group.dtype)).sum())
    if not isinstance(question, (Train, Evaluate)):
        return 0
    weights, = fleet.collect((Weights(question, question.model),), Plain(len(cohort.ids), cohort.mass_bound))
    weights = weights[:, 0].where(~fleet.report().failed, 0.0)
    there, effective = int((weights > 0).sum()), effective_clients(weights)
    if not there or effective >= least:
        return 0
    log.warning("round %d: %d of this node's clients would be in a sum without noise, by weight as many as %d, fewer than "
                "smallest_tail = %d in its policy: its answer is zeros.", round, there, effective, least)
    return there


def small_groups(question: Any, fleet: LocalFleet, cohort: Cohort, least: int) -> tuple[int, ...]:
    """The groups that `question` is read by, and that have clients in `cohort`, all of one node, but fewer than `least`.

    In such a group each client is almost alone. () where it is not read by group, or clients add noise.
    """
    group = fleet.population.group
    if not question.by_group or group is None or clients_add_noise(question.mechanism):
        return ()
    numbers, counts = group[cohort.ids].unique(return_counts=True)
    return tuple(one for one in numbers[counts < least].tolist() if one not in question.left_out_groups)


def are_chosen(members: Iterable[FederatedAlgorithm]) -> bool:
    """Whether numbers of the server decide who contributes to the sums of one of these methods, and by how much.

    They do where weights depend on losses, on groups or on what clients keep, as those of a tail do, and where local training
    leaves clients out. Under a mean of all clients none does.
    """
    return any(one.risk.declares.reads_losses or one.risk.declares.keeps is not None
               or one.risk.declares.needs_groups is not None or not one.local.declares.everyone_trains for one in members)
