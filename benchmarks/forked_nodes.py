"""`python benchmarks/forked_nodes.py FOLDER ...`: nodes over NVFlare, forked from this process when it has loaded what they need.

For tests of many nodes on one machine: they share the pages of torch and NVFlare. Prints their process ids as a JSON list;
SIGTERM ends all of them. On machines of their own, nodes are started by `fedtail deploy join`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
from pathlib import Path


def main(folders: list[str]) -> None:
    import fedtail.deployment.node
    import fedtail.deployment.nvflare.node
    import fedtail.deployment.registry
    import fedtail.deployment.settings
    import fedtail.deployment.site
    import fedtail.experiment.trust  # noqa: F401
    from fedtail.deployment.nvflare.process import join

    gc.freeze()                                              # so that collections do not copy the shared pages
    ids = []
    for folder in folders:
        pid = os.fork()
        if not pid:
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)       # ended with this process
            os.close(1)
            os.open(os.devnull, os.O_WRONLY)
            join(Path(folder))
        ids.append(pid)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    print(json.dumps(ids), flush=True)
    try:
        signal.pause()
    finally:
        for pid in ids:
            os.kill(pid, signal.SIGTERM)
        for pid in ids:
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
