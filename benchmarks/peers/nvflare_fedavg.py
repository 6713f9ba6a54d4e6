"""NVFlare's own FedAvg: its POC deployment on this machine, provisioned with certificates and mutual TLS, its FedAvg controller,
and a script for its Client API on each of three sites. `python nvflare_fedavg.py FOLDER ROUNDS` writes FOLDER/SITE.times.

Sites are processes that stay; a job starts one more on each, which stays for the job.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import node_work
from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
from nvflare.recipe.poc_env import PocEnv

PATIENCE = 900.0


def main(folder: Path, rounds: int) -> None:
    sites = sorted(path.stem for path in folder.glob("*.npz"))
    start = node_work.to_numpy(node_work.module())      # with the recipe for torch modules the job holds a copy of torch, 45 MB
    recipe = NumpyFedAvgRecipe(name="fedavg", model=start.tolist(), min_clients=len(sites), num_rounds=rounds,
                               train_script=str(HERE / "nvflare_fedavg_client.py"), train_args=f"--work {HERE} --data {folder}")
    environment = PocEnv(clients=sites, num_clients=len(sites), extra={"login_timeout": 120})
    try:
        run, end = recipe.execute(environment), time.monotonic() + PATIENCE
        while not (status := str(run.get_status() or "")).startswith("FINISHED"):
            if time.monotonic() > end:
                raise SystemExit(f"the job is {status or 'unknown'} after {PATIENCE:g} s")
            time.sleep(5)          # each question is a new session of the administrator
        if status != "FINISHED:COMPLETED":
            raise SystemExit(f"the job is {status}; see the logs in {folder / 'poc'}")
    finally:
        environment.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
