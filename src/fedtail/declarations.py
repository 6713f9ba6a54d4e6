"""What parts say of themselves: what they need, reveal, keep and bound.

A part *declares* once, in a frozen record; `fedtail.composition` decides from the records alone what fits what. A wrapper derives
its record from the inner part's with `dataclasses.replace`, so that nothing an inner part says is forgotten. What a part does not
declare is unknown, and unknown is refused, or measured, where it matters.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedtail.privacy.events import Release, Unit
from fedtail.privacy.mechanisms import Mechanism, NoPrivacy

ONE_BATCH = "it does not declare that it takes several at once (not_batched=\"\")"
UNDECLARED = "it does not declare that one client moves it by a bounded amount (not_private=\"\")"


@dataclass(frozen=True)
class Keeps:
    """A part's declaration that it keeps something on its clients between rounds."""

    lost: str                            # what it means when a client has lost it
    may_be_lost: bool = True             # False: such a part is refused where clients may forget


@dataclass(frozen=True)
class RiskDeclaration:
    """What a risk needs, reveals, keeps and bounds."""

    reads_losses: bool = True            # weights depend on the losses
    releases: tuple[Release, ...] | None = None      # what `fit` reveals in a round, at most; None: sums without noise
    mechanism: Mechanism = NoPrivacy()   # of the rows that answer those questions
    needs_everyone: bool = False         # every client in every round
    needs_groups: int | None = None      # clients in groups, numbered below this
    keeps: Keeps | None = None
    contributing: float | None = None    # the share of a cohort expected to have a non-zero weight; None: not known
    weight: float | None = None          # what densities sum to, as a share of the cohort; None: not known
    planned_clients: float | None = None      # the cohort that numbers of its own were planned for
    releases_weight: bool = False        # the dual tells what the densities sum to (`released_weight`)
    has_slope: bool = False              # `slope` is there
    not_private: str = UNDECLARED        # why noise on the sum would not make it private; empty where it does
    not_batched: str = ONE_BATCH         # why `value` and `weights` take losses (clients,) only; empty: (..., clients)
    dynamic_range: float = 0.0           # log of how far below its bound every weight may lie at once
    reads_cohort: bool = False           # `for_cohort` changes it by the cohort, so that its numbers tell of who was sampled

    def expected_contributors(self, cohort_size: float) -> float | None:
        """About how many of `cohort_size` clients are expected to have a non-zero weight; at least one if there is a client.

        None where the risk does not declare it.
        """
        return None if self.contributing is None else max(self.contributing * cohort_size, min(1.0, cohort_size))


@dataclass(frozen=True)
class AggregatorDeclaration:
    """What an aggregator needs, reveals and bounds."""

    columns: int                         # of a row, beside its vectors
    vectors: int = 1                     # how many entries a row has for each parameter of the model
    gathers: bool = False                # asks for single rows, not for their sum
    mechanism: Mechanism = NoPrivacy()   # of the rows
    needs_slope: bool = False            # of the risk's density
    total: float | None = None           # the weight that sums are divided by, where that is a public number
    divides_by_release: bool = False     # without a total: by the weight the risk releases
    reads_losses: bool = False           # rows hold the clients' losses, whatever the risk reads
    fewest_rows: int = 1                 # the fewest contributors of whom there is a result
    needs_kept_models: bool = False      # updates must be moves of models that local training keeps, and weights are not read
    questions: int = 1                   # how often a round asks for the same updates: beyond 1, clients keep them for the round
    most_rounds: int | None = None       # the rounds that its noise is planned for, from round 0; None: any number
    separation: int = 1                  # a client may participate once in so many rounds only


@dataclass(frozen=True)
class PersonalDeclaration:
    """What personal models keep."""

    keeps: Keeps | None = None           # a row on each client; None: there is no personal model, or local training keeps it
    kept_by_local: bool = False          # the models are those that local training keeps


@dataclass(frozen=True)
class LocalDeclaration:
    """What local training needs, keeps and leaves out."""

    everyone_trains: bool = False        # every client takes a step, whatever it draws; False: some may take none
    mean_updates: int = 0                # how often `prepare` has the cohort train, beside the training itself
    releases: tuple[Release, ...] = ()   # what other questions of `prepare` reveal in a round, at most
    reads_cohort: bool = False           # `prepare` sends numbers that depend on who was sampled
    answers_only: int = 0                # so many clients of a cohort answer what `prepare` asks, and only the others train
    keeps: Keeps | None = None           # rows of `Clients.keep`; the part that `prepare` gives declares it too
    keeps_models: bool = False           # those rows are models of clients' own, and an update is how far one has moved
    update_release: Release | None = None      # what each update reveals of one example, where noise inside clients hides them

    @property
    def unit(self) -> Unit:
        """The unit of privacy of a round: the example, where noise inside clients hides single ones; otherwise the client."""
        return "client" if self.update_release is None else "example"
