"""`python -m audits`: run every audit, or those named, print what each found and, with --page, write the table in docs.

An audit observes a release as the library makes it, first as it is and then damaged. It passes where the lower bound on epsilon is
below the claim and within the factor for its kind, and the damaged release is caught: its bound is above the claim. Exit
status 1 where one does not pass.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from audits.catalogue import AUDITS
from audits.findings import carry_out
from audits.page import write_page


def main(arguments: list[str] | None = None) -> int:
    """Run the audits, and say whether one did not pass."""
    parser = argparse.ArgumentParser(prog="python -m audits", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(one.name for one in AUDITS)}; all without one")
    parser.add_argument("--quick", action="store_true", help="one audit of each kind, few observations, and larger damage: half a minute")
    parser.add_argument("--seed", type=int, help="for cohorts and noise of the simulator; from the operating system without one")
    parser.add_argument("--page", type=Path, help="the page whose table is written")
    given = parser.parse_args(arguments)
    unknown = set(given.names) - {one.name for one in AUDITS}
    if unknown:
        parser.error(f"there is no audit {min(unknown)!r}. There are {', '.join(one.name for one in AUDITS)}.")
    slow = [one.name for one in AUDITS if given.quick and one.name in given.names and not one.quick]
    if slow:
        parser.error(f"{slow[0]} has no quick form. Leave --quick out.")
    findings = []
    for audit in AUDITS:
        if audit.name in given.names or (not given.names and (audit.quick or not given.quick)):
            findings.append(carry_out(audit, given.quick, given.seed))
            print(findings[-1], flush=True)
            if given.page:
                write_page(given.page, findings)
    failed = [one.audit.name for one in findings if not one.passes]
    print(f"{len(findings)} audits, {len(failed)} did not pass{': ' if failed else ''}{', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
