"""Minimise a risk over the losses of examples: gradient descent on all of them, and on mini-batches for tilted losses.

No clients here: `minimise` takes the losses of all examples as a function of the parameters and descends on any `Risk` of them
(algorithms 13 and 15 of [Li23] for `Tilted` and `Hierarchical`); `minimise_stochastic` reads a few rows a step (algorithms 14,
16 and 17). For a negative tilt, and for the tilted value at risk, the objective is not convex: where a solver starts decides
where it ends, so the start is always given.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedtail.errors import FieldError
from fedtail.risk.base import Risk, check_positive
from fedtail.risk.tilted import tilted_mean_of_array

BatchLosses = Callable[[Tensor], Tensor]               # params -> (n,) losses
RowLosses = Callable[[Tensor, Tensor], Tensor]         # params, rows -> (rows,) losses
Schedule = float | Callable[[int], float]              # a number, or one for each step 0, 1, ...
OnStep = Callable[["SolverProgress"], bool | None]
HALVINGS = 60                                          # of a trial step, before the search gives up: nothing near is lower
FEW = 1e-15                                            # a relative difference of risks, in float64, that is rounding
PASS = 8192                                            # rows at once in a pass over all examples


@dataclass(frozen=True)
class Minimum:
    """Where a solver ended, and how it got there."""

    params: Tensor                      # (dim,) after the last step
    value: float                        # the risk of all examples there
    values: Tensor                      # (steps + 1,) float64: at the start and after each step; stochastic: running estimates
    gradient_norm: float                # of the risk at `params`; NaN for a stochastic solver, which never computes it
    best: Tensor                        # (dim,) where the least of `values` was found (risks with kinks); stochastic: `params`
    path: tuple[Tensor, ...]            # the solution for each risk of `through`, then `params`

    @property
    def steps(self) -> int:
        """The number of steps that were taken for the last risk: the length of `values` less one, for the start."""
        return len(self.values) - 1


@dataclass(frozen=True)
class SolverProgress:
    """What `on_step` is given after each step."""

    step: int                           # steps done for this risk
    steps: int                          # steps to do at most
    value: float                        # of the risk after the step; stochastic: the running estimate
    params: Tensor                      # (dim,) after the step
    stage: int = 0                      # which risk is minimised now: 0 is the first of `through`


def minimise(losses: BatchLosses, start: Tensor, risk: Risk, *, steps: int = 1000,
             step_size: Schedule | Literal["search"] = 0.1, mass: Tensor | None = None, group: Tensor | None = None,
             through: Sequence[Risk] = (), method: Literal["descent", "lbfgs"] = "descent", tolerance: float = 0.0,
             on_step: OnStep | None = None) -> Minimum:
    r"""Gradient descent on `risk.value(losses(params), mass)` from `start`: [Li23, algorithms 13 and 15] for tilted risks.

    `losses` gives one loss for each of n examples, (n,), as a differentiable function of flat parameters like `start`, (dim,).
    `mass`, (n,), defaults to equal masses. `group` goes to risks over groups, `Hierarchical`: labels, (n,) or (depth, n).

    `step_size` (alpha) is a number, a function of the step 0, 1, ..., or "search": twice the last step (1 at first), halved until
    the risk falls by at least alpha |gradient|^2 / 2, half of what the gradient promises. Where the risk is beta-smooth that is
    soon at least 1/(2 beta), with beta unknown: the rates of [Li23, Theorems 29 to 31] hold with twice the constant. Where beta
    is known, `fedtail.theory.tilted_step_size` is the theorems' step. `method="lbfgs"` is quasi-Newton (scipy's L-BFGS-B, whose
    steps are its own), for risks without kinks.

    `through` are risks that are minimised first, each from the solution before, each by up to `steps` steps: continuation in t is
    through=(Mean(), Tilted(-0.5), Tilted(-1.0)). A descent ends early where the gradient's norm is at most `tolerance`, and where
    `on_step(progress)` returns True. Returns a `Minimum`: the last parameters, the risk after each step, and the solution for
    each risk. Raises a ValueError where the risk is no longer finite.

    >>> from fedtail import Tilted
    >>> points = torch.tensor([0.0, 1.0, 5.0])
    >>> found = minimise(lambda centre: (points - centre).square(), torch.zeros(1), Tilted(-1.0), through=(Tilted(0.0),))
    >>> [round(solution.item(), 3) for solution in found.path]
    [2.0, 0.5]
    """
    _check_start(start)
    _check_count("steps", steps, 0)
    _check_step_size(step_size, '"search"')
    if method not in ("descent", "lbfgs"):
        raise FieldError("method", '"descent" or "lbfgs"', method)
    if not tolerance >= 0:
        raise FieldError("tolerance", "0 or more", tolerance)
    stages = (*through, risk)
    _check_groups(stages, group)
    descend = _lbfgs_descent if method == "lbfgs" else _backtracking_descent if step_size == "search" else _gradient_descent
    params, path = start.detach().clone(), []
    for stage, one in enumerate(stages):
        track = _DescentRecord(stage, steps, tolerance, on_step)
        descend(_Objective(losses, one, mass, group if _reads_groups(one) else None), params, track, step_size)
        params = track.params
        path.append(params)
    return Minimum(params, track.values[-1], torch.tensor(track.values, dtype=torch.float64), track.gradient_norm, track.best,
                   tuple(path))


@dataclass(frozen=True)
class _Objective:
    """A risk of losses as a function of the parameters."""

    losses: BatchLosses
    risk: Any
    mass: Tensor | None
    group: Tensor | None

    def value(self, params: Tensor) -> tuple[Tensor, Tensor]:
        """The parameters as a leaf, (dim,), that requires a gradient, and the risk of their losses, a scalar that depends on it.

        The leaf is detached from `params`; `torch.autograd.grad(risk, leaf)` gives the gradient. Raises a ValueError where
        `losses` does not return one loss for each example, (n,), or the losses do not depend on the parameters.
        """
        leaf = params.detach().requires_grad_()
        losses = self.losses(leaf)
        if losses.ndim != 1:
            raise ValueError(f"losses(params) must give one loss for each example, (n,), got shape {tuple(losses.shape)}. Leave "
                             "out the mean: the risk reduces them.")
        if not losses.requires_grad:
            raise ValueError("losses(params) does not depend on params through torch operations, so there is no gradient. "
                             "Compute with the tensor that is passed in, without .detach(), .item() or numpy.")
        groups = {} if self.group is None else {"group": self.group}
        return leaf, self.risk.value(losses, self.mass, **groups)

    def value_and_gradient(self, params: Tensor) -> tuple[float, Tensor]:
        """The risk at the flat `params`, (dim,), as a float, and its gradient in them, (dim,).

        Raises a ValueError where `losses` does not return one differentiable loss for each example.
        """
        leaf, value = self.value(params)
        return float(value.detach()), torch.autograd.grad(value, leaf)[0]


class _DescentRecord:
    """The record of one descent: values and iterates, and whether it ends."""

    def __init__(self, stage: int, steps: int, tolerance: float, on_step: OnStep | None):
        """Begin the record of a descent: `values` is empty; the first `record_iterate` sets `params`, `best` and `gradient_norm`.

        The descent ends after `steps` steps, at a gradient norm of at most `tolerance`, or where `on_step` returns True. `stage`
        is the position of the risk among those minimised one after another; it is only passed on to `on_step`.
        """
        self.stage, self.steps, self.tolerance, self.on_step = stage, steps, tolerance, on_step
        self.values: list[float] = []
        self.least = math.inf

    def record_iterate(self, params: Tensor, value: float, gradient_norm: float) -> bool:
        """Record one more iterate, beginning with the start, and return whether the descent ends with it.

        Appends `value`, the risk at `params`, to `values`, sets `params` and `gradient_norm`, and `best` where the risk is the
        lowest so far. Calls `on_step` except for the start. Raises a ValueError where the risk or its gradient is not finite.
        """
        if not math.isfinite(value):
            raise ValueError(f"the risk is {value:g} " + (
                f"after {len(self.values)} steps: the steps are too large for these losses. Lower step_size, or write "
                'step_size="search".' if self.values else "at the start. Begin where every loss is finite."))
        if not math.isfinite(gradient_norm):
            raise ValueError(f"the gradient is not finite after {len(self.values)} steps, where the risk is {value:g}: a loss "
                             "has no slope there. Begin elsewhere, or smooth the loss.")
        if value < self.least:
            self.least, self.best = value, params
        self.params, self.gradient_norm = params, gradient_norm
        self.values.append(value)
        step = len(self.values) - 1
        asked = step > 0 and self.on_step is not None and self.on_step(
            SolverProgress(step, self.steps, value, params, self.stage)) is True
        return asked or step >= self.steps or gradient_norm <= self.tolerance


def _gradient_descent(objective: _Objective, params: Tensor, track: _DescentRecord, step_size: Any) -> None:
    """Gradient descent on `objective` from `params` until `track.record_iterate` ends it; all iterates are recorded in `track`.

    `step_size` is a number, or a function of the step 0, 1, ... `params` itself is not changed.
    """
    while True:
        value, gradient = objective.value_and_gradient(params)
        if track.record_iterate(params, value, float(gradient.norm())):
            return
        params = params - _value_at_step(step_size, len(track.values) - 1) * gradient


def _backtracking_descent(objective: _Objective, params: Tensor, track: _DescentRecord, _: Any) -> None:
    """Gradient descent on `objective` from `params` by backtracking until `track.record_iterate` ends it.

    All iterates are recorded in `track`. The first step size tried is 1, later ones twice the last that was taken. It is halved
    until the risk falls by at least half of the step size times the squared norm of the gradient. Where the risk changes by no
    more than rounding, a step is taken if the gradients at its two ends have a non-negative inner product. Ends too where no step
    is found in `HALVINGS` halvings, as at a kink. The last argument is not used.
    """
    value, gradient = objective.value_and_gradient(params)
    size = 1.0
    while not track.record_iterate(params, value, float(gradient.norm())):
        rounding = max(FEW, torch.finfo(params.dtype).eps) * 4 * abs(value)
        for _ in range(HALVINGS):
            trial = params - size * gradient
            leaf, risk = objective.value(trial)
            reached = float(risk.detach())
            near = abs(value - reached) <= rounding
            if near or value - reached >= 0.5 * size * float(gradient.square().sum()):
                new = torch.autograd.grad(risk, leaf)[0]
                if not near or float(new @ gradient) >= 0:
                    break
            size /= 2
        else:
            return
        params, value, gradient = trial, reached, new
        size *= 2


def _lbfgs_descent(objective: _Objective, params: Tensor, track: _DescentRecord, _: Any) -> None:
    """Minimise `objective` by scipy's L-BFGS-B, without bounds, from `params`; all iterates are recorded in `track`.

    Ends where `track.record_iterate` says so or scipy finds no lower risk. The last argument is not used.
    """
    from scipy.optimize import minimize

    last: dict[str, Any] = {}

    def evaluate(point: np.ndarray) -> tuple[float, np.ndarray]:
        """The risk and its gradient, (dim,) float64, at a point that scipy tries; both are also stored in `last`."""
        here = torch.as_tensor(point).to(params, copy=True)
        value, gradient = objective.value_and_gradient(here)
        last.update(point=point.copy(), params=here, value=value, norm=float(gradient.norm()))
        return value, gradient.double().cpu().numpy()

    def record_iterate(intermediate_result: Any) -> None:
        """Record the iterate in scipy's `intermediate_result`; raises StopIteration, at which scipy stops, at the descent's end.

        Evaluates the risk again if the iterate is not the point that was evaluated last.
        """
        if not np.array_equal(last["point"], intermediate_result.x):
            evaluate(intermediate_result.x)
        if track.record_iterate(last["params"], last["value"], last["norm"]):
            raise StopIteration

    first = params.double().cpu().numpy()
    evaluate(first)
    if not track.record_iterate(params, last["value"], last["norm"]):
        minimize(evaluate, first, jac=True, method="L-BFGS-B", callback=record_iterate,
                 options={"maxiter": track.steps, "maxfun": 50 * track.steps, "ftol": 0.0, "gtol": 0.0, "maxcor": 20})


def minimise_stochastic(losses: RowLosses, examples: int, start: Tensor, tilt: Schedule, *, batch_size: int, steps: int,
                        step_size: Schedule, smoothing: float = 0.2, two_batches: bool = False, seed: int = 0,
                        group: Tensor | None = None, within: Schedule = 0.0, every_group: bool = False,
                        on_step: OnStep | None = None) -> Minimum:
    r"""Minimise a tilted loss by mini-batches, with a running estimate of it for the weights: [Li23, algorithms 14, 16, 17].

    `losses(params, rows)` gives the losses of some rows (int64 numbers below `examples`), differentiable in `params`, flat like
    `start`. A step (k = 0, 1, ...) draws `batch_size` rows B without replacement, and takes, with t the `tilt` and lambda the
    `smoothing`,

        R <- (1/t) log((1 - lambda) exp(t R) + lambda mean_B exp(t f)),   params <- params - alpha mean_B exp(t (f - R)) grad f.

    R begins as the tilted loss of all examples, which takes one pass, and is stored as a loss, not as exp(t R). With
    `two_batches`, R is updated from rows drawn apart from those of the gradient (algorithm 17, which the theory is about).

    `group`, (examples,) labels, makes it hierarchical, [Li23, eq. (7.82)]: `tilt` across groups, `within` (tau) inside each. A
    step draws one group, with probability proportional to |g| exp(t R_g) by the Gumbel-max trick, and rows inside it (algorithm
    16). The R_g of the others stay as they were, so under a large tilt (t = 100, say) it swings from one group to another, or
    never draws one again; `every_group` takes rows of each group in every step instead, and weighs their gradients.

    `tilt`, `within` and `step_size` (alpha) are numbers or functions of the step. Weights exp(t (f - R)) are capped at the number
    of examples (of the group), which exact ones never exceed. Returns a `Minimum`, whose `values` are the running estimates and
    whose `value`, at the end, takes one more pass. `on_step(progress)` ends it by returning True. `seed` drives all draws. Raises
    ValueError where a loss is not finite at the start, or the estimate or the parameters are not after a step.

    >>> points = torch.tensor([0.0, 1.0, 5.0])
    >>> found = minimise_stochastic(lambda centre, rows: (points[rows] - centre).square(), 3, torch.zeros(1), -1.0,
    ...                             batch_size=2, steps=2000, step_size=0.01)
    >>> abs(found.params.item() - 0.5) < 0.1
    True
    """
    _check_start(start)
    _check_count("examples", examples, 1)
    _check_count("batch_size", batch_size, 1)
    _check_count("steps", steps, 0)
    _check_step_size(step_size)
    if not 0 < smoothing <= 1:
        raise FieldError("smoothing", "in (0, 1]", smoothing, "It is the share of the newest mini-batch.", symbol="lambda")
    across, inside = (0.0, tilt) if group is None else (tilt, within)
    if group is None and (callable(within) or within != 0 or every_group):
        raise ValueError("within and every_group are about groups, and group is missing. Pass the labels of the examples as "
                         "group=..., or leave these out.")
    running = _RunningLosses(losses, examples, group, smoothing)
    draw = np.random.default_rng(seed)
    params = start.detach().clone()
    running.set_exact_estimates(params, _tilt_at_step(inside, 0))
    values = [running.objective_estimate(_tilt_at_step(across, 0))]
    if not math.isfinite(values[0]):
        raise ValueError("a loss is not finite at the start. Begin where every loss is finite.")
    for step in range(steps):
        t, tau = _tilt_at_step(across, step), _tilt_at_step(inside, step)
        groups = range(len(running.members)) if every_group else [running.draw_group(t, draw)]
        rows = [running.draw_rows(g, batch_size, draw) for g in groups]
        apart = [running.draw_rows(g, batch_size, draw) for g in groups] if two_batches else None
        params = params - _value_at_step(step_size, step) * running.update_and_gradient(params, groups, rows, apart, t, tau)
        values.append(running.objective_estimate(t))
        if not (math.isfinite(values[-1]) and bool(params.isfinite().all())):
            raise ValueError(f"the running estimate is {values[-1]:g} and the parameters are up to {float(params.abs().max()):g} "
                             f"after {step + 1} steps: the steps are too large for these losses. Lower step_size.")
        if on_step is not None and on_step(SolverProgress(step + 1, steps, values[-1], params)) is True:
            break
    last = max(len(values) - 2, 0)
    running.set_exact_estimates(params, _tilt_at_step(inside, last))
    value = running.objective_estimate(_tilt_at_step(across, last))
    return Minimum(params, value, torch.tensor(values, dtype=torch.float64), math.nan, params, (params,))


class _RunningLosses:
    """The tilted loss of each group as it is estimated now (of all examples: one group), and draws of groups and rows."""

    def __init__(self, losses: RowLosses, examples: int, group: Tensor | None, smoothing: float):
        """Set `members`, an array of rows for each group, by ascending label, and `sizes`; without `group` all are one group.

        `losses(params, rows)` is the user's function, `examples` the number of rows, `group` (examples,) the group of each, and
        `smoothing` (lambda) how far one batch moves an estimate. The estimates are not set yet: call `set_exact_estimates` before
        anything else. Raises ValueError where `group` is not one integer for each example.
        """
        self.losses, self.smoothing = losses, smoothing
        if group is None:
            self.members = [np.arange(examples)]
        else:
            if group.shape != (examples,) or group.is_floating_point():
                raise ValueError(f"group must have one integer for each of {examples} examples, got shape {tuple(group.shape)} "
                                 f"and {group.dtype}. Pass labels like torch.tensor([0, 0, 1]).")
            labels = group.cpu().numpy()
            order = np.argsort(labels, kind="stable")
            self.members = np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)
        self.sizes = np.array([len(rows) for rows in self.members], dtype=float)

    def set_exact_estimates(self, params: Tensor, tau: float) -> None:
        """Set `estimates`, (groups,), to the exact tilted loss of each group at `params`, by a pass over all examples.

        `tau` is the tilt within a group.
        """
        estimates = []
        with torch.no_grad():
            for rows in self.members:
                parts = [rows[first:first + PASS] for first in range(0, len(rows), PASS)]
                losses = np.concatenate([_as_numpy(self.row_losses(params, part)) for part in parts])
                estimates.append(tilted_mean_of_array(losses, tau))
        self.estimates = np.array(estimates)

    def row_losses(self, params: Tensor, rows: np.ndarray) -> Tensor:
        """The losses of the examples in these `rows` under the flat `params`, (rows,), differentiable in them.

        Raises ValueError where the user's function does not return one loss for each row.
        """
        losses = self.losses(params, torch.from_numpy(rows).to(params.device))
        if losses.shape != rows.shape:
            raise ValueError(f"losses(params, rows) must give one loss for each row, ({len(rows)},), got shape "
                             f"{tuple(losses.shape)}. Leave out the mean: the solver weighs them.")
        return losses

    def draw_group(self, t: float, draw: np.random.Generator) -> int:
        """The position of a group, drawn with probability proportional to |g| exp(t R_g), with |g| its size and R_g its estimate.

        It is the group with the largest sum of logarithm and Gumbel noise from `draw` (Gumbel-max trick). 0, without a draw,
        where there is one group.
        """
        return 0 if len(self.sizes) == 1 else int((self._log_group_weights(t) + draw.gumbel(size=len(self.sizes))).argmax())

    def draw_rows(self, g: int, count: int, draw: np.random.Generator) -> np.ndarray:
        """`count` rows of the group at position `g`, (count,) int64, drawn without replacement from `draw`.

        All its rows, in order, where it has no more.
        """
        rows = self.members[g]
        return rows if count >= len(rows) else rows[draw.choice(len(rows), count, replace=False)]

    def update_and_gradient(self, params: Tensor, groups: Sequence[int], rows: list[np.ndarray], apart: list[np.ndarray] | None,
                            t: float, tau: float) -> Tensor:
        """The weighted gradient at `params` over mini-batches of some groups, (dim,), after updating their estimates in place.

        `rows` holds the mini-batch of each group in `groups`. Estimates are updated from the losses of the same rows or, where it
        is given, of the mini-batches in `apart`. Within a group an example of loss f has weight exp(tau (f - R_g)), capped at the
        size of the group, with R_g the group's estimate. Groups are weighted in proportion to |g| exp(t R_g), with |g| the size.
        """
        leaf = params.detach().requires_grad_()
        losses = self.row_losses(leaf, np.concatenate(rows))
        each = np.split(_as_numpy(losses), np.cumsum([len(part) for part in rows])[:-1])
        known = each
        if apart is not None:
            with torch.no_grad():
                other = _as_numpy(self.row_losses(leaf, np.concatenate(apart)))
            known = np.split(other, np.cumsum([len(part) for part in apart])[:-1])
        for g, batch in zip(groups, known, strict=True):
            self.estimates[g] = self._averaged_estimate(self.estimates[g], tilted_mean_of_array(batch, tau), tau)
        logits = self._log_group_weights(t)[list(groups)]
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        weights = [share / len(batch) * np.exp(np.minimum(tau * (batch - self.estimates[g]), math.log(self.sizes[g])))
                   for g, share, batch in zip(groups, shares, each, strict=True)]
        return torch.autograd.grad((torch.from_numpy(np.concatenate(weights)).to(losses) * losses).sum(), leaf)[0]

    def _averaged_estimate(self, old: float, new: float, tau: float) -> float:
        """The updated estimate: the tau-tilted mean of `old`, with weight 1 - `smoothing`, and `new`, with weight `smoothing`."""
        if self.smoothing == 1:
            return new
        return tilted_mean_of_array(np.array([old, new]), tau, np.array([1 - self.smoothing, self.smoothing]))

    def objective_estimate(self, t: float) -> float:
        """The estimate of the whole objective: the t-tilted mean of the groups' estimates, each group weighted by its size."""
        return tilted_mean_of_array(self.estimates, t, self.sizes / self.sizes.sum())

    def _log_group_weights(self, t: float) -> np.ndarray:
        """log |g| + t R_g for each group, (groups,), with |g| its size and R_g its estimate: the logarithm of its weight.

        That is up to a constant, since weights are not normalised here.
        """
        return np.log(self.sizes) + t * self.estimates


def _as_numpy(losses: Tensor) -> np.ndarray:
    """`losses` as a float64 numpy array of their shape on the CPU, detached from autograd."""
    return losses.detach().double().cpu().numpy()


def _value_at_step(schedule: Any, step: int) -> float:
    """The value of a schedule at a step (0, 1, ...): `schedule(step)` for a function; a number is returned as it is."""
    return float(schedule(step)) if callable(schedule) else schedule


def _tilt_at_step(schedule: Schedule, step: int) -> float:
    """The tilt (t) at a step of a schedule, a number or a function of the step; raises ValueError where it is not finite."""
    tilt = _value_at_step(schedule, step)
    if not math.isfinite(tilt):
        raise ValueError(f"tilt (t) must be finite in a stochastic solver, got {tilt:g}. For the worst example use minimise with "
                         "Worst().")
    return tilt


def _reads_groups(risk: Risk) -> bool:
    """Whether the risk's method `value` has a parameter `group`, as that of a risk over groups."""
    return "group" in inspect.signature(risk.value).parameters


def _check_groups(risks: Sequence[Risk], group: Tensor | None) -> None:
    """Raise a ValueError where one of the risks reads groups and `group` is None, or none reads them and `group` is given."""
    readers = [one for one in risks if _reads_groups(one)]
    if readers and group is None:
        raise ValueError(f"{type(readers[0]).__name__} is a risk over groups, and group is missing. Pass the labels of the "
                         "examples, group=torch.tensor([0, 0, 1, ...]).")
    if group is not None and not readers:
        raise ValueError(f"group was given, but {type(risks[-1]).__name__} does not read groups. For a risk over groups of a "
                         f"risk inside each write Hierarchical(within=Mean(), across={risks[-1]!r}).")


def _check_start(start: Tensor) -> None:
    """Raise a ValueError unless `start` is a flat tensor, (dim,), of floating-point numbers."""
    if start.ndim != 1 or not start.is_floating_point():
        raise ValueError(f"start must be a flat tensor of floating-point numbers, (dim,), got shape {tuple(start.shape)} and "
                         f"{start.dtype}. Write start.flatten().double(), and give it its shape again inside losses.")


def _check_count(name: str, count: int, least: int) -> None:
    """Raise a FieldError (a ValueError) about `name` where `count` is not an int of at least `least`; a bool is refused."""
    if isinstance(count, bool) or not isinstance(count, int) or count < least:
        raise FieldError(name, f"an integer of at least {least}", count)


def _check_step_size(step_size: Any, also: str = "") -> None:
    """Raise a ValueError for a step size that is neither a positive number nor a function of the step.

    `also` is a text that is allowed too, within double quotes; "" allows none.
    """
    if isinstance(step_size, str):
        if f'"{step_size}"' != also:
            raise FieldError("step_size", f"a positive number or a function of the step{also and ', or ' + also}", step_size,
                             symbol="alpha")
    elif not callable(step_size):
        check_positive("step_size (alpha)", step_size, f"Write 0.1{also and ', or ' + also}.")
