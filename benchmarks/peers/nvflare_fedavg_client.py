"""The client of NVFlare's own FedAvg, a script for its Client API; it notes the time of every round that begins."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import nvflare.client as flare


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", required=True, help="the folder of node_work.py")
    parser.add_argument("--data", required=True, help="the folder with SITE.npz; SITE.times is written there")
    given = parser.parse_args()
    sys.path.insert(0, given.work)
    import node_work

    flare.init()
    place, model = Path(given.data), node_work.module()
    name = flare.get_site_name()
    clients = node_work.read_clients(place / f"{name}.npz")
    while flare.is_running():
        received = flare.receive()
        with (place / f"{name}.times").open("a") as times:
            times.write(f"{time.time()}\n")
        node_work.load_numpy(model, received.params["numpy_key"])
        examples = node_work.train(model, clients, received.current_round)
        flare.send(flare.FLModel(params={"numpy_key": node_work.to_numpy(model)}, meta={"NUM_STEPS_CURRENT_ROUND": examples}))


if __name__ == "__main__":
    main()
