"""`noise_multiplier = "budget"` in a file: the noise follows from epsilon, delta and the number of rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fedtail.algorithm import Method
from fedtail.budgeted_noise import QUANTILE_RATIO, noise_for_method, quantile_noise
from fedtail.channel import Channel
from fedtail.experiment.part_tables import PartPlan
from fedtail.experiment.source import Key, Source
from fedtail.privacy.ledger import PrivacyBudget

BUDGET = "budget"                       # in place of a noise multiplier
BY = "[privacy] epsilon, delta and rounds"


def has_noise_from_budget(source: Source) -> bool:
    """Whether some `noise_multiplier` of the file, in any section or method, is "budget"."""
    return any(True for _ in _budget_keys(source.tables))


def with_noise_from_budget(source: Source, budget: PrivacyBudget, rounds: int, channel: Channel,
                           build: Callable[[Source], Method]) -> Source:
    """A copy of the source whose noise multipliers that are "budget" are numbers: the smallest that the budget allows.

    Noise of a histogram follows from that of the updates, so that it costs a quarter of them. `build` makes the method of a
    source, with whose releases over `channel` the price is computed. The source itself where none is "budget". Raises
    ExperimentError where [privacy] gives no epsilon, or where the number of clients is needed and not given.
    """
    keys = list(_budget_keys(source.tables))
    if not keys:
        return source
    if budget.epsilon is None or budget.delta is None:
        raise source.error_at(keys[0], "noise_multiplier = \"budget\" needs a budget. Write [privacy] and below it epsilon = 5.0 "
                                       "and delta = 1e-5, say.")
    population = source.section_table("sample").get("population")
    if not isinstance(population, int):
        raise source.error_at(keys[0], "noise_multiplier = \"budget\" needs the number of training clients. Write population = "
                                       "1000, say, below [sample], beside part = \"Poisson\" and rate.")
    updates = [key for key in keys if "histogram" not in key]

    def with_noise(z: float) -> Source:
        """The source with noise of multiplier z for updates, and the noise that follows from it for histograms."""
        changed = source
        for key in keys:
            both = len(updates) < len(keys) and updates
            changed = changed.with_value(key, quantile_noise(z, QUANTILE_RATIO) if both and key not in updates else z, BY)
        return changed

    if isinstance(build(with_noise(1.0)), PartPlan):
        raise source.error_at(keys[0], "the noise of a budget follows from all parts, and code of your own was not imported. "
                                       "Write the number in place of \"budget\", or allow the code with --trust.")
    try:
        noise = noise_for_method(lambda z: build(with_noise(z)), population, budget.epsilon, budget.delta, rounds, channel,
                                 budget.adjacency)
    except ValueError as reason:
        raise source.error_at(keys[0], reason) from reason
    return with_noise(noise)


def _budget_keys(table: Any, key: Key = ()) -> Iterator[Key]:
    """Yield the keys of nested tables and lists of tables whose last word is `noise_multiplier` and whose value is "budget"."""
    if isinstance(table, (dict, list)):
        for name, value in table.items() if isinstance(table, dict) else enumerate(table):
            yield from _budget_keys(value, (*key, name))
    elif key and key[-1] == "noise_multiplier" and table == BUDGET:
        yield key
