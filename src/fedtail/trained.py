"""What a run returns, and what it says of itself after each round."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedtail.algorithm import Method, member_states
from fedtail.client_memory import ClientMemory
from fedtail.fleet import RoundView
from fedtail.history import History
from fedtail.privacy.history import ATTRIBUTE, EarlierHistory
from fedtail.privacy.ledger import Ledger
from fedtail.risk.base import tail_fraction_used
from fedtail.task import Task

MOST_SHOWN = 5       # names of clients in a repr
NOT_KNOWN = ClientMemory(torch.zeros(0, dtype=torch.int64), {})      # of a state alone; a whole result has what there is


@dataclass(frozen=True, repr=False)
class Trained:
    """The result of a run: the models, their history, and all that `resume` needs to continue it."""

    algorithm: Method
    task: Task
    state: Any
    seed: int = 0
    failed: int = 0                     # clients left out over all rounds because a loss or update was not finite
    memory: ClientMemory = NOT_KNOWN    # what clients keep between rounds: AFL's lambda
    stopped: str = ""                   # why it ended before its rounds were done: a spent budget, no better value on validation
    ledger: Ledger = field(default_factory=Ledger)      # all that was released; .guarantee(delta) prices it
    evaluation: tuple[Any, ...] | None = None           # of the models, by the clients of the fleet
    constant: Tensor | None = None      # outputs that ignore the inputs, fitted to the training clients
    interrupted: bool = False           # whether Ctrl-C ended it before its rounds were done
    history: History = field(default_factory=History, compare=False)     # numbers by round
    best: Trained | None = field(default=None, compare=False)            # the run at its best by `train(validation=...)`
    selected_on: Tensor | None = field(default=None, compare=False)      # (clients,) int64, keys of validation clients
    selected_names: tuple[str, ...] | None = field(default=None, compare=False)      # what the data called them, where they did

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The models that the run returns, as new copies in evaluation mode: one for each member of a family, else one.

        Each has its privacy history attached as an attribute, so that a run that starts from it can put it on its ledger.
        """
        made = self.ledger.history(f"a model that was trained for {self.rounds} rounds", self.rounds)
        return tuple(_attach_history(self.task.with_params(p).eval(), made) for p in result_params(self.algorithm, self.state))

    @property
    def module(self) -> nn.Module:
        """The model that the run returns, as a new copy in evaluation mode; raises ValueError for a family of several methods.

        Its privacy history is attached as an attribute.
        """
        if len(self.algorithm.members) > 1:
            raise ValueError(f"a family of {len(self.algorithm.members)} models was trained. Use .modules, and fedtail.choose to "
                             "pick one.")
        return self.modules[0]

    @property
    def rounds(self) -> int:
        """How many rounds the models were trained for, those of earlier runs that were resumed included."""
        return member_states(self.state)[0].round

    def __repr__(self) -> str:
        """The model, rounds and seed in one line, and how the run ended where that was early."""
        return f"Trained({', '.join(f'{name} {value}' if name else value for name, value in self._facts())})"

    def _repr_html_(self) -> str:
        """The facts of `repr` as a table, and the history, for notebooks."""
        facts = "".join(f"<tr><th>{html.escape(name or 'ended')}</th><td>{html.escape(value)}</td></tr>"
                        for name, value in self._facts())
        return f"<table>{facts}</table>{self.history._repr_html_() if len(self.history) else ''}"

    def _facts(self) -> list[tuple[str, str]]:
        """What `repr` says, as pairs of a name, perhaps empty, and a text."""
        models, dim = len(self.algorithm.members), len(member_states(self.state)[0].params)
        many = f"{models} models of " if models > 1 else ""
        facts = [("model", f"{many}{type(self.task.module).__name__} of {dim} parameters"), ("rounds", str(self.rounds)),
                 ("seed", str(self.seed))]
        facts += [("failed answers", str(self.failed))] if self.failed else []
        facts += [("best at round", str(self.best.rounds))] if self.best is not None else []
        facts += [("selected on", _shown_clients(self.selected_names))] if self.selected_names else []
        facts += [("", "interrupted")] if self.interrupted else []
        return facts + ([("", f"stopped: {self.stopped}")] if self.stopped else [])


@dataclass(frozen=True)
class Progress:
    """What `on_round` is given after each round."""

    round: int                          # rounds done
    rounds: int                         # rounds to do
    trained: Trained                    # the run so far: its models, and all it takes to go on
    view: RoundView | None              # simulator only: who was sampled, who contributed, who failed
    before: Trained | None = None       # the run before this round; its `evaluation` is what this round's cohort found, if any

    @property
    def state(self) -> Any:
        """The state after this round; for a family, a tuple of states in the order of its members."""
        return self.trained.state

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The models after this round, as new copies in evaluation mode, in the order of a family's members."""
        return self.trained.modules

    @property
    def tail_fractions(self) -> tuple[float | None, ...]:
        """The tail fraction (theta) used in this round by each member of a family, else by the one method.

        It is the share of the cohort that contributes as the risk declares it: 1 for the mean; None where that is not known, no
        client was sampled, or the clients are at nodes, where `view` is None.
        """
        size = self.view.cohort_size if self.view else 0
        return tuple(tail_fraction_used(member.risk, size) for member in self.trained.algorithm.members)

    @property
    def module(self) -> nn.Module:
        """The model after this round, as a new copy in evaluation mode; raises ValueError for a family of several methods."""
        return self.trained.module


def _shown_clients(names: tuple[str, ...]) -> str:
    """These clients in a few words: their number where they are more than `MOST_SHOWN`, and the first of their names."""
    first = ", ".join(names[:MOST_SHOWN])
    return f"{len(names)} clients ({first}, ...)" if len(names) > MOST_SHOWN else first


def result_params(algorithm: Method, state: Any) -> tuple[Tensor, ...]:
    """The flat models that a run of `algorithm` in this state returns, (dim,) each: one for each member of a family, else one."""
    return tuple(m.result(s) for m, s in zip(algorithm.members, member_states(state), strict=True))


def _attach_history(module: nn.Module, made: EarlierHistory) -> nn.Module:
    """Set the module's history attribute to `made`, in place, and return the module.

    Nothing is set where the history is known and has no rounds.
    """
    if made.rounds or not made.is_known:
        setattr(module, ATTRIBUTE, made)
    return module
