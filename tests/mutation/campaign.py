"""Many mutants, tried one after another, each result kept at once: a run that is killed goes on where it stopped.

A mutant that was caught stays so until its file changes. One that survived is tried again where the tests that reach it changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mutation.coverage_map import CoverageMap, Test
from mutation.operators import Mutant
from mutation.process import die_with_parent
from mutation.project import Project, digest
from mutation.trial import Copy


@dataclass(frozen=True)
class Result:
    identity: str
    source: str                 # digest of the file that was changed
    tests: str                  # digest of the tests that reach it
    caught: bool
    by: str
    seconds: float


class Results:
    """An append-only file of results; the last one about a mutant holds."""

    def __init__(self, project: Project) -> None:
        self.project, self.path = project, project.cache / "results.jsonl"
        self.sources: dict[str, str] = {}

    def read(self) -> dict[str, Result]:
        latest: dict[str, Result] = {}
        for line in self.path.read_text().splitlines() if self.path.is_file() else []:
            try:
                result = Result(**json.loads(line))
            except (json.JSONDecodeError, TypeError):
                continue                                    # cut short when the run was killed
            latest[result.identity] = result
        return latest

    def add(self, result: Result) -> None:
        """One write, on a line of its own even after one that was cut short."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            cut_short = file.tell() and not self.path.read_bytes().endswith(b"\n")
            file.write(b"\n" * cut_short + json.dumps(vars(result)).encode() + b"\n")

    def holds(self, result: Result | None, mutant: Mutant, covered: CoverageMap) -> bool:
        """Whether a result is about the mutant as it is now, with the tests that there are now."""
        if result is None or result.source != self.source(mutant):
            return False
        return result.caught or result.tests == tests_digest(covered, covered.tests(mutant))

    def source(self, mutant: Mutant) -> str:
        if mutant.path not in self.sources:
            self.sources[mutant.path] = digest(self.project.sources / mutant.path)
        return self.sources[mutant.path]


def tests_digest(covered: CoverageMap, tests: Sequence[Test]) -> str:
    parts = sorted((test.node, covered.digests[test.file]) for test in tests)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def try_all(project: Project, mutants: Sequence[Mutant], covered: CoverageMap, jobs: int, until: float) -> None:
    """Tries those without a result that holds, `jobs` at a time, until the time `until` (monotonic seconds)."""
    results = Results(project)
    latest = results.read()
    waiting = [mutant for mutant in mutants if not results.holds(latest.get(mutant.identity), mutant, covered)]
    print(f"{len(mutants)} mutants, {len(waiting)} to try", flush=True)
    if not waiting:
        return
    with (project.cache / "lock").open("w") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)            # gone with this process, however it ends
        except OSError:
            raise SystemExit(f"Another run is under way in {project.cache}. Wait for it, or end it.") from None
        _in_jobs(project, waiting, covered, results, jobs, until)


def _in_jobs(project: Project, waiting: Sequence[Mutant], covered: CoverageMap, results: Results, jobs: int, until: float) -> None:
    children = []
    for job in range(jobs):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                die_with_parent()
                _try_share(project, waiting[job::jobs], covered, results, project.cache / f"copy{job}", until)
                code = 0
            except BaseException as error:
                print(f"job {job}: {type(error).__name__}: {error}", flush=True)
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        raise SystemExit("A job broke off; what it had found is kept. Run it again to go on.")


def _try_share(project: Project, mutants: Sequence[Mutant], covered: CoverageMap, results: Results, folder: Path, until: float) -> None:
    copy = Copy(project, folder)
    for mutant in mutants:
        if time.monotonic() > until:
            return
        started, tests = time.monotonic(), covered.tests(mutant)
        verdict = copy.try_out(mutant, tests)
        seconds = round(time.monotonic() - started, 2)
        results.add(Result(mutant.identity, results.source(mutant), tests_digest(covered, tests), verdict.caught, verdict.by, seconds))
        word = "caught by " + verdict.by if verdict.caught else f"SURVIVED {len(tests)} tests"
        print(f"{mutant.identity} {seconds:6.1f} s  {mutant.path}:{mutant.number} {mutant.operator}: {word}", flush=True)
