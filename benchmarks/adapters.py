"""Low-rank adapters on a frozen base of 100 million parameters, 50 clients a round: memory and seconds, `results/adapters.md`.

    python benchmarks/adapters.py               # or: --width 256 for a look at a base of 6 million

Held are the base, once, and the data; a round adds what the adapters need. Memory is that of this process and its workers which
nobody else shares, as in `scaling.py`.
"""

from __future__ import annotations

import argparse
import json
import os
from datetime import UTC, datetime

import torch
from architecture_suite import AdaptedTransformer
from environments import HERE, commit, machine, versions
from pages import number, table
from scaling import measured_rounds, own_memory

import fedtail
from fedtail import Population

CLIENTS, EXAMPLES, LENGTH, WORDS, LAYERS, RANK = 50, 2, 4, 1000, 8, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.manual_seed(0)
    empty = own_memory("RssAnon")
    module = AdaptedTransformer(WORDS, given.width, LENGTH, RANK, LAYERS)
    frozen = sum(p.numel() for p in module.parameters() if not p.requires_grad)
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    people = Population.from_clients([(torch.randint(WORDS, (EXAMPLES, LENGTH)), torch.randint(5, (EXAMPLES,)))
                                      for _ in range(CLIENTS)])
    method = fedtail.fedavg(CLIENTS, learning_rate=0.01, batch_size=EXAMPLES)
    shown = measured_rounds(method, module, people, given.rounds, empty)
    print(json.dumps(shown))
    base = 4 * frozen / 2**20
    lines = [["", "MiB"], ["the base, once", number(base)],
             ["50 copies of it, which a round does not make", number(CLIENTS * base)],
             ["50 rows of the adapter", number(4 * CLIENTS * trained / 2**20)],
             ["held before the first round", number(shown["MiB held"])],
             ["more at most in a round, with two workers", number(shown["MiB more in a round"])]]
    text = f"""# Adapters on a frozen base of {frozen:,} parameters

`python benchmarks/adapters.py`, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, commit {commit()}, {machine()}, {versions()}.
FedAvg of {CLIENTS} clients with {EXAMPLES} sequences of {LENGTH} tokens each, {trained:,} trained parameters, rank {RANK}; load
{os.getloadavg()[0]:.0f}.

{chr(10).join(table(lines))}

A round took {shown['seconds a round']:.1f} s, {shown['processor seconds']:.1f} of processors, on this shared machine.
"""
    if given.width == parser.get_default("width"):
        (HERE / "results" / "adapters.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
