"""Seconds and bytes of a secure sum for one client and for the server, next to what the protocol's formula says.

    python benchmarks/secure.py                    # 10, 100 and 500 clients, rows of 1e3, 1e5 and 1e6 entries; two minutes
    python benchmarks/secure.py --clients 10,100 --widths 1000

One session, one query, modulo 2^62, threshold n/2 + 1; one client drops between shares and row. Keys, shares and unmasking are
means over clients. The row is masked by one client; the others send noise of the same size, which takes the server as long.
The server's time is that of adding all rows and of unmasking their sum. One thread.

With q queries a session, rows of w entries, s clients who stay and d who drop (bytes without frames and heads):

    up      keys 72 + 64 q | shares 82 (n - 1) q | for each query: row ceil(bits / 8) w | unmasking 33 n
    down    keys (52 + 64 q) n | for each query: members 8 n | unmasking 82 (n - 1) + 8 n
    client  n - 1 agreements | for each query: 2 (n - 1) agreements, n masks of w words of 4 or 8 bytes
    server  for each query: s + d s masks
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from dataclasses import replace
from statistics import mean

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES, ChaCha20
from cryptography.hazmat.primitives.ciphers.modes import CTR
from environments import HERE, commit, machine
from pages import table

from fedtail.secure import Client, Server, Session
from fedtail.secure.frames import decode_frame, encode_frame
from fedtail.secure.messages import Masked
from fedtail.secure.primitives import fill_with_key_stream
from fedtail.secure.sum_client import Answered

BITS = 62


class Clock:
    """Seconds and bytes of each step."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.bytes: dict[str, list[int]] = {}

    def __call__(self, step, *given):
        began = time.perf_counter()
        done = step(*given)
        self.seconds.setdefault(step.__name__, []).append(time.perf_counter() - began)
        if isinstance(done, bytes):
            self.bytes.setdefault("up", []).append(len(done))
        self.bytes.setdefault("down", []).extend(len(one) for one in given if isinstance(one, bytes))
        return done

    def mean(self, *steps: str) -> float:
        return sum(mean(self.seconds[step]) for step in steps)


def set_up(count: int) -> tuple[Clock, Server, dict[int, Client]]:
    """Keys and shares of everybody."""
    session, clock = Session(b"benchmark", 0, tuple(range(count)), count // 2 + 1), Clock()
    server, clients = Server(session), {one: Client(session, one) for one in session.members}
    for one, client in clients.items():
        server.receive(one, clock(client.keys))
    for one, message in server.key_list().items():
        server.receive(one, clock(clients[one].shares, message))
    clock.bytes = {way: [sum(sizes) // count] for way, sizes in clock.bytes.items()}      # of one client
    return clock, server, clients


def query(count: int, width: int, clock: Clock, server: Server, clients: dict[int, Client]) -> dict[str, object]:
    """One query: client 0 masks, the last one drops, all others send noise."""
    clock, server, clients = copy.deepcopy(clock), copy.deepcopy(server), {k: copy.copy(one) for k, one in clients.items()}
    id, asked = server.session.id, server.ask(width, BITS)
    sent = clock(clients[0].masked_row, asked[0], np.arange(width))
    opened, noise = decode_frame(Masked, sent, id, 1 << 30), np.random.default_rng(0)
    adding = 0.0
    for one in range(count - 1):
        clients[one].state = replace(clients[one].state, members=server.members, answered=(Answered(0, opened.context_digest),))
        other = noise.integers(0, 1 << BITS, width, dtype=np.uint64).tobytes()
        message = encode_frame(id, replace(opened, sender=one, row=other))
        began = time.perf_counter()
        server.receive(one, message)
        adding += time.perf_counter() - began
    requests = server.unmask()
    up, down = [clock.bytes[way][0] + clock.bytes[way][1] for way in ("up", "down")]
    for one in list(requests)[:server.session.threshold]:
        server.receive(one, clock(clients[one].unmask, requests[one]))
    clock(server.total)
    up, down = up + clock.bytes["up"][-1], down + clock.bytes["down"][-1]
    keys, row, unmask, total = clock.mean("keys", "shares"), clock.mean("masked"), clock.mean("unmask"), clock.mean("total")
    return {"clients": count, "entries": f"{width:,}", "client s": f"{keys + row + unmask:.3f}",
            "keys and shares s": f"{keys:.3f}", "row s": f"{row:.3f}", "unmasking s": f"{unmask:.3f}",
            "server s": f"{adding + total:.3f}", "of it unmasking s": f"{total:.3f}",
            "up kB": f"{up / 1e3:.1f}", "formula up": f"{formula_up(count, width) / 1e3:.1f}", "down kB": f"{down / 1e3:.1f}",
            "formula down": f"{formula_down(count) / 1e3:.1f}", "plain row kB": f"{8 * width / 1e3:.0f}"}


def formula_up(n: int, width: int, q: int = 1) -> int:
    return 72 + 64 * q + 82 * (n - 1) * q + -(-BITS // 8) * width + 33 * n


def formula_down(n: int, q: int = 1) -> int:
    return (52 + 64 * q) * n + 8 * n + 82 * (n - 1) + 8 * n


def streams() -> str:
    """How fast masks are made and added, which is most of the work; and with the other cipher."""
    size = 1 << 17
    total, zeros, buffer = (np.zeros(size // 8, "<u8") for _ in range(3))

    def seconds(cipher: Cipher) -> float:
        stream, began = cipher.encryptor(), time.perf_counter()
        for _ in range(500):
            fill_with_key_stream(stream, buffer, zeros)
            np.add(total, buffer, out=total)
        return time.perf_counter() - began

    key = os.urandom(32)
    ciphers = Cipher(AES(key), CTR(bytes(16))), Cipher(ChaCha20(key, bytes(16)), None)
    best = [min(times) for times in zip(*[[seconds(one) for one in ciphers] for _ in range(7)], strict=True)]
    aes, chacha = (500 * size / one / 1e9 for one in best)
    return (f"Masks are made and added at {aes:.1f} GB/s (AES-256 in counter mode, best of 7); with ChaCha20 it would be "
            f"{chacha:.1f} GB/s.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=lambda text: [int(one) for one in text.split(",")], default=[10, 100, 500])
    parser.add_argument("--widths", type=lambda text: [int(one) for one in text.split(",")], default=[1_000, 100_000, 1_000_000])
    given = parser.parse_args()
    rows = []
    for count in given.clients:
        ready = set_up(count)
        for width in given.widths:
            rows.append(query(count, width, *ready))
            print(rows[-1], flush=True)
    where, command = machine(), " ".join(["python benchmarks/secure.py", *sys.argv[1:]])
    cells = [list(rows[0]), *([str(cell) for cell in row.values()] for row in rows)]
    text = ["# Secure sums", "", (__doc__ or "").split("\n\n", 2)[2], streams(), "", *table(cells), "",
            f"`{command}` at {commit()}, {where['processor']}, {where['cores']} cores, Python {where['python']}; load of the "
            f"machine {os.getloadavg()[0]:.1f}."]
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "secure.md").write_text("\n".join(text) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
