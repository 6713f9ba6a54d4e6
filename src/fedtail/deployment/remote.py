"""A fleet whose clients live elsewhere, behind one function that exchanges bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedtail.channel.base import Encoder
from fedtail.clients import Broadcast, ClientMemory
from fedtail.deployment.node import PARTS, Ask, Close, Failure, Open
from fedtail.questions import Question
from fedtail.sampling import Cohort
from fedtail.wire import named, pack, unpack

Exchange = Callable[[Mapping[int, bytes]], Mapping[int, bytes]]      # a message for some nodes, a reply from each


@dataclass(frozen=True)
class Roster:
    """What a server knows of its clients: enough to draw a cohort and to find them."""

    key: Tensor                 # (clients,) int64, as in the population
    mass: Tensor                # (clients,) float64
    node: Tensor                # (clients,) int64, ascending: which node holds the client
    place: Tensor               # (clients,) int64: where in that node's population
    group: Tensor | None = None  # (clients,) int64

    def __len__(self) -> int:
        return len(self.key)


class RemoteFleet:
    """Asks nodes by bytes; each returns one partial sum for each question. `forgets` says whether nodes may lose memory."""

    def __init__(self, exchange: Exchange, roster: Roster, forgets: bool = True):
        self.exchange, self.population, self.forgets = exchange, roster, forgets
        self.types = named(PARTS)
        self.nodes: list[int] = []
        self.round = -1

    def open(self, cohort: Cohort, broadcast: Broadcast) -> None:
        home, self.round = self.population.node[cohort.ids], broadcast.round
        self.nodes = home.unique().tolist()
        messages = {}
        for node in self.nodes:
            here = home == node
            drawn = Cohort(self.population.place[cohort.ids[here]], cohort.key[here], cohort.importance[here], cohort.mass_bound)
            messages[node] = pack(Open(drawn, broadcast))
        self._send(messages)

    def collect(self, questions: tuple[Question, ...], encoding: Encoder) -> list[Tensor]:
        replies = self._send(dict.fromkeys(self.nodes, pack(Ask(self.round, questions, encoding))))
        return [torch.cat(parts) if question.gather else encoding.sum(torch.stack(parts))
                for question, parts in zip(questions, zip(*replies, strict=True), strict=True)]

    def close(self, finished: bool) -> None:
        nodes, self.nodes = self.nodes, []
        self._send(dict.fromkeys(nodes, pack(Close(finished))))

    def view(self) -> None:
        """Nothing that only a simulator could see."""

    def memory(self) -> ClientMemory:
        """Nodes keep their own; none of it is seen here."""
        return ClientMemory(self.population.key, {})

    def recall(self, memory: ClientMemory) -> None:
        """Nodes remember by themselves."""

    def _send(self, messages: Mapping[int, bytes]) -> list[Any]:
        """Replies in the order of the nodes."""
        replies = self.exchange(messages)
        values = [unpack(replies[node], self.types) for node in messages]
        for node, value in zip(messages, values, strict=True):
            if isinstance(value, Failure):
                raise RuntimeError(f"node {node} failed: {value.reason}")
        return values
