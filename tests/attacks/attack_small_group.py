"""Claimed: over a channel that hides single clients, no sum by group is released over fewer than `minimum_contributors` clients.

The attacker is a server that follows the protocol and divides what it is sent. `GroupAscent` asks for each group's mass and loss; of a
group of four clients now and then only one is in the cohort. Rounds are held as before and as now, and the group's loss as the server
reads it is compared with the one client's own. A population with a group of one client is offered too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from outcome import Outcome

import fedtail
from fedtail.channel import base
from fedtail.composition import refusals
from fedtail.engine.local_fleet import LocalFleet

from remote_cases import LOCAL, PEOPLE, TASK

ROUNDS, MINIMUM = 40, 2
SMALL = replace(PEOPLE, group=(torch.arange(30) >= 4).long())           # four clients, and 26
ALONE = replace(PEOPLE, group=(torch.arange(30) >= 1).long())           # one client, and 29
METHOD = replace(fedtail.fedavg(15, **LOCAL), risk=fedtail.GroupAscent(2))


@dataclass
class Server:
    """What the server of each round was sent about the small group, and the only client of it in the cohort, if it was one."""

    errors: list[float]
    others: int = 0

    def listen(self, round: int, sums: torch.Tensor, params: torch.Tensor) -> None:
        """Divide the loss of the small group by its mass, and compare it with the loss of the client that was alone in the cohort."""
        mass, loss = float(sums[0]), float(sums[2])
        ids = METHOD.sample(SMALL, 0, round).ids
        few = ids[ids < 4]
        if mass and len(few) < MINIMUM:
            module = TASK.with_params(params).eval()
            own = float(fedtail.evaluate(module, SMALL.select(few), TASK)["loss"].values[0])
            self.errors.append(abs(loss / mass - own) / own)
        self.others += bool(mass) and len(few) >= MINIMUM


def rounds(hide: Callable[..., Any]) -> Server:
    """Hold rounds in which small groups are hidden so, and listen to the server."""
    server, before, params = Server([]), base.leave_out_small_groups, [TASK.params()]
    fit = fedtail.GroupAscent.fit

    def overheard(self, previous):
        conversation, reply, number = fit(self, previous), None, len(params) - 1
        try:
            while True:
                reply = yield conversation.send(reply)
                server.listen(number, reply, params[-1])
        except StopIteration as end:
            return end.value

    base.leave_out_small_groups, fedtail.GroupAscent.fit = hide, overheard
    try:
        fedtail.train(METHOD, TASK, SMALL, rounds=ROUNDS, channel=fedtail.SecureChannel(8, MINIMUM, masks="none"),
                      on_round=lambda progress: params.append(progress.trained.state.params))
    finally:
        base.leave_out_small_groups, fedtail.GroupAscent.fit = before, fit
    return server


def attack() -> Outcome:
    """Whether single losses were read before, none is now, and a group of one is refused before the run starts."""
    before, now = rounds(lambda question, **_: question), rounds(base.leave_out_small_groups)
    refused = refusals(METHOD, ALONE, fedtail.SecureChannel(8, MINIMUM), LocalFleet(ALONE, TASK))
    worst = max(before.errors, default=1.0)
    return Outcome(bool(before.errors) and worst < 1e-6 and not now.errors and now.others > 0 and len(refused) == 1,
                   f"before, {len(before.errors)} of {ROUNDS} rounds gave one client's loss to {worst:.0e}; now {len(now.errors)}, and {now.others} rounds told "
                   f"of two clients or more; a group of one is {'refused' if refused else 'taken'} before the run starts")
