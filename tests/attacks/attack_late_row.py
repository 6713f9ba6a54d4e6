"""Claimed: a row that comes after an all-or-nothing sum was given up stays hidden, or is covered by noise that is charged.

The attacker is a server that follows the protocol and stores everything. Of three nodes one answers too late; the other two are asked
again, as before for any sum, and as now for sums with noise only. Then the late row arrives: with it the masks of the first attempt cancel,
and the difference of the two sums is compared with the late node's own row, in units of one step of the integers.
"""

from __future__ import annotations

import contextlib
import warnings

import numpy as np
from outcome import Outcome

import fedtail
from fedtail.deployment.masking import AllOrNothing
from fedtail.secure import AllOrNothingRounds, LocalClients, Run, TooFew
from fedtail.secure.all_or_nothing import MaskedForAll
from fedtail.secure.frames import decode_bundle, decode_frame
from fedtail.secure.masks import row_from_bytes

from remote_cases import LOCAL, PEOPLE, TASK, Sites

BITS, WIDTH, LATE = 32, 1000, 2


def difference(repetitions: int, noise: float) -> np.ndarray | None:
    """The first attempt's sum with the late row less the retry's, without the late node's row; None where nobody answers the retry."""
    rng, rows = np.random.default_rng(0), np.random.default_rng(1).integers(0, 1 << 20, (3, WIDTH))
    clients, masked = LocalClients(range(3), b"run", repetitions=repetitions), []

    def exchange(contents):
        clients.rows = {one: rows[one] + np.rint(rng.normal(0, noise, WIDTH)).astype(np.int64) for one in range(3)}
        answers = clients(contents)
        if clients.exchanges == 2:                                     # after the keys: the rows of the first attempt, the late one among them
            masked.extend(row_from_bytes(decode_frame(MaskedForAll, one, run.id, 10**6).masked.row, WIDTH, BITS)
                          for answer in answers.values() for one in decode_bundle(answer))
            del answers[LATE]
        return answers

    run = Run(b"run", (0, 1, 2))
    rounds = AllOrNothingRounds(exchange, run)
    with contextlib.suppress(TooFew):
        rounds.sum(0, 0, WIDTH, BITS)
    try:
        retry = rounds.retry().total
    except TooFew:
        return None
    whole = np.sum(masked, axis=0, dtype=np.uint64).astype(np.int64) % (1 << BITS)
    return (whole - retry - rows[LATE] + (1 << BITS - 1)) % (1 << BITS) - (1 << BITS - 1)


def retries(method, channel) -> int:
    """How many retries the nodes of a run answered, one of which is missing in the first round."""
    sites, again = Sites(people=PEOPLE, vanish={3: {1}}), []
    before = AllOrNothing.sum_rows

    def counted(self, width, bits, context, repeat, needed=0):
        return before(self, width, bits, context, repeat and (lambda: again.append(1) or repeat()), needed)

    AllOrNothing.sum_rows = counted
    try:
        fedtail.train(method, TASK, fleet=sites.fleet(schedule="all-or-nothing"), rounds=1, channel=channel)
    finally:
        AllOrNothing.sum_rows = before
    return len(again)


def attack() -> Outcome:
    """Whether the difference was the late row, is refused now, and is noise where rows have some."""
    exposed, refused, noisy = difference(1, 0.0), difference(0, 0.0), difference(1, 1000.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = retries(fedtail.fedavg(30, **LOCAL), fedtail.SecureChannel(8, minimum_contributors=3))
        private = retries(fedtail.dp_fedavg(30, 0.1, 1.0, cohort_size=30, noise="discrete", planned_clients=18, **LOCAL), fedtail.SecureChannel(18, minimum_contributors=3))
    leaks, spread = exposed is not None and not exposed.any(), 0.0 if noisy is None else float(noisy.std())
    held = leaks and refused is None and spread > 1000 and (plain, private) == (0, 1)
    return Outcome(held, f"repeated without noise, the difference is the late row {'exactly' if leaks else 'no longer'}; now clients "
                         f"{'refuse' if refused is None else 'answer'}, and a run has {plain} retries without noise, {private} with it; with noise of 1000 "
                         f"in each row the difference misses the row by {spread:.0f}")
