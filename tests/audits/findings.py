"""What an audit found: the claim, the bound, and the bound when the release is damaged."""

from __future__ import annotations

import time
from dataclasses import dataclass

from audits.catalogue import Audit


@dataclass(frozen=True)
class Finding:
    """`claimed` and `proven` epsilon of a release, `proven_damaged` of a damaged one, and what it took."""

    audit: Audit
    damage: str
    claimed: float
    proven: float
    proven_damaged: float
    observations: int
    seconds: float
    quick: bool

    @property
    def ratio(self) -> float:
        """The claim over the bound."""
        return self.claimed / self.proven if self.proven else float("inf")

    @property
    def holds(self) -> bool:
        """Whether the bound is below the claim and, in the full form, near enough to it."""
        return self.proven <= self.claimed and (self.quick or self.ratio <= self.audit.tightness)

    @property
    def caught(self) -> bool:
        """Whether the damaged release is proven to spend more than the claim."""
        return self.proven_damaged > self.claimed

    @property
    def passes(self) -> bool:
        """Whether the claim holds and the damage is caught."""
        return self.holds and self.caught

    def __str__(self) -> str:
        verdict = "passes" if self.passes else "DOES NOT PASS"
        return (f"{verdict:<13} {self.audit.name:<29} claimed {self.claimed:6.2f}  at least {self.proven:6.2f}  ratio {self.ratio:5.2f}  "
                f"{self.damage:<15} {self.proven_damaged:6.2f} {'caught' if self.caught else 'NOT CAUGHT'}  "
                f"({self.observations} observations, {self.seconds:.1f} s)")


def carry_out(audit: Audit, quick: bool = False, seed: int | None = None) -> Finding:
    """Observe the release as it is and damaged, each as often as the audit wants."""
    began, wanted = time.perf_counter(), audit.quick if quick else audit.wanted
    observed = audit.observe(wanted, seed)
    name, damaged = audit.quick_damage if quick else audit.full_damage
    with damaged():
        broken = audit.observe(wanted, None if seed is None else seed + 1)
    return Finding(audit, name, audit.claim(observed), audit.bound(observed), audit.bound(broken), len(observed.present),
                   time.perf_counter() - began, quick)
