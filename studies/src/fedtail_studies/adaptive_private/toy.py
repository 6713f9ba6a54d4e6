"""Linear regression with frequent words that say nothing: figure 6.4 of [Li23], with the data, noise and steps printed there.

The squared error is halved, as the thesis prints it: without the half gradients are twice as long, and are clipped more often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from fedtail.losses import squared_error
from fedtail.models import LeastSquares
from fedtail.privacy.accounting import epsilon_at
from fedtail.privacy.calibration import round_event
from fedtail.privacy.events import PoissonSampling
from fedtail.private_optim import adadps, adas, dp2, dp_adam, dp_sgd, without_privacy
from fedtail_studies.adaptive_private.pages import below, claim, draw_courses, scores_table
from fedtail_studies.adaptive_private.training import Length, Problem, Samples
from fedtail_studies.adaptive_private.tuning import Case, Method, cells_of, search_note, settings_note
from fedtail_studies.judging import at_most
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Cost, Figure, Finding, Measure, Numbers, Study
from fedtail_studies.tables import Row, Table
from fedtail_studies.tilted.classes_data import generator

FEATURES, FREQUENT, EXAMPLES = 500, 50, 1000
PRINTED_EPSILON, CLOSE = 4.13, 0.02
SIDE = torch.full((FEATURES,), 0.01).index_fill(0, torch.arange(FREQUENT), 1.0) + 1e-3      # A, with the released code's offset


@dataclass(frozen=True)
class ToyPlan:
    """As in figure 6.4; noise, batch and steps are the released code's, which give its epsilon."""

    seeds: int = 3
    steps: int = 2250
    batch: int = 8
    noise: float = 0.7
    clip: float = 1.0
    delta: float = 1e-3
    trials: int = 8
    evaluations: int = 30


def half_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """(w . x - y)^2 / 2 for each example."""
    return squared_error(outputs, targets) / 2


def training_loss(module: nn.Module, samples: Samples) -> float:
    """The mean of halved squared errors."""
    with torch.no_grad():
        return float(half_squared_error(module(samples.x), samples.y).mean())


@lru_cache(maxsize=1)
def drawn_examples(seed: int) -> Samples:
    """A thousand examples: fifty features with frequency 0.9 and weight 0.01, the others with 0.01 and 1; label noise of 0.01."""
    random = generator(seed, 64)
    frequency = torch.full((FEATURES,), 0.01).index_fill(0, torch.arange(FREQUENT), 0.9)
    weights = torch.ones(FEATURES).index_fill(0, torch.arange(FREQUENT), 0.01)
    x = (torch.rand(EXAMPLES, FEATURES, generator=random) < frequency).float()
    return Samples(x, x @ weights + 0.01 * torch.randn(EXAMPLES, generator=random))


def problem(cell: Cell) -> Problem:
    """The regression from weights drawn from N(0, 0.1^2); training loss is both what settings are chosen by and reported."""
    samples, random = drawn_examples(cell.seed), generator(cell.seed, 65)
    first = 0.1 * torch.randn(1, FEATURES, generator=random)

    def module() -> nn.Module:
        made = LeastSquares(FEATURES, bias=False)
        with torch.no_grad():
            made.linear.weight.copy_(first)
        return made

    return Problem(samples, samples, samples, module, training_loss, half_squared_error)


def not_halved(cell: Cell) -> Problem:
    """The regression with the squared error itself; what is reported is halved."""
    return replace(problem(cell), loss=squared_error)


def _rates(low: float, count: int = 8) -> tuple[float, ...]:
    """Learning rates from `low` on, a factor of two apart."""
    return tuple(low * 2**k for k in range(count))


def methods(clip: float) -> list[Method]:
    """All optimisers, with eight learning rates; DP2 has more settings, of which eight are drawn."""
    return [
        Method("SGD", lambda s, z, p: without_privacy(dp_sgd(s["rate"], clip, 0.0)), {"rate": _rates(5e-4)}),
        Method("AdaS", lambda s, z, p: adas(s["rate"], SIDE), {"rate": _rates(5e-4)}),
        Method("DP-SGD", lambda s, z, p: dp_sgd(s["rate"], clip, z), {"rate": _rates(8e-3)}),
        Method("AdaDPS", lambda s, z, p: adadps(s["rate"], clip, z, SIDE), {"rate": _rates(8e-3)}),
        Method("DP-Adam", lambda s, z, p: dp_adam(s["rate"], clip, z), {"rate": _rates(4e-4)}),
        Method("DP2", lambda s, z, p: dp2(s["rate"], clip, z, int(s["phase"]), s["delayed_rate"], clip, epsilon=1e-3),
               {"rate": (0.02, 0.1, 0.5), "delayed_rate": (0.02, 0.1, 0.5), "phase": (50, 150, 450)}),
    ]


def cases(plan: ToyPlan) -> list[Case]:
    length = Length(plan.batch, plan.steps)
    every = [Case(one.name, one, problem, length, noise=plan.noise) for one in methods(plan.clip)]
    whole = [replace(case, name=f"{case.name}, loss not halved", problem=not_halved, settings_of=case.name)
             for case in every if case.name in ("DP-SGD", "AdaDPS")]
    return [*every, *whole]


def accounted(cell: Cell) -> Numbers:
    """Epsilon of the run by Renyi divergences, as the thesis, and by privacy loss distributions."""
    plan: ToyPlan = cell.plan
    event = round_event(plan.noise, PoissonSampling(plan.batch / EXAMPLES), unit="example")
    return {name: epsilon_at([(event, plan.steps)], plan.delta, accountant=name) for name in ("rdp", "pld")}


def cells(plan: ToyPlan, seed: int) -> dict[str, Measure]:
    return {**cells_of(cases(plan), seed), "epsilon": accounted}


def tables(results: Results) -> list[Table]:
    """Training loss after the last step; epsilon; settings."""
    every = cases(ToyPlan(**results.plan))
    spent = Row("the whole run", {**{name: results.values("epsilon", name)[:1] for name in ("rdp", "pld")},
                                  "printed": [PRINTED_EPSILON]})
    return [scores_table(results, "Training loss at the end", [case.name for case in every], "loss", {}, digits=4),
            Table("Epsilon at delta = 0.001", ("rdp", "pld", "printed"), (spent,), digits=3, head="accounted")]


def figures(results: Results, folder: Path) -> list[Figure]:
    return [draw_courses(results, folder, "without_noise.png", ("SGD", "AdaS"), "training loss", "Without privacy, mean over "
                         "seeds; as the left part of figure 6.4.", log=True),
            draw_courses(results, folder, "private.png", ("DP-SGD", "DP-Adam", "DP2", "AdaDPS"), "training loss",
                         "With privacy, mean over seeds; the right part of figure 6.4 has DP-SGD and AdaDPS.", log=True)]


def epsilon_agrees(results: Results) -> Finding:
    """Whether the accountant gives the printed epsilon for the released code's settings."""
    found = results.values("epsilon", "rdp")[0]
    return at_most(abs(found - PRINTED_EPSILON), CLOSE, f"distance of {found:.3f} (RDP) from {PRINTED_EPSILON}")


def notes(results: Results) -> Sequence[str]:
    plan = results.plan
    return [
        f"{EXAMPLES} examples, {FEATURES} features, drawn anew for every seed as section 6.2 prints it; {plan['steps']} steps of "
        f"batch {plan['batch']}, noise multiplier {plan['noise']}, clip norm {plan['clip']:g}, first weights N(0, 0.01): from "
        "the released code, where the text has none. Label noise has deviation 0.01; the text reads as variance 0.01.",
        "The score is the training loss, as in the figure, and settings are chosen by it too: there is no validation part.",
        "DP-Adam and DP2 are not in the figure. The rows of the loss that is not halved have the settings of the halved one: "
        "gradients are twice as long, but nearly all are clipped either way.",
        search_note(results, cases(ToyPlan(**results.plan))),
        settings_note(results, cases(ToyPlan(**results.plan))),
    ]


QUICK = ToyPlan(steps=600, evaluations=10)
ADADPS_TOY = Study(
    name="adadps_toy", paper="Li23", item="figure 6.4", title="AdaDPS on a linear regression with rare features",
    cost=Cost(0, 4), full=ToyPlan(), quick=QUICK, cells=cells, tables=tables, figures=figures, notes=notes,
    claims=(
        claim("With privacy the training loss of AdaDPS is below that of DP-SGD.", "figure 6.4", below,
              (("AdaDPS", "DP-SGD"),), True),
        claim("Without privacy the training loss of AdaS is below that of SGD.", "figure 6.4", below, (("AdaS", "SGD"),), True),
        claim("The private runs are (4.13, 0.001)-private.", "figure 6.4", epsilon_agrees),
        claim("DP2, which has no side information, is below DP-SGD here too.", "section 6.10.1, for other data", below,
              (("DP2", "DP-SGD"),)),
    ),
)
