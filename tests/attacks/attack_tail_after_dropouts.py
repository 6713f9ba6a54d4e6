"""Claimed: a sum without noise is unmasked only where `minimum_contributors` clients surely contribute to it, whoever drops out.

The attacker is a server that follows the protocol and subtracts the models before and after a round. A tail of 12 of 30 clients
sits at three of five nodes, 6, 5 and 1 of them; after the tail was found, the two nodes with 11 of its clients drop out, which is fewer
nodes than the masks tolerate. The round is held as it was before, with the number of contributors checked before training only, and as it is
now: what the model moved by is compared with the one remaining client's own update.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch
from outcome import Outcome

import fedtail

from remote_cases import LOCAL, PEOPLE, TASK, Sites

HARD = (*range(6), *range(6, 11), 12)            # nodes hold six clients each: 6, 5 and 1 of the tail
LAST = 12
ROWS = 12                                        # the exchange of the updates, after four histograms in two sessions


@dataclass(frozen=True)
class CountedBeforeOnly(fedtail.SecureChannel):
    """The channel as it was: whoever drops out after the count is not missed."""

    def collect(self, questions, encoding, fleet, cohort, broadcast, again, needed=0):
        """Unmask whatever the threshold allows."""
        return super().collect(questions, encoding, fleet, cohort, broadcast, again)

    def check_enough_answers(self, questions, fleet, needed=0):
        """Lose the round by the threshold alone."""
        super().check_enough_answers(questions, fleet)


def released(channel: fedtail.SecureChannel, people, start) -> torch.Tensor:
    """What the model moved by in a round in which the nodes with 11 clients of the tail drop out after it was found."""
    gone = range(ROWS, 99)
    fleet = Sites(people=people, vanish={0: gone, 1: gone}).fleet(schedule="simple")
    method = fedtail.delta_fl(len(HARD) / len(people), len(people), **LOCAL)
    trained = fedtail.train(method, TASK, fleet=fleet, rounds=1, start=start, channel=channel)
    return trained.state.params - first_params(start)


def first_params(module) -> torch.Tensor:
    """The parameters of a module as one vector, in the order of the task's."""
    return torch.cat([value.detach().flatten() for value in module.parameters()])


def attack() -> Outcome:
    """Whether nothing is released, where before the last client's update was."""
    hard = torch.isin(torch.repeat_interleave(torch.arange(len(PEOPLE)), PEOPLE.size), torch.tensor(HARD))
    people = replace(PEOPLE, targets=hard.long())                                    # other labels in the tail: larger losses
    easy = fedtail.train(fedtail.fedavg(30, learning_rate=0.5), TASK, replace(people, targets=torch.zeros_like(people.targets)), rounds=20)
    alone = fedtail.train(fedtail.fedavg(1, **LOCAL), TASK, people.select([LAST]), rounds=1, start=easy.module)
    update = alone.state.params - first_params(easy.module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = released(CountedBeforeOnly(8, minimum_contributors=10), people, easy.module)
        now = released(fedtail.SecureChannel(8, minimum_contributors=10), people, easy.module)
    leaked = float((before - update).norm() / update.norm())
    return Outcome(leaked < 1e-5 and not bool(now.any()),
                   f"counted before training only, the released step is one client's update to {leaked:.0e} of its norm; counted with those "
                   f"who may drop out, {'nothing is released' if not bool(now.any()) else 'a step of norm ' + format(float(now.norm()), '.2g')}")
