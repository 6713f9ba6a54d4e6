"""One mutant, tried: its source in a copy of the package, the tests that reach it in a forked process, up to the first that fails."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutation.coverage_map import Test
from mutation.operators import Mutant
from mutation.process import TIMEOUT, run_forked
from mutation.project import Project

STAGES = (10.0, 90.0, float("inf"))     # seconds of tests, by their usual time: most mutants are caught by the first few


@dataclass(frozen=True)
class Verdict:
    caught: bool
    by: str                             # the test that failed, or what else happened


class Copy:
    """A copy of the source folder in which one file at a time is changed. Processes the tests start see it, too."""

    def __init__(self, project: Project, folder: Path) -> None:
        self.project, self.folder = project, folder
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(project.sources, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
        run_forked(lambda: _pytest(project, self.source, [], write_bytecode=True), folder / "log", 600.0)

    @property
    def source(self) -> Path:
        return self.folder / "source"

    @contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        """With the mutant in place. Its time of change differs from the original's, so that no compiled file fits it."""
        place = self.source / mutant.path
        original, times = place.read_bytes(), place.stat()
        place.write_bytes(mutant.applied(original))
        os.utime(place, (times.st_atime, times.st_mtime + 10))
        try:
            yield
        finally:
            place.write_bytes(original)
            os.utime(place, ns=(times.st_atime_ns, times.st_mtime_ns))

    def run(self, tests: Sequence[Test]) -> Verdict:
        """Whether one of the tests fails, or takes ten times as long as usual."""
        log, usual = self.folder / "log", sum(test.seconds for test in tests)
        (self.folder / "failed").unlink(missing_ok=True)
        code = run_forked(lambda: _pytest(self.project, self.source, tests, failed=self.folder / "failed"), log, 10 * usual + 30)
        if code == TIMEOUT:
            return Verdict(True, "took too long")
        if code == 0:
            return Verdict(False, "")
        if code == 5:
            raise RuntimeError(f"pytest found none of {[test.node for test in tests]}: see {log}")
        failed = self.folder / "failed"
        return Verdict(True, failed.read_text() if failed.is_file() else f"an error before the first test (exit code {code})")

    def try_out(self, mutant: Mutant, tests: Sequence[Test]) -> Verdict:
        """All the tests, a few at first."""
        with self.changed(mutant):
            for stage in stages(tests):
                verdict = self.run(stage)
                if verdict.caught:
                    return verdict
        return Verdict(False, "")


def stages(tests: Sequence[Test]) -> list[list[Test]]:
    """The tests in their order, cut where their usual time adds up to the limits of the stages."""
    cut: list[list[Test]] = [[] for _ in STAGES]
    stage, spent = 0, 0.0
    for test in tests:
        while spent >= STAGES[stage]:
            stage, spent = stage + 1, 0.0
        cut[stage].append(test)
        spent += test.seconds
    return [stage for stage in cut if stage]


def _pytest(project: Project, source: Path, tests: Sequence[Test], failed: Path | None = None, write_bytecode: bool = False) -> int:
    import pytest

    sys.dont_write_bytecode = not write_bytecode
    sys.path[:0] = [str(source), str(project.root / project.tests)]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    os.chdir(project.root)
    names = list(dict.fromkeys(test.file for test in tests)) or [file.name for file in project.test_files]
    files = [f"{project.tests}/{name}" for name in names]
    options = [*project.options, "-x", "--tb=short"]
    chosen = _Chosen(tests, project.package, source, failed)
    return int(pytest.main([*files, *options, *([] if tests else ["--collect-only"])], plugins=[chosen]))


class _Chosen:
    """A plugin: only the chosen tests, file by file in their order, and the name of the one that fails."""

    def __init__(self, tests: Sequence[Test], package: str, source: Path, failed: Path | None) -> None:
        self.place = {test.node: position for position, test in enumerate(tests)}
        self.files = {name: position for position, name in enumerate(dict.fromkeys(test.file for test in tests))}
        self.package, self.source, self.failed = package, source, failed

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        module = sys.modules.get(self.package)
        if module is not None and not Path(str(module.__file__)).is_relative_to(self.source):
            os._exit(71)                # the tests would run something else
        if self.place:
            items[:] = sorted((item for item in items if item.nodeid in self.place),
                              key=lambda item: (self.files[item.path.name], self.place[item.nodeid]))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and self.failed is not None:
            self.failed.write_text(report.nodeid)
