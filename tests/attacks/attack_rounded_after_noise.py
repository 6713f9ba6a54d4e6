"""Claimed: a row of integers with its noise is sent and added exactly, whatever the modulus; or the run is refused.

The ledger prices a sum of integers. An encoding with too few bits rounds rows once more after their noise, and releases a sum by
another mechanism, which nobody prices. The attacker is a setting: moduli from 20 to 62 bits are tried with coarse and fine
scales, and what comes out is compared with the sum of the integers as clients noised them.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from outcome import Outcome

import fedtail
from fedtail.channel import IntegerChannel, PlainChannel
from fedtail.data.population import Population
from fedtail.engine import LocalFleet
from fedtail.fleet import Broadcast
from fedtail.models import LeastSquares
from fedtail.privacy import DiscreteNoise, NoisySum
from fedtail.privacy.events import NoSampling, RoundEvent
from fedtail.questions import Statistic, StatisticPart

CLIENTS, WIDTH = 12, 100


@dataclass(frozen=True)
class Ramp(StatisticPart):
    """Rows of many different numbers."""

    def statistic(self, clients, trial):
        return torch.linspace(-1, 1, WIDTH, dtype=torch.float64) * (1 + clients.mass[:, None].cumsum(0) / 7) / WIDTH**0.5

    def row_width(self, trial):
        return WIDTH


class Kept(NoisySum):
    """Remembers what it noised."""

    def on_client(self, rows, random, adding=None):
        SENT.append(super().on_client(rows, random, adding))
        return SENT[-1]


SENT: list[torch.Tensor] = []


def released(scale: float | None, channel) -> torch.Tensor | None:
    """The sum that the server reads, in integers; None where it is refused."""
    people = Population.from_clients([(torch.zeros(1, 1), torch.zeros(1)) for _ in range(CLIENTS)])
    task, mechanism = fedtail.Task(LeastSquares(1)), Kept(1.0, DiscreteNoise(1.0, CLIENTS, scale=scale))
    question = Statistic(Ramp(), torch.zeros(0), mechanism=mechanism)
    planned = RoundEvent((question.release(1),), NoSampling())
    SENT.clear()
    with warnings.catch_warnings(), LocalFleet(people, task, workers=1) as fleet:
        warnings.simplefilter("ignore")
        cohort = fedtail.Everyone()(people, 0, 0)
        try:
            with channel.open(fleet, cohort, Broadcast(0, 0, torch.zeros(1, 2), 0), fedtail.Ledger(), planned) as ask:
                unit = mechanism.on_server(torch.ones(1, WIDTH, dtype=torch.float64), None)[0, 0]
                return ask(question) / unit
        except ValueError:
            return None


def attack() -> Outcome:
    """Whether every modulus is refused or exact."""
    refused, exact, wrong = 0, 0, []
    for scale in (None, 2.0**14, 2.0**16):
        for channel in (*map(IntegerChannel, (18, 20, 22, 24, 26, 32, 62)), PlainChannel()):
            found = released(scale, channel)
            if found is None:
                refused += 1
            elif torch.equal(found, sum(SENT).sum(0)):
                exact += 1
            else:
                wrong.append(float((found - sum(SENT).sum(0)).abs().max()))
    return Outcome(not wrong and exact > 0 and refused > 0,
                   f"{exact} exact, {refused} refused, {len(wrong)} off by up to {max(wrong, default=0):g} integers")
