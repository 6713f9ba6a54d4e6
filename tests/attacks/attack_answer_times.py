"""Claimed: with `answer_after`, when a node answers does not tell whether its clients are in the tail.

The attacker is a server that follows the protocol, or anybody on the network: it notes when each node's reply to the training
question comes, and takes the nodes that took longest for those in the tail. Nodes whose clients have no weight do not train. Which
nodes are in the tail is drawn anew for every run; rounds are held with the real code of nodes, under masks. The same is done without
the option.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from outcome import Outcome
from scipy.stats import mannwhitneyu

import fedtail
from fedtail.deployment import PARTS
from fedtail.deployment.node_messages import read_message
from fedtail.models import SoftmaxRegression
from fedtail.questions import Train
from fedtail.wire import types_by_name, unpack

from remote_cases import Sites

NODES, TAIL, CLIENTS = 6, 3, 5
AFTER = 1.0                                                           # seconds: many times what training takes here
ERROR_RATE = 1e-3                                                     # how often times that tell nothing are accused of telling
RULE = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
MODEL = SoftmaxRegression(5, 3)
MODEL.load_state_dict({name: RULE if value.ndim == 2 else torch.zeros_like(value) for name, value in MODEL.state_dict().items()})
TASK, TYPES = fedtail.Task(MODEL), types_by_name(PARTS)
METHOD = fedtail.delta_fl(TAIL / NODES, NODES * CLIENTS, quantile=fedtail.ExactQuantile(12), local_steps=150, learning_rate=1e-6, batch_size=8)


class TimedSites(Sites):
    """Nodes whose replies to training questions are timed, as the server sees it; which of them are in the tail is drawn.

    Other messages are answered at once, to save time: what they take does not depend on weights.
    """

    def __init__(self, seed: int, answer_after: float):
        self.hard = set(np.random.default_rng(seed).permutation(NODES)[:TAIL].tolist())
        self.times: list[tuple[bool, float]] = []                     # whether the node is in the tail, and seconds
        super().__init__(NODES, people=clients_of(self.hard, seed), task=TASK)
        self.answer_after = answer_after

    def exchange(self, letters):
        at_once = 1 if not self.answer_after else NODES               # those that wait do so side by side
        with ThreadPoolExecutor(at_once) as pool:
            answers = dict(zip(letters, pool.map(self.answer, letters, letters.values()), strict=True))
        self.times += [(node in self.hard, taken) for node, (_, taken) in answers.items() if asks_to_train(letters[node])]
        return {node: answer for node, (answer, _) in answers.items()}

    def answer(self, node: int, letter: bytes) -> tuple[bytes, float]:
        """A node's answer, and the seconds that it took."""
        self.sites[node].answer_after = self.answer_after if asks_to_train(letter) else 0.0
        began = time.monotonic()
        answer = self.sites[node].handle(letter)
        return answer, time.monotonic() - began


def asks_to_train(letter: bytes) -> bool:
    """Whether a message asks for a row of updates."""
    message = read_message(letter)
    return bool(message.ask) and any(isinstance(one, Train) for one in unpack(message.ask, TYPES).questions)


def clients_of(hard: set[int], seed: int) -> fedtail.Population:
    """Clients of equal mass: at the hard nodes the model is always wrong, and at the others always right."""
    random, pairs = torch.Generator().manual_seed(seed), []
    for client in range(NODES * CLIENTS):
        x = torch.randn(20, 5, generator=random)
        scores = x @ RULE.T
        pairs.append((x, scores.argmin(1) if client // CLIENTS in hard else scores.argmax(1)))
    return fedtail.Population.from_clients(pairs)


def observed(runs: int, rounds: int, answer_after: float) -> tuple[np.ndarray, np.ndarray]:
    """Of every reply to a training question: whether its node is in the tail, and how many seconds it took."""
    times: list[tuple[bool, float]] = []
    for seed in range(runs):
        sites = TimedSites(seed, answer_after)
        fedtail.train(METHOD, TASK, fleet=sites.fleet(schedule="simple"), rounds=rounds, channel=fedtail.SecureChannel(16, minimum_contributors=3))
        times += sites.times
    tail, seconds = zip(*times, strict=True)
    return np.array(tail), np.array(seconds)


def guessed_right(tail: np.ndarray, seconds: np.ndarray) -> float:
    """How often the slower half of the nodes of a question are those in its tail; half is chance."""
    found = seconds.reshape(-1, NODES).argsort(1)[:, NODES - TAIL:]
    return float(np.take_along_axis(tail.reshape(-1, NODES), found, 1).mean())


def tells(tail: np.ndarray, seconds: np.ndarray) -> float:
    """The p-value of a rank-sum test that replies take as long from nodes in the tail as from others."""
    return float(mannwhitneyu(seconds[tail], seconds[~tail]).pvalue)


def attack() -> Outcome:
    """Whether the times tell the tail without the option, and nothing with it."""
    before, after = observed(5, 2, 0.0), observed(5, 2, AFTER)
    held = guessed_right(*before) > 0.9 and tells(*before) < ERROR_RATE and tells(*after) > ERROR_RATE
    return Outcome(held, f"by the time, {guessed_right(*before):.0%} of the tail is guessed when nodes answer at once "
                         f"({np.median(before[1][before[0]]):.3f} s against {np.median(before[1][~before[0]]):.3f} s), {guessed_right(*after):.0%} when "
                         f"they answer after {AFTER} s (chance 50%, p = {tells(*after):.2g})")
