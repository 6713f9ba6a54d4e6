"""Counts, intervals and survivors, with the reason given for each; the page that says so."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass

from mutation.campaign import Results
from mutation.coverage_map import CoverageMap
from mutation.operators import Mutant
from mutation.project import Project

NEEDED = 0.9        # of the mutants that are no equivalents
NORMAL = 1.959963984540054      # the normal distribution's quantile for an interval of 95%
KINDS = ("equivalent", "untested")


@dataclass(frozen=True)
class Survivor:
    mutant: Mutant
    change: str                 # the lines it changes, as a diff
    tests: int                  # how many reach it
    kind: str                   # "equivalent", "untested", or "" where nobody has said
    reason: str


@dataclass(frozen=True)
class Area:
    name: str
    population: int
    sampled: int
    tried: int
    caught: int
    survivors: tuple[Survivor, ...]

    @property
    def equivalent(self) -> int:
        return sum(survivor.kind == "equivalent" for survivor in self.survivors)

    @property
    def judged(self) -> int:
        return self.tried - self.equivalent

    @property
    def share(self) -> float:
        return self.caught / self.judged if self.judged else 1.0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's, 95%: the shares p of which the one found is at most NORMAL standard deviations away."""
        if not self.judged:
            return 0.0, 1.0
        square = NORMAL ** 2 / self.judged
        middle = (self.share + square / 2) / (1 + square)
        half = math.sqrt(square * (self.share * (1 - self.share) + square / 4)) / (1 + square)
        return max(0.0, middle - half), min(1.0, middle + half)

    @property
    def passes(self) -> bool:
        return self.tried == self.sampled and self.share >= NEEDED and all(survivor.kind for survivor in self.survivors)

    def cells(self) -> list[str]:
        low, high = self.interval
        return [f"`{self.name}`", str(self.population), str(self.tried), str(self.caught), str(self.equivalent),
                str(self.judged - self.caught), f"{self.share:.1%}", f"{low:.1%} to {high:.1%}"]

    def line(self) -> str:
        low, high = self.interval
        missing = sum(not survivor.kind for survivor in self.survivors)
        notes = [f"{self.sampled - self.tried} not tried yet"] * (self.tried < self.sampled) + [f"{missing} survivors without a reason"] * bool(missing)
        return (f"{self.name}: {self.tried} of {self.population} tried, {self.caught} caught, {self.equivalent} equivalent, "
                f"{self.judged - self.caught} survived: {self.share:.1%} ({low:.1%} to {high:.1%})" + "".join(f"; {note}" for note in notes))


def judge(project: Project, name: str, size: int, seed: int, covered: CoverageMap) -> Area:
    """What the results say of the sample of one area, counting only those that still hold."""
    results, reasons = Results(project), read_reasons(project)
    latest = results.read()
    sample = project.sample(name, size, seed)
    held = [(mutant, latest[mutant.identity]) for mutant in sample if results.holds(latest.get(mutant.identity), mutant, covered)]
    survivors = []
    for mutant, result in sorted(held, key=lambda pair: (pair[0].path, pair[0].start)):
        if not result.caught:
            kind, reason = reasons.get(mutant.identity, ("", ""))
            survivors.append(Survivor(mutant, change(project, mutant), len(covered.tests(mutant)), kind, reason))
    return Area(name, project.population(name), len(sample), len(held), sum(result.caught for _, result in held), tuple(survivors))


def read_reasons(project: Project) -> dict[str, tuple[str, str]]:
    """By identity: the kind, and the sentence."""
    place = project.root / project.reasons
    table = tomllib.loads(place.read_text()) if place.is_file() else {}
    reasons = {}
    for identity, entry in table.items():
        if entry["kind"] not in KINDS or not entry["reason"]:
            raise ValueError(f"{project.reasons}: {identity} needs a reason and a kind among {', '.join(KINDS)}, got {entry}.")
        reasons[identity] = (entry["kind"], entry["reason"])
    return reasons


def change(project: Project, mutant: Mutant) -> str:
    source = (project.sources / mutant.path).read_bytes()
    before, after = source.decode().splitlines(), mutant.applied(source).decode().splitlines()
    lines = [line for line in difflib.unified_diff(before, after, lineterm="", n=0) if line[:3] not in ("---", "+++") and line[:2] != "@@"]
    return "\n".join(line[0] + " " + line[1:].strip() for line in lines)


def show_survivors(areas: Sequence[Area]) -> None:
    """Those nobody has given a reason for, ready for the file of reasons."""
    for survivor in (survivor for area in areas for survivor in area.survivors if not survivor.kind):
        mutant = survivor.mutant
        print(f"# {mutant.path}:{mutant.number} {mutant.function}, {mutant.operator}; reached by {survivor.tests} tests")
        print("".join(f"#   {line}\n" for line in survivor.change.splitlines()), end="")
        print(f'[{mutant.identity}]\nkind = ""\nreason = ""\n')


def write_summary(project: Project, areas: Sequence[Area], size: int, seed: int, seconds: float) -> None:
    """The page; where only some tests were tried it says so, and what they caught is then a lower bound."""
    some = [*project.only] != [""] or seconds < math.inf
    tried = (f"Tried were only tests of `{'`, `'.join(project.only)}`, and of those that reach a mutant the first {seconds:g} s of work: all "
             "tests together catch at least as many.")
    heads = ["package", "mutants", "tried", "caught", "equivalent", "survived", "caught of the others", "95% interval"]
    rows = [heads, ["---", *["---:"] * (len(heads) - 1)], *(area.cells() for area in areas)]
    page = ["# Mutation tests", "",
            "Small defects are put into the source one at a time: another comparison, another constant, a bound dropped, a call removed. The tests",
            "that reach the changed line should fail. `make mutants` tries a seeded sample of each package and writes this page",
            f"(here `SAMPLE={size} SEED={seed}`); it fails where fewer than {NEEDED:.0%} of the mutants that change any behaviour are caught,",
            "or a survivor has no reason. The interval is Wilson's, for all mutants of the package. Tests that were written for survivors of a",
            "sample make its own figures too good, so the figures here are of a sample that nobody had looked at before.",
            *[tried] * some, "",
            *("| " + " | ".join(row) + " |" for row in rows), "", "## Survivors", ""]
    for area in areas:
        for survivor in area.survivors:
            mutant = survivor.mutant
            page += [f"`{mutant.path}`, `{mutant.function or 'module'}` ({mutant.operator}). *{survivor.kind or 'no reason yet'}*: {survivor.reason}", "",
                     "```diff", survivor.change, "```", ""]
    (project.root / project.summary).write_text("\n".join(page).rstrip() + "\n")
