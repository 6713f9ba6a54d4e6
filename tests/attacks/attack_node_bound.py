"""Claimed: a server cannot measure rows by bounds: a row beyond its bound is not told.

The attacker is a server that departs from the protocol: it asks for the updates with smaller and smaller bounds on their entries, and
sees at which of them a node fails, because a row does not fit. Two defences: the bound is one of the accepted experiment, and a row beyond
it is clipped, and logged on the node. With both switched off bisection finds the largest entry of the first node's clients.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from unittest import mock

import torch
from outcome import Outcome

import fedtail

from departing_server import DepartingServer, nodes, train_question, truth, without

AGREEMENT = "fedtail.deployment.agreement:Agreement.check_question"
STEPS, LOW, HIGH = 14, 2.0**-7, 2.0**3


def largest_entry(clipped: bool, *off: str) -> float | None:
    """The largest entry of a row at the first node, by bisection; None where failures tell nothing."""
    with nodes() as hospitals, without(*off), mock.patch("fedtail.deployment.node.clipping", fedtail.channel.integer.clipping if clipped else lambda code: code):
        server, question, low, high = DepartingServer(hospitals), train_question(hospitals.method), LOW, HIGH
        server.begin(0)
        outcomes = set()
        for _ in range(STEPS):
            middle = (low * high) ** 0.5
            server.read(replace(question, aggregate=fedtail.WeightedMean(update_bound=middle)))
            failed = 0 in server.reports[-1].problems
            outcomes.add(failed)
            low, high = (middle, high) if failed else (low, middle)
    return (low * high) ** 0.5 if len(outcomes) == 2 else None


def attack() -> Outcome:
    """Whether failures tell nothing while either defence is on, and the entry without them."""
    logging.getLogger("fedtail.node").setLevel(logging.CRITICAL + 1)
    try:
        held = largest_entry(True), largest_entry(False), largest_entry(True, AGREEMENT)
        found = largest_entry(False, AGREEMENT)
    finally:
        logging.getLogger("fedtail.node").setLevel(logging.NOTSET)
    with nodes() as hospitals:
        question = train_question(hospitals.method)
    own = max(float(truth(question, [k])[1:].abs().max()) for k in range(10))
    exact = found is not None and torch.allclose(torch.tensor(found), torch.tensor(own), rtol=0.01)
    return Outcome(held == (None, None, None) and exact,
                   f"{STEPS} bounds tell {'nothing' if held == (None, None, None) else held}, with either defence alone too; with both switched off the "
                   f"largest entry is {found:.4g}, and it is {own:.4g}" if found else "nothing was found even without the defences")
