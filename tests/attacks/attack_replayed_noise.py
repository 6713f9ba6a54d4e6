"""Claim: noise from the operating system cannot be drawn again, by whoever knows every seed of a process or has a copy of it.

Attacker: seeds all generators of the process (Python's, numpy's, torch's) as the run did, or draws in a copy of the process, which
has the state of every generator that lives in it. Method: draw the noise of a release in the process, after seeding again, and in
two forked copies; any two that are alike have noise that can be subtracted.
"""

from __future__ import annotations

import os
import random

import numpy as np
import torch
from outcome import Outcome

from fedtail.privacy import DiscreteNoise, SystemRandomness

ROWS = torch.zeros(1, 16)


def drawn() -> bytes:
    """A client's share of the noise of a sum, as it would be sent."""
    return DiscreteNoise(2.0, planned_clients=1).on_client(ROWS, 1.0, False, SystemRandomness()).numpy().tobytes()


def in_a_copy() -> bytes:
    """The same in a copy of this process."""
    ours, theirs = os.pipe()
    if (child := os.fork()) == 0:
        os.write(theirs, drawn())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    return found


def attack() -> Outcome:
    """Draw from the same seeds and from copies of the process, and compare."""
    found = []
    for _ in range(2):
        random.seed(0)
        np.random.seed(0)      # noqa: NPY002 (the generator that everybody shares)
        torch.manual_seed(0)
        found.append(drawn())
    found += [in_a_copy(), in_a_copy()]
    alike = len(found) - len(set(found))
    return Outcome(not alike, f"{len(found)} draws of {len(found[0])} bytes from one state of the process, {alike} alike")
