"""Pages of benchmarks: rows that stay when others are measured anew, slopes of growth, and where the next machine is needed."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    known = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - known:
        if (BENCHMARKS / f"{name}.py").exists():
            del sys.modules[name]


@pytest.mark.parametrize("name", ["architectures", "steps"])
def test_a_row_that_is_measured_anew_leaves_the_others(benchmark, tmp_path, name):
    module, path = benchmark(name), tmp_path / "page.md"
    assert benchmark("architectures").rows_of(path) == {}
    path.write_text(module.page({"GRU": "| GRU | 1 |", "MLP": "| MLP | 2 |"}, 3))
    rows = benchmark("architectures").rows_of(path)
    assert rows == {"MLP": "| MLP | 2 |", "GRU": "| GRU | 1 |"}              # in the order of the suite
    path.write_text(module.page({**rows, "GRU": "| GRU | 4 |"}, 3))
    assert list(benchmark("architectures").rows_of(path).values()) == ["| MLP | 2 |", "| GRU | 4 |"]
    assert " on 2 architectures" in path.read_text()


def test_slopes_are_those_of_a_power_and_begin_anew_with_a_path(benchmark):
    rows = [{"clients a round": n, "path": path, "seconds a round": n**0.5, "MiB held": n**2 / 2, "MiB more in a round": n**2 / 2}
            for path in ("closed form", "any module") for n in (10, 100, 1000)]
    found = benchmark("scaling_report").slopes("cohort", rows)
    assert found == [("", ""), ("0.50", "2.00"), ("0.50", "2.00")] * 2


def test_a_machine_is_full_where_the_formula_says(benchmark, tmp_path):
    """8 bytes for each client, 100 for each parameter, 500 for each of ten clients' examples, and 4 GiB of 8 to fill."""
    def line(question, axis, value, held, **more):
        shown = {axis: value, "seconds a round": 1.0, "MiB held": held / 2**20, "MiB more in a round": 0.0, "load": 1.0, **more}
        return {"kind": "scaling", "question": question, "about": "", "shown": shown}

    lines = [{"kind": "run", "date": "", "commit": "", "command": "", "machine": {"memory_gib": 8, "cores": 2}},
             *(line("population", "clients", n, 8 * n, **{"MiB in the folder": n / 2**20, "seconds to draw": 1e-8 * n})
               for n in (10**6, 10**7)),
             *(line("model", "parameters", n, 100 * n) for n in (10**6, 10**7)),
             *(line("examples", "examples a client", n, 500 * 10 * n) for n in (1, 10**4, 10**5)),
             *(line("cohort", "clients a round", n, n, path="closed form") for n in (10, 100))]
    (tmp_path / "2026-scaling.jsonl").write_text("\n".join(map(json.dumps, lines)))
    text = "\n".join(benchmark("scaling_report").section(tmp_path))
    room = 4 * 2**30 - 500 * 10
    assert f"at {room / 8 / 1e6:.0f} million clients" in text
    assert f"at {room / 100 / 1e6:.2g} million parameters" in text
    assert f"or at {room / 500 / 1e6:.2g} million examples" in text
    assert "10 ns for each client of the population" in text
