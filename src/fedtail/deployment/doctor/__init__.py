"""`fedtail deploy doctor`: attacks on one's own deployment, from outside and in its folders, and what they found open.

Everything is bounded in number and time, goes to the given address only, and changes nothing: calls that would change something
are sent in a form that is refused after it was let in. The one exception is a node that registers itself where anybody may; it is
unregistered at once.
"""

from __future__ import annotations

from fedtail.deployment.doctor.findings import CLOSED, NOT_TESTED, OPEN, TRUST, Finding
from fedtail.deployment.doctor.targets import examine_address, examine_folder

__all__ = ["CLOSED", "NOT_TESTED", "OPEN", "TRUST", "Finding", "examine_address", "examine_folder"]
