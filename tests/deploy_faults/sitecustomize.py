"""Makes the node of one process lie or dawdle: FEDTAIL_FAULT is garbage, or late. Read by Python when it starts."""

import os
import sys

if os.environ.get("FEDTAIL_FAULT") and "flwr-clientapp" in " ".join(sys.orig_argv):
    import time

    from fedtail.deployment.site import Site

    handle = Site.handle

    def faulty(site, content):
        if os.environ["FEDTAIL_FAULT"] == "late":
            time.sleep(45)
            return handle(site, content)
        return b"rubbish"

    Site.handle = faulty
