"""`python -m mutation run`: tries a sample of the mutants of each area; `survivors` shows what is left; `summary` writes the page."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from mutation.campaign import try_all
from mutation.coverage_map import CoverageMap, measure
from mutation.project import Project
from mutation.summary import judge, show_survivors, write_summary


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mutation", description=__doc__)
    parser.add_argument("command", choices=["run", "measure", "survivors", "summary"])
    parser.add_argument("--project", type=Path, default=Path(__file__).with_name("project.toml"))
    parser.add_argument("--area", action="append", help="only this part of the package; may be given several times")
    parser.add_argument("--tests", action="append", help="only test files with this in their name, for a first look; may be given several times")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="only tests that take this long together, for a first look")
    parser.add_argument("--sample", type=int, default=60, help="mutants an area")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no mutant after this time")
    given = parser.parse_args(arguments)
    until = time.monotonic() + 60 * given.minutes
    project = replace(Project.read(given.project), only=tuple(given.tests or [""]))
    areas = given.area or list(project.areas)
    if unknown := set(areas) - set(project.areas):
        parser.error(f"unknown area {', '.join(sorted(unknown))}; there are {', '.join(project.areas)}")
    if given.command in ("run", "measure"):
        project.prepare()
        measure(project)
    if given.command == "measure":
        return 0
    covered = CoverageMap(project, given.seconds)
    if given.command == "run":
        for area in areas:
            print(f"{area}:", flush=True)
            try_all(project, project.sample(area, given.sample, given.seed), covered, given.jobs, until)
    found = [judge(project, area, given.sample, given.seed, covered) for area in areas]
    if given.command == "survivors":
        show_survivors(found)
        return 0
    everything = not given.area and not given.tests and given.seconds == float("inf") and all(area.tried == area.sampled for area in found)
    if given.command == "summary" or everything:
        write_summary(project, found, given.sample, given.seed, given.seconds)
    for area in found:
        print(area.line())
    return 0 if all(area.passes for area in found) else 1


if __name__ == "__main__":
    sys.exit(main())
