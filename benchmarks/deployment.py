"""Seconds for an exchange and for a round over Flower, on this machine: `python benchmarks/deployment.py --nodes 3 --rounds 4`.

Prints one JSON object: for each schedule the median and the largest exchange, and the rounds after the first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
from pathlib import Path

from fedtail.deployment.flower.example import names, write_example
from fedtail.deployment.flower.loopback import Loopback, read


def measured(out: Path) -> dict[str, object]:
    log = read(out / "log.txt")
    exchanges = [float(found) for found in re.findall(r"exchange \d+: .* replies, ([\d.]+) s", log)]
    done = re.findall(r"round \d+ of \d+: ([\d.]+) s, (\d+) exchanges", log)
    rounds = [(float(seconds), int(count)) for seconds, count in done]
    later = rounds[1:] or rounds
    return {"exchange_median_s": statistics.median(exchanges), "exchange_largest_s": max(exchanges), "exchanges": len(exchanges),
            "round_median_s": statistics.median(seconds for seconds, _ in later), "exchanges_a_round": later[-1][1],
            "first_round_s": rounds[0][0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--schedules", default="ahead,simple,together")
    told = parser.parse_args()
    found: dict[str, object] = {"nodes": told.nodes, "rounds": told.rounds, "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="fedtail-bench-", ignore_cleanup_errors=True) as temporary:
        folder, _ = write_example(Path(temporary) / "deployment", told.nodes, told.rounds)
        with Loopback(folder) as loopback:
            loopback.start_link()
            for name in names(told.nodes):
                loopback.register(name)
                loopback.start_node(name)
            for schedule in told.schedules.split(","):
                for method in ("FedAvg", "Delta-FL"):
                    out = folder.path / "runs" / f"{method}-{schedule}"
                    loopback.run(method=method, out=str(out), nodes=told.nodes, schedule=schedule)
                    loopback.wait(out, 900.0)
                    found[f"{method}, {schedule}"] = measured(out)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
