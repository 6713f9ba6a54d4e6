"""Makes the node of one process lie or dawdle: FEDTAIL_FAULT is garbage, or late (by FEDTAIL_LATE seconds, 45 unless it says so).

Read by Python when it starts; only processes of a node are touched, Flower's or NVFlare's.
"""

import os
import sys

NODES = ("flwr-clientapp", "fedtail.deployment.nvflare.process join")

if os.environ.get("FEDTAIL_FAULT") and any(name in " ".join(sys.orig_argv) for name in NODES):
    import time

    from fedtail.deployment.site import Site

    handle = Site.handle

    def faulty(site, content, *more, **named):
        if os.environ["FEDTAIL_FAULT"] == "late":
            time.sleep(float(os.environ.get("FEDTAIL_LATE", "45")))
            return handle(site, content, *more, **named)
        return b"rubbish"

    Site.handle = faulty
