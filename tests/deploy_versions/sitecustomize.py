"""Gives the node of one process another wire version, as a fedtail of another release has: FEDTAIL_WIRE is its number.

Read by Python when it starts; only processes of a node over NVFlare are touched.
"""

import os
import sys

if os.environ.get("FEDTAIL_WIRE") and "fedtail.deployment.nvflare.process join" in " ".join(sys.orig_argv):
    from fedtail.deployment import wire_version

    wire_version.WIRE_VERSION = int(os.environ["FEDTAIL_WIRE"])
    wire_version.READABLE = frozenset({wire_version.WIRE_VERSION})
    from fedtail.deployment import registry

    registry.READABLE = wire_version.READABLE
