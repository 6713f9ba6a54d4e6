"""What a study is: cells to run, tables to show, claims to judge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from fedtail.attacks import ClientAttack
    from fedtail.data import Population
    from fedtail.task import Task
    from fedtail.training import Method, Progress, Trained
    from fedtail_studies.results import Results
    from fedtail_studies.tables import Table

Numbers = dict[str, Any]                         # nested as one likes; whatever JSON holds


class Verdict(StrEnum):
    """What our results say of a claim."""

    AGREES = "agrees"
    WITHIN_ERROR = "agrees, up to Monte Carlo error"      # an estimate is beyond a stated bound by less than its error
    DIRECTION = "agrees in direction"
    DISAGREES = "disagrees"
    NOT_TESTABLE = "not testable here"


class Finding(NamedTuple):
    """A verdict and why."""

    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class Claim:
    """What a paper says, in our words, and how results decide on it."""

    text: str
    source: str                                  # "[PLMH23, section 7.3]"
    judge: Callable[[Results], Finding]


@dataclass(frozen=True)
class Cost:
    """What a full run takes, all seeds and methods together."""

    rounds: int                                  # of one method and seed; 0 where nothing is trained
    minutes: float                               # on two cores
    gpu_minutes: float | None = None             # None: no use for one


@dataclass(frozen=True, eq=False)
class Data:
    """Clients that were read, and what they may be called."""

    name: str                                    # "FEMNIST, 360 writers"
    population: Population
    papers: bool                                 # whether these are the data the paper used
    about: str = ""                              # how they differ, for the page


@dataclass(frozen=True)
class Needs:
    """Data that the user must have."""

    name: str                                    # "FEMNIST"
    read: Callable[[Path], Data]
    advice: str                                  # what to write where it is missing


class Figure(NamedTuple):
    """A picture beside the page."""

    file: str
    caption: str


class Plan(Protocol):
    """How much is run: a frozen dataclass of the study's own."""

    @property
    def seeds(self) -> int: ...


class Watch(Protocol):
    """Somebody who looks on and may ask to stop: `fedtail.cli.terminal.Watcher`."""

    def begin(self, name: str, seed: int, round: int, rounds: int) -> None: ...

    def round(self, round: int) -> None: ...

    @property
    def stop(self) -> bool: ...


class Stopped(Exception):
    """Somebody asked to stop: the cell that was running is lost, those before it are saved."""


@dataclass(frozen=True)
class Cell:
    """One method and seed of a study, to be measured."""

    name: str
    seed: int
    plan: Any
    data: Any                                    # a Data, for studies that need some
    device: str
    watch: Watch
    finished: Mapping[int, Mapping[str, Numbers]] = field(repr=False, default_factory=dict)

    def numbers(self, name: str, seed: int | None = None) -> Numbers:
        """What a cell before this one found, of this seed or another."""
        return self.finished[self.seed if seed is None else seed][name]

    def train(self, algorithm: Method, task: Task, population: Population, rounds: int,
              on_round: Callable[[Progress], object] | None = None, attack: ClientAttack | None = None) -> Trained:
        """Train with the cell's seed and device, watched; `on_round` is shown every round, and ends the run by returning True.

        Corrupted clients of the population do what `attack` says.
        """
        import fedtail
        from fedtail.engine.local_fleet import LocalFleet

        def look_on(progress: Progress) -> bool:
            ended = on_round is not None and on_round(progress) is True
            self.watch.round(progress.round)
            return ended or self.watch.stop

        self.watch.begin(self.name, self.seed, 0, rounds)
        with LocalFleet(population, task, self.device, attack=attack) as fleet:
            trained = fedtail.train(algorithm, task, population, rounds=rounds, seed=self.seed, fleet=fleet,
                                    engine=fedtail.Engine(device=self.device), progress=False, on_round=look_on)
        self.stop_if_asked()
        return trained

    def steps(self, count: int) -> Iterator[int]:
        """Count from 0 to `count`, watched."""
        self.watch.begin(self.name, self.seed, 0, count)
        for done in range(count):
            yield done
            self.watch.round(done + 1)
            self.stop_if_asked()

    def stop_if_asked(self) -> None:
        if self.watch.stop:
            raise Stopped


Measure = Callable[[Cell], Numbers]


@dataclass(frozen=True)
class Study:
    """A table or figure of a paper, or a question of ours. `fedtail_studies` says what each field is for."""

    name: str
    paper: str                                   # "PLMH23"; empty: ours
    item: str
    title: str
    cost: Cost
    full: Any                                    # a Plan
    quick: Any                                   # a Plan
    cells: Callable[[Any, int], dict[str, Measure]]
    tables: Callable[[Results], Sequence[Table]]
    claims: tuple[Claim, ...]
    data: Needs | None = None
    figures: Callable[[Results, Path], Sequence[Figure]] | None = None
    notes: Callable[[Results], Sequence[str]] = lambda results: ()

    @property
    def source(self) -> str:
        return f"[{self.paper or 'ours'}, {self.item}]"
