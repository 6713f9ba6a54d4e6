"""Nodes in this process behind one exchange, into which faults can be put."""

from __future__ import annotations

from dataclasses import replace

import torch

import fedtail
from fedtail.deployment import ClientRegistry, Node, RemoteFleet, Site
from fedtail.models import SoftmaxRegression

from cases import small_population

PEOPLE = replace(small_population(30), mass=torch.ones(30, dtype=torch.float64))
TASK = fedtail.Task(SoftmaxRegression(5, 3))
LOCAL = {"learning_rate": 0.2, "batch_size": 4}
ONE_QUESTION = {"quantile": fedtail.ExactQuantile(12)}


def registry_of(people, nodes):
    home = torch.arange(len(people)) * nodes // len(people)
    place = torch.cat([torch.arange(int((home == n).sum())) for n in range(nodes)])
    return ClientRegistry(people.key, people.mass, home, place, people.group)


class Sites:
    """`nodes` sites. `fault(exchange, node, letter, answer)` may replace a node's answer, by None to lose it.

    With `restart` every letter meets a new process, as on Flower: nothing but what was saved survives.
    """

    def __init__(self, nodes=5, people=PEOPLE, task=TASK, fault=None, restart=False, vanish=None, parts=(), test=None, **settings):
        self.registry, self.fault, self.restart, self.vanish = registry_of(people, nodes), fault, restart, vanish or {}
        self.people = {n: people.select(self.registry.node == n) for n in range(nodes)}
        self.task, self.parts, self.test, self.settings, self.woken = task, parts, test, settings, 0
        self.sites = {n: self.fresh(n) for n in range(nodes)}
        self.letters = []

    def fresh(self, node):
        def make():
            self.woken += 1
            return Node(self.people[node], self.task, self.parts, workers=1, test=self.test)
        return Site(make, **{"masked_only": False, **self.settings})

    def exchange(self, letters):
        now = len(self.letters)
        self.letters.append(dict(letters))
        answers = {}
        for node, letter in letters.items():
            if now in self.vanish.get(node, ()):
                continue
            if self.restart:
                self.sites[node] = self.fresh(node).restore(self.sites[node].save())
            answer = self.sites[node].handle(letter)
            answers[node] = self.fault(now, node, letter, answer) if self.fault else answer
        return {node: answer for node, answer in answers.items() if answer is not None}

    def fleet(self, **settings):
        return RemoteFleet(self.exchange, self.registry, **settings)


def params_of(trained):
    states = trained.state if isinstance(trained.state, tuple) else (trained.state,)
    return torch.cat([state.params for state in states])
