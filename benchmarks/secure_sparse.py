"""Seconds and bytes of a secure sum, with a mask for every pair of clients and with few neighbours.

    python benchmarks/secure_sparse.py                              # 100, 1000 and 10,000 clients; a quarter of an hour
    python benchmarks/secure_sparse.py --clients 100,200 --pairs 50,100,200

One session, one query, rows of 10,000 entries modulo 2^62; 1% of the clients drop between shares and row. Every client runs in
this process, with the real cryptography, and the sum is compared with the plain one. A client's time is the mean over 20 of them,
for whom nothing is taken from caches that clients in one process share: keys (with the invitation), shares, row, unmasking. The
server's is that of all it does. Seconds are of the processor. Bytes are those of one client, the largest of each step, the row
among them. One thread.

With every pair the threshold is n/2 + 1. With few neighbours up to 10% of the clients may be corrupted and 10% drop out, rows are
secret but for a probability of 2^-40, sums are not lost but for one of 2^-20. `*` is not measured: seconds are extrapolated as
b n + c n^2 with b and c not negative, fitted to the three largest sizes of `--pairs` by least squares of relative errors (too
little for shares, whose numbers grow with n too); bytes as a + b n, which they are exactly.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
from environments import HERE, commit, machine
from pages import table
from scipy.optimize import nnls

from fedtail.secure import Client, Participant, Server, Session, SparseSession, disclosure_probability, sparse_session
from fedtail.secure.frames import decode_bundle, decode_invitation, encode_bundle
from fedtail.secure.sparse_graph import circle_order
from fedtail.secure.sparse_messages import members_from_bits

BITS, WIDTH, GONE = 62, 10_000, 0.01
ALONE, SHARED = 20, (decode_invitation, members_from_bits, circle_order, disclosure_probability)
STEPS = ("keys", "shares", "row", "unmasking")
Figures = dict[str, float]


def few(members: tuple[int, ...]) -> Session:
    return sparse_session(b"benchmark", 0, members, len(members) // 2 + 1, corrupted=0.1, dropped=0.1)


def every_pair(members: tuple[int, ...]) -> Session:
    return Session(b"benchmark", 0, members, len(members) // 2 + 1)


def measured(count: int, make: Callable[[tuple[int, ...]], Session]) -> Figures:
    """One whole sum; seconds of a client by step, of the server, and bytes."""
    session, row = make(tuple(range(count))), np.arange(WIDTH)
    server, gone = Server(session), max(1, int(GONE * count))
    people = {one: Participant(one, b"benchmark") for one in session.members}
    figures: Figures = defaultdict(float)

    def served(step: Callable[..., Any], *given: Any) -> Any:
        began = time.process_time()
        done = step(*given)
        figures["server"] += time.process_time() - began
        return done

    def exchange(name: str, contents: dict[int, bytes]) -> None:
        spent, up, down = [], 0, 0
        for place, (one, message) in enumerate(contents.items()):
            alone, content = place % -(-len(contents) // ALONE) == 0, encode_bundle([message])
            for shared in SHARED if alone else ():
                shared.cache_clear()
            began = time.process_time()
            answer, refused = people[one].answer(content, lambda round, ask, one=one: (row + one, b""))
            spent += [time.process_time() - began] if alone else []
            assert not refused, refused
            up, down = max(up, len(answer)), max(down, len(message))
            served(server.receive, one, decode_bundle(answer)[0])
        figures[name], figures["up"], figures["down"] = sum(spent) / len(spent), figures["up"] + up, figures["down"] + down

    exchange("keys", served(server.invite))
    exchange("shares", served(server.key_list))
    asked = served(server.ask, WIDTH, BITS)
    exchange("row", {one: message for one, message in asked.items() if one >= gone})
    exchange("unmasking", served(server.unmask))
    done = served(server.total)
    assert done.survivors == session.members[gone:]
    assert (done.total == (row * (count - gone) + sum(session.members[gone:])) % 2**BITS).all()
    figures["client"] = sum(figures[step] for step in STEPS)
    figures["neighbours"] = session.neighbours if isinstance(session, SparseSession) else count - 1
    return dict(figures)


def extrapolated(count: int, sizes: list[int], found: list[Figures]) -> Figures:
    """What every pair would take with so many clients."""
    n = np.array(sizes[-3:], float)
    figures: Figures = {"neighbours": count - 1}
    for name in (*STEPS, "server"):
        y = np.array([one[name] for one in found[-3:]])
        (b, c), _ = nnls(np.stack([n, n**2], 1) / y[:, None], np.ones(3))
        figures[name] = b * count + c * count**2
    for name in ("up", "down"):
        y = [one[name] for one in found[-2:]]
        figures[name] = y[1] + (y[1] - y[0]) / (n[2] - n[1]) * (count - n[2])
    figures["client"] = sum(figures[step] for step in STEPS)
    return figures


def line(count: int, figures: Figures, star: str = "") -> list[str]:
    seconds = [f"{figures[name]:.3g}{star}" for name in ("client", *STEPS, "server")]
    sizes = [f"{figures[way] / 1e3:,.0f}{star}" for way in ("up", "down")]
    return [f"{count:,}", f"{figures['neighbours']:,.0f}", *seconds, *sizes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=lambda text: [int(one) for one in text.split(",")], default=[100, 1000, 10_000])
    parser.add_argument("--pairs", type=lambda text: [int(one) for one in text.split(",")], default=[100, 250, 500, 1000])
    given = parser.parse_args()
    Client(every_pair((0, 1, 2)), 0).keys()                             # the first of everything
    before, after = [], []
    for count in given.pairs:
        before.append(measured(count, every_pair))
        print(line(count, before[-1]), flush=True)
    for count in given.clients:
        after.append(measured(count, few))
        print(line(count, after[-1]), flush=True)
    head = ["clients", "neighbours", "client s", *(f"{step} s" for step in STEPS), "server s", "up kB", "down kB"]
    known = dict(zip(given.pairs, before, strict=True))
    rows = [head]
    for count, figures in zip(given.clients, after, strict=True):
        old = known.get(count)
        rows += [line(count, old) if old else line(count, extrapolated(count, given.pairs, before), "*"), line(count, figures)]
    where, command = machine(), " ".join(["python benchmarks/secure_sparse.py", *sys.argv[1:]])
    text = ["# Secure sums with few neighbours", "", (__doc__ or "").split("\n\n", 2)[2], *table(rows), "",
            "The three sizes that `*` is extrapolated from:", "",
            *table([head, *(line(count, figures) for count, figures in list(known.items())[-3:])]), "",
            f"`{command}` at {commit()}, {where['processor']}, {where['cores']} cores, Python {where['python']}; load of the "
            f"machine {os.getloadavg()[0]:.1f}."]
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "secure_sparse.md").write_text("\n".join(text) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
