"""A server that departs from the protocol, against the part of one node that computes: both are in this process.

The node's part is made of its own settings, data, experiment and policy. Its budget is an empty one in a temporary folder, its
log is off, and it stores nothing: nothing is charged or written, whatever it answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fedtail.channel.base import RoundLost
from fedtail.channel.integer import FixedPoint
from fedtail.channel.plain import Plain
from fedtail.client_statistics import ClientStatistics
from fedtail.conversations import arrange_answers, single_questions
from fedtail.deployment.contributions import Weights, effective_clients
from fedtail.deployment.data_budget import DataBudget
from fedtail.deployment.deployed_experiment import agreed_channel
from fedtail.deployment.node import Ask, Open
from fedtail.deployment.node_messages import read_reply
from fedtail.deployment.registry import ClientRegistry
from fedtail.deployment.remote import RemoteFleet
from fedtail.deployment.settings import NodeSettings
from fedtail.deployment.site import Site
from fedtail.experiment.experiment import Experiment
from fedtail.fleet import Broadcast
from fedtail.privacy.randomness import SystemRandomness
from fedtail.questions import Statistic, StatisticPart, Train
from fedtail.risk.base import fit_locally
from fedtail.sampling import Cohort
from fedtail.secure.encoding import Refused
from fedtail.secure.frames import decode_bundle
from fedtail.wire import pack

CLIENTS = 8             # of the node, at least, in the cohort of an attack, where it has so many
MADE_UP = 1000          # clients to whose losses the server fits a dual as it likes
BITS = 62               # of the modulus of sums that are never made
Schedule = Literal["simple", "all-or-nothing"]
SCHEDULES: tuple[Schedule, ...] = ("simple", "all-or-nothing")


@dataclass(frozen=True)
class OwnLosses(StatisticPart):
    """A client's loss itself. No node knows this part from a message: it is asked of the node's own clients in this process."""

    def statistic(self, clients: ClientStatistics, trial: Tensor) -> Tensor:
        """The loss of each client, (clients, 1); `trial` is not used."""
        return clients.losses[:, None]


class DepartingServer:
    """Asks one node what it likes, for the method of one `experiment` that the node's operator was given."""

    def __init__(self, settings: NodeSettings, experiment: Experiment, folder: Path):
        """Make the node's computing part, which may write to the empty `folder` only; ValueError where it cannot be made."""
        self.experiment, self.policy = experiment, settings.read_policy()
        self.node = settings.make_node(0)
        self.node.consent, self.node.log, self.node.folder = None, None, None
        self._folder, self._number, self.said = folder, count(), ""
        start = experiment.task.make(0).params()
        params = start + torch.randn(start.shape, generator=torch.Generator().manual_seed(0)).to(start)      # no two losses alike
        self._broadcast = Broadcast(0, 0, params.expand(len(experiment.algorithm.members), -1).clone())
        people = self.node.fleet.population
        ids = torch.arange(min(len(people), max(CLIENTS, 2 * self.policy.smallest_tail)))
        self.cohort = Cohort(ids, people.key[ids], torch.ones(len(ids), dtype=torch.float64), float(people.mass.max()))
        shares = max(one.mechanism.minimum for one in experiment.algorithm.members)
        self.others = (max(self.policy.smallest_cohort, 2 * shares, CLIENTS),) * (max(3, settings.minimum) - 1)
        self.total = len(ids) + sum(self.others)

    def ask(self, question: Any, cohort: Cohort | None = None, others: tuple[int, ...] = (), anew: bool = True) -> Tensor | None:
        """The node's row for a question in a round of `cohort`, its own part, and so many clients at each other node.

        Entries are those before masks, int64, without the last. None where the node does not answer; then `said` is why. By
        default other nodes have enough clients for policy and noise. With `anew` off it is the round that is open, or another one
        of the same training, with the same budget.
        """
        part, others = self.cohort if cohort is None else cohort, others or self.others
        if anew:
            number = next(self._number)
            self.node.restore(b"")
            self._training = number.to_bytes(16, "big")
            self.node.budget = DataBudget(self._folder / str(number), self.policy)
        members = torch.tensor(list(enumerate((len(part.ids), *others))))
        encoding: Any = agreed_channel(self.experiment).encoding(int(members[:, 1].sum()), part.mass_bound)
        asked = pack(Ask(0, (question,), encoding))
        try:
            self.node.receive_broadcast(pack(Open(part, self._broadcast, self._training, (), members)), 0)
            row, _ = self.node.integer_row(asked, encoding.modulus_bits, 0, (range(len(members)), len(members)))
        except Exception as why:      # as the front of the node does, which sends refusals, and the types of errors
            self.said = str(why) if isinstance(why, Refused) else type(why).__name__
            return None
        return torch.from_numpy(row)[:-1]

    def honest_question(self, total: int) -> Train:
        """The question to train in a round of `total` clients, as a server that follows the protocol would ask it.

        What is asked before is answered by this node's clients alone, without a message.
        """
        member = self.experiment.algorithm.members[0]
        ones = torch.ones(total, dtype=torch.float64)
        everybody = Cohort(torch.arange(total), torch.arange(total), ones, self.cohort.mass_bound)
        conversation = member.conversation(member.initial_state(self._broadcast.params[0], 0), 0, everybody)
        self._open_locally()
        question = next(conversation)
        while True:
            several: tuple[Any, ...] = tuple(single_questions(question))
            training = [one for one in several if isinstance(one, Train) and one.marks_contributors]
            if training:
                return training[0]
            sums = self._collect(several)
            released = (one.mechanism.on_server(found, SystemRandomness()) for one, found in zip(several, sums, strict=True))
            question = conversation.send(arrange_answers(question, released))

    def lonely_question(self, question: Train) -> tuple[Train, int]:
        """The pair (`question` under a dual of the server's, effective contributors) with the fewest of the node's clients found.

        Duals that are tried are those that the risk fits to losses between the node's two largest, and a threshold there.
        """
        self._open_locally()
        losses, = self._collect((Statistic(OwnLosses(), torch.zeros(0), gather=True, objective=question.objective),))
        ranked = losses[:, 0].unique().tolist()
        threshold = sum(ranked[-2:]) / len(ranked[-2:])
        made_up = torch.full((MADE_UP,), threshold, dtype=torch.float64)
        duals = [question.dual]
        with suppress(Exception):      # a risk that needs more than losses, groups say, has no dual from them
            duals.append(fit_locally(question.risk.fit(None), ClientStatistics(made_up, torch.ones_like(made_up))))
        at_threshold = torch.tensor([threshold, threshold, 1.0, 0.0], dtype=torch.float64)
        duals += [torch.cat([at_threshold, one[4:]]) for one in duals if one.ndim == 1 and len(one) >= 4]
        tried = [replace(question, dual=one) for one in duals]
        found = [(effective_clients(self._collect((Weights(one, one.model),))[0][:, 0]), k) for k, one in enumerate(tried)]
        fewest, k = min((one for one in found if one[0] > 0), default=(0, 0))
        return tried[k], fewest

    def _open_locally(self) -> None:
        """Open a round of the whole cohort on the node's fleet, past all that the node checks, to compute with its clients."""
        self.node.restore(b"")
        self.node.fleet.open_round(self.cohort, self._broadcast)

    def _collect(self, questions: tuple[Any, ...]) -> list[Tensor]:
        """What the node's clients answer in the round that `_open_locally` opened: sums, or rows where they are gathered."""
        return self.node.fleet.collect(questions, Plain(len(self.cohort.ids), self.cohort.mass_bound))


def joins_unsigned(site: Site, minimum: int, schedule: Schedule) -> bool:
    """Whether `site`, as one of `minimum` nodes or more, takes part in a session without signatures to which it is invited."""
    joined: list[bool] = []
    node = torch.arange(max(3, minimum)).repeat_interleave(2)
    key, mass = torch.arange(len(node)), torch.ones(len(node), dtype=torch.float64)
    registry = ClientRegistry(key, mass, node, key % 2)

    def exchange(letters: Mapping[int, bytes]) -> dict[int, bytes]:
        """The reply of the site, which is node 0; the others are silent."""
        replies = {number: site.handle(letter) for number, letter in letters.items() if number == 0}
        answers = [read_reply(letters[number], one).secure for number, one in replies.items()]
        joined.extend(bool(one and decode_bundle(one)) for one in answers)
        return replies

    fleet = RemoteFleet(exchange, registry, schedule=schedule)
    fleet.change_population(registry, minimum)
    fleet.open_round(Cohort(key, key, mass, 1.0), Broadcast(0, 0, torch.zeros(1, 1)))
    with suppress(RoundLost):
        fleet.collect_masked((Statistic(OwnLosses(), torch.zeros(0)),), FixedPoint(len(node), 1.0, BITS), 2, lambda: None)
    return any(joined)
