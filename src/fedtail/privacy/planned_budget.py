"""The privacy budget for which a method's noise was found: what a run of it may spend where none is given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fedtail.privacy.ledger import Ledger, PrivacyBudget


@dataclass(frozen=True)
class PlannedBudget:
    """The noise of a method was found for `epsilon` at `delta` over `rounds` rounds, which `dp_fedavg` was given, say.

    A run of the method is limited to epsilon at delta, whatever it costs with parts that were exchanged since, unless it is given
    a `PrivacyBudget` with an epsilon of its own.
    """

    epsilon: float
    delta: float
    rounds: int

    def for_run(self, given: PrivacyBudget | None) -> PrivacyBudget:
        """The privacy budget of a run that was `given` this one or None: as it is where it has an epsilon, else with the plan's.

        Raises ValueError where it has another delta without an epsilon, at which that of the plan means nothing.
        """
        given = given or PrivacyBudget()
        if given.epsilon is not None:
            return given
        if given.delta not in (None, self.delta):
            raise ValueError(f"the privacy budget has delta={given.delta:g} and no epsilon, and {self.words}. Give both, or none "
                             "of the two.")
        return replace(given, epsilon=self.epsilon, delta=self.delta)

    def check_ledger(self, ledger: Ledger) -> None:
        """Raise a ValueError where the `ledger` that a run was given has a budget without an epsilon: nothing would limit it."""
        if ledger.budget.epsilon is None:
            raise ValueError(f"the ledger has no epsilon, so that nothing would keep the run within its budget: {self.words}. "
                             f"Write Ledger(PrivacyBudget(epsilon={self.epsilon:g}, delta={self.delta:g}), ...), or drop the "
                             "plan with replace(method, budget=None).")

    @property
    def words(self) -> str:
        """What was planned, in words."""
        return (f"the method was made for epsilon = {self.epsilon:g} at delta = {self.delta:g} over {self.rounds} "
                f"{'round' if self.rounds == 1 else 'rounds'}")


def strictest_plan(plans: Iterable[PlannedBudget | None]) -> PlannedBudget | None:
    """The budget that keeps within all of `plans`, of methods trained together: the smallest of each number; None without any."""
    known = [plan for plan in plans if plan is not None]
    if not known:
        return None
    return PlannedBudget(*(min(getattr(plan, name) for plan in known) for name in ("epsilon", "delta", "rounds")))
