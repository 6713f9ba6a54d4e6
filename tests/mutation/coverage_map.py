"""Which tests reach which lines, and how long each takes: one run of each test file, repeated where it or what it reached changed.

Lines reached while a fixture of a module or session is made belong to every test that uses it, and caches of the package are
emptied before each test: which test came first is not to matter.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from mutation.operators import Mutant
from mutation.process import TIMEOUT, run_forked
from mutation.project import Project, digest

FILE_SECONDS = 900.0        # the longest a test file may take
TEST_SECONDS = 60.0         # a test that takes longer is never chosen
QUICK = 0.5


@dataclass(frozen=True)
class Test:
    """One test: where it is, how long it takes, how many lines of the areas it reaches."""

    node: str
    file: str
    seconds: float
    breadth: int


class CoverageMap:
    """Tests by line of the mutated files, read from the records of all test files."""

    def __init__(self, project: Project, most_seconds: float = float("inf")) -> None:
        self.project, self.most_seconds = project, most_seconds
        self.digests = {file.name: digest(file) for file in project.test_files}
        self.by_line: dict[str, dict[int, list[Test]]] = defaultdict(lambda: defaultdict(list))
        for file in project.test_files:
            for node, found in _record(project, file).get("tests", {}).items():
                test = Test(node, file.name, found["seconds"], sum(map(len, found["lines"].values())))
                for path, lines in found["lines"].items():
                    for line in lines:
                        self.by_line[path][line].append(test)

    def tests(self, mutant: Mutant) -> list[Test]:
        """The tests that reach a mutant, and take `most_seconds` together.

        Quick ones come first, of these the ones in files named after its module or package, then those that reach little else.
        """
        first, last = mutant.lines
        lines = self.by_line[mutant.path]
        found = {test.node: test for line in range(first, last + 1) for test in lines.get(line, []) if test.seconds <= TEST_SECONDS}
        own = {part.removesuffix(".py").strip("_") for part in mutant.path.split("/")[1:]}
        own |= {part.removesuffix("s") for part in own}

        def order(test: Test) -> tuple[bool, bool, int]:
            return test.seconds > QUICK, not any(part in test.file for part in own), test.breadth
        ordered = sorted(found.values(), key=order)
        ends = accumulate(test.seconds for test in ordered)
        return [test for test, end in zip(ordered, ends, strict=True) if end <= self.most_seconds or test is ordered[0]]


def measure(project: Project) -> None:
    """Runs every test file whose record is missing or old; the others cost nothing."""
    (project.cache / "coverage").mkdir(parents=True, exist_ok=True)
    for file in project.test_files:
        record = _record(project, file)
        if record and record["digest"] == digest(file) and all(
                (project.sources / path).is_file() and digest(project.sources / path) == value for path, value in record["sources"].items()):
            continue
        started = time.monotonic()
        code = run_forked(lambda file=file: _measured(project, file), _place(project, file).with_suffix(".log"), FILE_SECONDS)
        if code == TIMEOUT or not _place(project, file).is_file():
            raise RuntimeError(f"{file.name} did not end in {FILE_SECONDS:.0f} s, or broke: see {_place(project, file).with_suffix('.log')}. "
                               "Mend it, or name it under [left_out] with the reason.")
        tests = _record(project, file)["tests"]
        print(f"{file.name}: {len(tests)} tests, {time.monotonic() - started:.0f} s", flush=True)


def _measured(project: Project, file: Path) -> int:
    import coverage
    import pytest

    sys.dont_write_bytecode = False
    sys.path[:0] = [str(project.sources), str(project.root / project.tests)]
    measured = coverage.Coverage(data_file=None, config_file=False, include=[f"{project.sources}/{project.package}/*"], messages=False)
    plugin = _Contexts(measured, project.package)
    measured.start()
    code = pytest.main([str(file), *project.options], plugins=[plugin])
    measured.stop()
    data = measured.get_data()
    lines: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    sources = {}
    for path in (path for area in project.areas for path in project.files(area)):
        for line, contexts in data.contexts_by_lineno(str(project.sources / path)).items():
            for context in filter(None, contexts):
                lines[context][path].append(line)
                sources[path] = digest(project.sources / path)
    tests = {node: {"seconds": seconds, "lines": _merged([lines[node], *(lines[name] for name in plugin.fixtures[node])])}
             for node, seconds in plugin.passed.items()}
    record = {"digest": digest(file), "sources": sources, "tests": {node: test for node, test in tests.items() if test["lines"]}}
    partial = _place(project, file).with_suffix(".part")
    partial.write_text(json.dumps(record))
    partial.rename(_place(project, file))
    return int(code)


class _Contexts:
    """A plugin: each test, and each fixture that outlives a test, is a context of its own."""

    def __init__(self, measured: Any, package: str) -> None:
        self.measured, self.package = measured, package
        self.passed: dict[str, float] = {}
        self.fixtures: dict[str, set[str]] = defaultdict(set)
        self.shared: dict[str, str] = {}
        self.current = ""

    def pytest_runtest_protocol(self, item: Any) -> None:
        _empty_caches(self.package)
        self.current = item.nodeid
        self.measured.switch_context(item.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.outcome == "passed":
            self.passed[report.nodeid] = self.passed.get(report.nodeid, 0.0) + report.duration
        else:
            self.passed[report.nodeid] = float("inf")          # skipped or failing without any mutant: never chosen

    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> None:
        if fixturedef.scope != "function":
            name = f"fixture {fixturedef.baseid} {fixturedef.argname} {request.param_index}"
            self.measured.switch_context(name)

    def pytest_fixture_post_finalizer(self, fixturedef: Any, request: Any) -> None:
        self.measured.switch_context(self.current)

    def pytest_runtest_call(self, item: Any) -> None:
        self.measured.switch_context(item.nodeid)
        for name, definitions in item._fixtureinfo.name2fixturedefs.items():
            for definition in definitions:
                if definition.scope != "function":
                    index = item.callspec.indices.get(name, 0) if hasattr(item, "callspec") else 0
                    self.fixtures[item.nodeid].add(f"fixture {definition.baseid} {name} {index}")


def _merged(parts: list[dict[str, list[int]]]) -> dict[str, list[int]]:
    merged: dict[str, set[int]] = defaultdict(set)
    for part in parts:
        for path, lines in part.items():
            merged[path].update(lines)
    return {path: sorted(lines) for path, lines in merged.items()}


def _empty_caches(package: str) -> None:
    modules = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == package]
    for cached in _cached(modules):
        cached.cache_clear()


def _cached(modules: list[Any]) -> Iterator[Any]:
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, functools._lru_cache_wrapper):
                yield value


def _place(project: Project, file: Path) -> Path:
    return project.cache / "coverage" / f"{file.stem}.json"


def _record(project: Project, file: Path) -> dict[str, Any]:
    place = _place(project, file)
    return json.loads(place.read_text()) if place.is_file() else {}
