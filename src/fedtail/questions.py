"""What a server may ask. A question is frozen data; a client answers with a row, the server gets the sum of the rows.

This file imports no part: a question holds parts by Protocol, and the wire form is given the types it may build.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from fedtail.base_part import Part, unsent_field
from fedtail.client_statistics import ClientStatistics, WeightedClients
from fedtail.deprecated import old_names
from fedtail.devices import to_device
from fedtail.privacy.events import NonPrivateRelease, Release
from fedtail.privacy.mechanisms import Mechanism, NoPrivacy

if TYPE_CHECKING:
    from fedtail.clients import Clients, Shard


class StatisticPart(Part):
    """A part that computes, on the client, a row of numbers from its loss, for questions about the losses."""

    reads_memory: ClassVar[bool] = False      # rows depend on what the risk keeps on its clients
    by_group: ClassVar[bool] = False          # rows are read group by group; without it a part is not given the clients' groups

    def statistic(self, clients: ClientStatistics, trial: Tensor) -> Tensor:
        """Runs on the client: each client's row of the statistic, (clients, width), from its loss at the proposed values `trial`.

        `clients` holds the losses, masses and, where the part reads them, groups and memory. A row must be linear in the client's
        mass. Every part defines its own; here it raises NotImplementedError.
        """
        raise NotImplementedError

    def row_bound(self, clients: int, mass: float) -> float:
        """The largest absolute entry that a row can have, where at most `clients` clients answer, each of mass at most `mass`.

        By default it is `mass`, since the entries of most rows are shares of the client's mass.
        """
        return mass

    def row_width(self, trial: Tensor) -> int:
        """The number of entries of a row for the proposed values `trial`.

        By default it is found by calling `statistic` for one made-up client of mass zero.
        """
        none = torch.zeros(1, dtype=torch.float64)
        return self.statistic(ClientStatistics(torch.ones_like(none), none, torch.zeros(1, dtype=torch.int64)), trial).shape[1]


class Question(Protocol):
    """What the server may ask: each client answers with one row, and the server gets their sum (or, if it gathers, the rows)."""

    @property
    def name(self) -> str:
        """The class name of the part that asks, for error texts and the ledger."""
        ...

    @property
    def model(self) -> int:
        """The index of the broadcast model that the question is about; 0 unless a family is trained."""
        ...

    @property
    def trains(self) -> bool:
        """Whether clients train to answer the question, which takes long; otherwise rows are computed from losses or metrics."""
        ...

    @property
    def gather(self) -> bool:
        """Whether the server receives every client's row; otherwise it receives only the sum of the rows."""
        ...

    @property
    def mechanism(self) -> Mechanism:
        """The privacy mechanism, which clips and noises rows before they are sent, and noises or rescales their sum."""
        ...

    @property
    def number(self) -> int:
        """The position of the question in its round, which the channel sets; each client draws its noise by it."""
        ...

    @property
    def last_share(self) -> int | None:
        """Where it is set, only clients with keys up to this one add a share of integer noise; None means that all clients do.

        It is never sent, so only a simulator sets it.
        """
        ...

    @property
    def divisor(self) -> int | None:
        """The position of the sum's entry, a weight, by which the server divides the others; None where it does not."""
        ...

    @property
    def objective(self) -> Any:
        """The part that computes the number which risks read as a client's loss; None is the mean loss over its examples."""
        ...

    @property
    def by_group(self) -> bool:
        """Whether the server reads the sum group by group.

        A channel with a minimum number of contributors then has the clients of smaller groups answer zeros, unless there is
        noise.
        """
        ...

    def needs_losses(self, shard: Shard) -> bool:
        """Whether the losses of the shard's clients must be computed, and shared among processes, before `rows` is called."""
        ...

    def rows(self, clients: Clients) -> Tensor:
        """Runs on the client: one row per client, (clients, width), before clipping, noise and encoding; rows may hold NaN."""
        ...

    def width(self, dim: int) -> int:
        """The number of entries of a row, for a model with `dim` parameters."""
        ...

    def release(self, dim: int) -> Release:
        """The ledger's entry for what the answer reveals about clients, for a model with `dim` parameters."""
        ...

    def bound(self, width: int, clients: int, mass: float) -> Tensor:
        """Bounds on the absolute entries of a row, (width,), or (1,) for one bound on all, float64.

        They hold for at most `clients` clients of at most `mass` each.
        """
        ...

    def fewest_contributors(self, mass: float) -> float | None:
        """A lower bound on the number of clients that have a row other than zero, where no client has more mass than `mass`.

        Infinite where every client of the cohort has one; None where the number is unknown until they are counted.
        """
        ...

    def failed_contributors(self, shard: Shard) -> Tensor:
        """Which clients of a shard failed and answered zeros, though the server takes them for contributors, (clients,) bool."""
        ...

    def count_question(self) -> Question:
        """The question that counts the clients whose row would not be zero.

        Raises TypeError for questions that every client of the cohort answers.
        """
        ...


@dataclass(frozen=True)
class Statistic:
    """How are the losses distributed? The row is computed by `part` at the trial numbers."""

    divisor: ClassVar[int | None] = None
    trains: ClassVar[bool] = False
    part: StatisticPart
    trial: Tensor
    model: int = 0                      # which of the broadcast models
    gather: bool = False
    mechanism: Mechanism = NoPrivacy()
    number: int = 0
    objective: Any = None               # what a client's loss is: None is the mean over its examples
    left_out_groups: tuple[int, ...] = ()      # groups of too few clients to be told of: they answer zeros
    last_share: int | None = unsent_field()
    smallest_group: int | None = unsent_field()      # clients in the smallest group that is told of; None: rows are not by group

    def __post_init__(self) -> None:
        """Raise a TypeError where `part` is not an instance of `StatisticPart`."""
        if not isinstance(self.part, StatisticPart):
            raise TypeError(f"a Statistic is answered by a StatisticPart, got {self.part!r}. Write class "
                            f"{type(self.part).__name__}(StatisticPart).")

    @property
    def name(self) -> str:
        """The class name of the part whose `statistic` is computed, for error texts and the ledger."""
        return type(self.part).__name__

    @property
    def by_group(self) -> bool:
        """Whether the part reads its rows group by group."""
        return self.part.by_group

    def needs_losses(self, shard: Shard) -> bool:
        """Always true, whatever the `shard`: a statistic is computed from the losses."""
        return True

    def rows(self, clients: Clients) -> Tensor:
        """Each client's row of the statistic that `part` computes from its loss at the proposed values `trial`, (clients, width).

        The part is given the clients' groups only if it reads by group; clients in `left_out_groups` then have zero rows. It is
        given what the risk keeps on the clients only if it reads that. Clients whose loss is not finite are marked as failed in
        the shard.
        """
        memory = f"risk {self.model}" if self.part.reads_memory else None
        known = clients.statistics(self.model, memory=memory, objective=self.objective)
        if not self.part.by_group:
            return self.part.statistic(replace(known, group=None), self.trial)
        rows = self.part.statistic(known, self.trial)
        if known.group is None or not self.left_out_groups:
            return rows
        return rows.masked_fill(torch.isin(known.group, torch.tensor(self.left_out_groups))[:, None], 0.0)

    def width(self, dim: int) -> int:
        """The number of entries of a row, as the part computes it for the proposed values `trial`; `dim` is not used."""
        return self.part.row_width(self.trial)

    def release(self, dim: int) -> Release:
        """The ledger's entry for what the sum of the rows reveals about the losses; non-private where every row is gathered.

        The width of a row is computed only for a private mechanism, whose cost depends on it.
        """
        return _release_entry(self, self.width(dim) if self.mechanism.private else 0, f"what {self.name} asks about the losses")

    def bound(self, width: int, clients: int, mass: float) -> Tensor:
        """One bound on the absolute entries of a row, (1,) float64, for at most `clients` clients of at most `mass` each.

        It is the part's `row_bound`; `width` is not used.
        """
        return torch.tensor([self.part.row_bound(clients, mass)], dtype=torch.float64)

    def fewest_contributors(self, mass: float) -> float:
        """A lower bound on how many clients contribute: infinity, for the whole cohort, since each answers; `mass` is not used.

        For a question by group whose small groups were left out, the number of clients in the smallest group that remains.
        """
        return math.inf if self.smallest_group is None else self.smallest_group

    def failed_contributors(self, shard: Shard) -> Tensor:
        """Which clients of the shard failed, (clients,) bool: the server takes the whole cohort to contribute."""
        return shard.failed

    def count_question(self) -> Question:
        """Raises a TypeError: the whole cohort answers, so there is nothing to count."""
        raise TypeError("everybody answers a Statistic: there is nothing to count.")


@dataclass(frozen=True)
class Train:
    """Train, if you contribute: the row is made by `aggregate` from the update, w_k - w, and the client's weight."""

    trains: ClassVar[bool] = True
    local: Any
    risk: Any
    dual: Tensor
    aggregate: Any
    model: int = 0
    gather: bool = False
    kept: Tensor | None = None          # what the aggregator kept of the round before
    number: int = 0
    divisor: int | None = None          # the entry of the sum that the aggregator will divide the others by
    objective: Any = None               # the number of a client that the dual was fitted to; None is its mean loss
    personal: Any = None                # personal models, which all clients train beside; None: they train none
    marks_contributors: bool = True     # False: the sum does not update the model, so nobody is noted as having trained it
    by_group: ClassVar[bool] = False
    last_share: int | None = unsent_field()
    round: int | None = unsent_field()  # on the server: the number of the round

    @property
    def name(self) -> str:
        """The class name of the aggregator, for error texts and the ledger."""
        return type(self.aggregate).__name__

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism that the aggregator declares for its rows."""
        return self.aggregate.declares.mechanism

    @property
    def reads_losses(self) -> bool:
        """Whether the losses of clients are needed: for the weights that the risk gives them, or for the aggregator's rows."""
        return bool(self.risk.declares.reads_losses or self.aggregate.declares.reads_losses)

    @property
    def weighting_part_name(self) -> str:
        """The class name of the risk, which decides by its weights who contributes."""
        return type(self.risk).__name__

    def needs_losses(self, shard: Shard) -> bool:
        """Whether the losses of the shard's clients must be computed before they train.

        That is so where the risk reads losses, unless local training computes them along with its first gradients.
        """
        return self.reads_losses and not self.losses_come_with_gradients(shard)

    def width(self, dim: int) -> int:
        """The number of entries of a row: the vectors of `dim` entries, mostly one, and columns that the aggregator declares."""
        declared = self.aggregate.declares
        return dim * int(declared.vectors) + int(declared.columns)

    def release(self, dim: int) -> Release:
        """The ledger's entry for what the sum of the rows reveals about the updates; non-private where every row is gathered.

        Where noise inside clients hides single examples, it is what that noise leaves, for each row as for their sum.
        """
        if self.local.declares.update_release is not None:
            return self.local.declares.update_release
        return _release_entry(self, self.width(dim), f"the updates, by {self.name}")

    def weigh_clients(self, clients: Clients, losses: Tensor | None = None) -> tuple[WeightedClients, Tensor]:
        """The clients' statistics with their weights under the dual, and who contributes, (clients,) bool.

        A client contributes if its weight is positive and it takes at least one step. Where the risk reads losses and `losses`,
        (clients,), are not given, they are computed; a client whose loss is not finite is marked as failed in the shard.
        """
        memory = f"risk {self.model}" if self.risk.declares.keeps else None
        known = clients.statistics(self.model, self.reads_losses, memory, losses, self.objective)
        weighted = known.with_density(self.risk.density(known, self.dual))
        return weighted, (weighted.weight > 0) & (self.local.steps(clients) > 0)

    def contributes(self, clients: Clients) -> Tensor:
        """Which clients have a row other than zero, (clients,) bool: those with a positive weight that take at least one step.

        Computes their losses where the risk reads them; no client trains.
        """
        return self.weigh_clients(clients)[1]

    def was_to_contribute(self, clients: Clients) -> Tensor:
        """Which clients were to have a row other than zero, (clients,) bool; called after `rows`, which marks them as a rule."""
        return clients.shard.contributed[self.model, clients.place] if self.marks_contributors else self.contributes(clients)

    def rows(self, clients: Clients) -> Tensor:
        """Train the clients that contribute and return the rows the aggregator makes of their updates, (clients, width).

        All other clients have zero rows. Marks in the shard who contributed, unless `marks_contributors` is False, and stores
        what the risk keeps on each client for the next round. Where there are personal models, all clients train theirs, also
        those that do not contribute.
        """
        if self.personal is not None:
            self.personal.train_and_keep(clients, self.model)
        at_once = self.losses_come_with_gradients(clients.shard)
        losses, gradients = self.local.losses_and_first_gradients(clients, self.model) if at_once else (None, None)
        weighted, chosen = self.weigh_clients(clients, losses)
        if self.risk.declares.keeps:
            clients.store_rows(f"risk {self.model}", self.risk.remember(weighted, self.dual))
        if self.marks_contributors:
            clients.shard.contributed[self.model, clients.place] |= chosen
        if bool(chosen.all()) and len(clients):
            return self.aggregate.rows(self.updates(clients, gradients), weighted, self, clients)
        where = chosen.nonzero().flatten()
        if not len(where):
            dtype = clients.shard.params.dtype if self.gather else torch.float64
            return torch.zeros(len(clients), self.width(clients.kernel.dim), dtype=dtype)
        few, first = clients.take(chosen), None if gradients is None else gradients[to_device(where, gradients.device)]
        trained = self.aggregate.rows(self.updates(few, first), weighted.take(chosen), self, few)
        rows = trained.new_zeros(len(clients), trained.shape[1])
        return rows.index_copy_(0, to_device(where, rows.device), trained)

    def updates(self, clients: Clients, gradients: Tensor | None) -> Tensor:
        """The updates w_k - w of the clients after local training, (clients, dim); `gradients` are their first ones, if known.

        Where the aggregator asks for the same updates several times in a round, they are computed once and kept for the round;
        if what was kept is lost, they are computed again, to the same bits. In a simulated attack, corrupted clients send others.
        """
        repeated = self.aggregate.declares.questions > 1
        name = clients.shard.updates.entry_name(self.model, self.local) if repeated else None
        found = clients.recall_updates(name)
        if found is None:
            found = self.local.updates(clients, self.model, gradients)
            clients.memoise_updates(name, found)
        attack = clients.shard.attack
        return found if attack is None else attack.as_updated(found, clients)

    def losses_come_with_gradients(self, shard: Shard) -> bool:
        """Whether local training is to compute the losses along with its first gradients, which saves a pass over the data.

        True where the risk reads losses, they are not in the round's memo yet, they are mean losses (no `objective`), and the
        local training can do so with the shard's kernel.
        """
        known = shard.knows_losses(self.model, self.objective) or not self.reads_losses
        return not known and self.objective is None and self.local.first_gradient_tells_loss(shard.kernel)

    def bound(self, width: int, clients: int, mass: float) -> Tensor:
        """The aggregator's bounds on the absolute entries of a row, (width,), or (1,) for one bound on all.

        They follow from the largest weight that the risk gives one of at most `clients` clients of at most `mass` each.
        """
        return self.aggregate.bound(width, self.risk.weight_bound(clients, mass))

    def fewest_contributors(self, mass: float) -> float | None:
        """The risk's lower bound on the number of clients with a non-zero weight under this dual, none having more than `mass`.

        None where the risk has no such bound, or where local training lets some clients take no step.
        """
        return self.risk.fewest_contributors(self.dual, mass) if self.local.declares.everyone_trains else None

    def failed_contributors(self, shard: Shard) -> Tensor:
        """Which clients of the shard are marked as contributing to this model and also as failed, (clients,) bool.

        Where contributors are not marked, all that failed.
        """
        return shard.contributed[self.model] & shard.failed if self.marks_contributors else shard.failed

    def count_question(self) -> Question:
        """A `Count` of the clients that have a positive weight and take at least one step."""
        return Count(self, self.model)


@dataclass(frozen=True)
class Evaluate:
    """How good is a model? The row is made by `part` from the client's own metrics, none of which is sent by itself."""

    divisor: ClassVar[int | None] = None
    trains: ClassVar[bool] = False
    reads_losses: ClassVar[bool] = True      # numbers that take the place of losses
    part: Any                           # which metrics, on which examples, over which public ranges
    model: int = 0
    gather: bool = False
    mechanism: Mechanism = NoPrivacy()
    number: int = 0
    by_group: ClassVar[bool] = False
    last_share: int | None = unsent_field()

    @property
    def name(self) -> str:
        """The class name of the part that computes the metrics, for error texts and the ledger."""
        return type(self.part).__name__

    @property
    def weighting_part_name(self) -> str:
        """The class name of the part that computes the metrics, which also decides who contributes."""
        return self.name

    @property
    def objective(self) -> Any:
        """The part itself: a shard computes its metrics in place of losses, once a round, and stores them in its memo."""
        return self.part                # its numbers are computed, shared out and kept for the round as losses are

    def needs_losses(self, shard: Shard) -> bool:
        """Always true: rows are made of the part's metrics, which the `shard` computes in place of losses."""
        return True

    def rows(self, clients: Clients) -> Tensor:
        """One row per client, (clients, width), which `part` makes of the client's metrics.

        All zeros where one of these is not finite.
        """
        return self.part.rows(self._metric_values(clients))

    def contributes(self, clients: Clients) -> Tensor:
        """Which clients have a row other than zero, (clients,) bool: those whose metrics are all finite.

        A client without examples to evaluate on is not one of them.
        """
        return self._metric_values(clients).isfinite().all(1)

    def _metric_values(self, clients: Clients) -> Tensor:
        """Each metric of these clients, (clients, metrics) float64; NaN for a client without examples to evaluate on.

        Computed for the whole shard at the first call in a round, and read from its memo later.
        """
        return clients.shard.losses(self.model, self.part)[clients.place]

    def width(self, dim: int) -> int:
        """The number of entries of a row, as the part declares it; `dim` is not used."""
        return int(self.part.row_width)

    def release(self, dim: int) -> Release:
        """The ledger's entry for what the sum of the evaluations reveals; non-private where every row is gathered."""
        return _release_entry(self, self.width(dim), f"an evaluation, by {self.name}")

    def bound(self, width: int, clients: int, mass: float) -> Tensor:
        """A bound of one on every entry, (1,) float64: values are scaled to [0, 1], and bins hold zero or one.

        No argument is used.
        """
        return torch.ones(1, dtype=torch.float64)

    def fewest_contributors(self, mass: float) -> float | None:
        """None, for an unknown number of contributors: clients may have no examples to evaluate on, and are counted first.

        `mass` is not used.
        """
        return None                     # some clients may have nothing to evaluate on: they are counted first

    def failed_contributors(self, shard: Shard) -> Tensor:
        """All False, (clients,) bool: contributors are counted before the sum, so the server takes no failed client for one."""
        return torch.zeros_like(shard.failed)

    def count_question(self) -> Question:
        """A `Count` of the clients that have examples to evaluate on and finite metrics."""
        return Count(self, self.model)


@dataclass(frozen=True)
class Count:
    """How many clients would contribute to a sum? Asked first where that is unknown and a sum over few would reveal each."""

    divisor: ClassVar[int | None] = None
    trains: ClassVar[bool] = False
    by_group: ClassVar[bool] = False
    last_share: ClassVar[None] = None
    question: Train | Evaluate
    model: int = 0
    gather: bool = False
    number: int = 0

    @property
    def name(self) -> str:
        """The class name of the part that the counted question names: an aggregator, or the part of an evaluation."""
        return self.question.name

    @property
    def mechanism(self) -> Mechanism:
        """No privacy: counts are exact, and the ledger records them as non-private."""
        return NoPrivacy()

    @property
    def objective(self) -> Any:
        """The objective of the question whose contributors are counted, so that both read the same losses."""
        return self.question.objective

    def needs_losses(self, shard: Shard) -> bool:
        """Whether the losses, or the metrics in their place, decide who contributes to the counted question."""
        return self.question.reads_losses

    def rows(self, clients: Clients) -> Tensor:
        """One for each client that would contribute to the counted question, zero for the others: (clients, 1) float64."""
        return self.question.contributes(clients).double()[:, None]

    def width(self, dim: int) -> int:
        """Always 1: a client's row is a single zero or one."""
        return 1

    def release(self, dim: int) -> Release:
        """The ledger's entry for an exact count of contributors, which is non-private; `dim` is not used."""
        return NonPrivateRelease(f"how many clients contribute under {self.question.weighting_part_name}")

    def bound(self, width: int, clients: int, mass: float) -> Tensor:
        """A bound of one on the only entry, (1,) float64. No argument is used."""
        return torch.ones(1, dtype=torch.float64)

    def fewest_contributors(self, mass: float) -> float:
        """A lower bound on how many clients contribute: infinity, for the whole cohort, since each answers a one or a zero.

        `mass` is not used.
        """
        return math.inf                 # everybody in the cohort answers

    def failed_contributors(self, shard: Shard) -> Tensor:
        """All False, (clients,) bool: a client that does not contribute answers zero, which is correct."""
        return torch.zeros_like(shard.failed)

    def count_question(self) -> Question:
        """Raises a TypeError: the whole cohort answers, so there is nothing to count."""
        raise TypeError("everybody answers a Count: there is nothing to count.")


def _release_entry(question: Question, width: int, what: str) -> Release:
    """The ledger's entry for the sum of a question's rows of `width` entries, by its mechanism; `what` names the entry.

    Where the question gathers single rows it is non-private, whatever the mechanism.
    """
    return NonPrivateRelease(f"single rows of {what}") if question.gather else question.mechanism.release(width, what)


__getattr__ = old_names(__name__)
