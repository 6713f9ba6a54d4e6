"""The linear model on EMNIST: tables 2, 3, 4, 6 and figures 7, 9 of [PLMH23], figures 7, 12, 14, 16, 17 of [LPMH21].

Protocol as printed: the power of q-FFL, the tilt and the fraction of FedAvg-Sub are those with the smallest 90th percentile on
*test* clients; beside it the choice on validation clients, half of the training ones. lambda and mu are always chosen there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

import fedtail
from fedtail.models import SoftmaxRegression
from fedtail_studies.compared import claims, figures, pages
from fedtail_studies.compared.methods import methods, periods, powers
from fedtail_studies.compared.protocol import LAMBDAS, POWERS, PROXIMAL, TILTS, Field, Plan
from fedtail_studies.emnist.printed import TABLE4, TABLE6
from fedtail_studies.emnist.writers import FEMNIST, classes, sides_of
from fedtail_studies.judging import interval, lower
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Figure, Finding, Study
from fedtail_studies.tables import Table

CLOSE = 1.0                                      # points of error by which a course may be behind
ALSO_DRAWN = ("Tilted-ERM 1", "q-FFL 1")
LIKE = ("figures 7 of [PLMH23] and 12 of [LPMH21]", "figures 9 of [PLMH23] and 14 of [LPMH21]", "figure 7 of [LPMH21]",
        "figure 16 of [LPMH21]")


def task_of(cell: Cell) -> fedtail.Task:
    """Softmax regression without intercept, from zero: w in R^{62 x 784} of section C.1."""
    assert cell.data is not None
    return fedtail.Task(SoftmaxRegression(28 * 28, classes(cell.data), bias=False))


HERE = Field(sides_of, task_of, ALSO_DRAWN, personal=True)
FULL = Plan(visits=347.0, learning_rates=(0.003, 0.01, 0.03, 0.1), powers=POWERS, tilts=TILTS, proximal=PROXIMAL, lambdas=LAMBDAS,
            periods=(1, 10, 50), rate_share=1.0)
QUICK = Plan(seeds=3, visits=10.0, learning_rates=(0.03,), powers=(1.0, 10.0), tilts=(1.0,), proximal=(0.1,), lambdas=(1e-5,),
             periods=(1, 10), tuning_share=0.2, looks=5)


def tables(results: Results) -> list[Table]:
    return [*pages.errors(results, "writers", TABLE6, "[PLMH23, tables 2, 3 and 6]; tables 2 and 3 repeat columns of table 6"),
            pages.by_size(results), pages.personal(results, TABLE4, "[PLMH23, table 4], which is the ConvNet's", True),
            pages.grids(results), pages.kept(results), pages.losses(results, "writers", methods(results.plan))]


def drawn(results: Results, folder: Path) -> Sequence[Figure]:
    return [*figures.figures(results, folder, "images", LIKE, ALSO_DRAWN), figures.kept(results, folder, "figure 17 of [LPMH21]")]


def keeping_helps(results: Results, path: str, what: str) -> Finding:
    first, *_, last = periods(results.plan)
    return lower(results.difference(last, first, path), results.papers_data, None, f"{what}, {last}, less {first},")


def notes(results: Results) -> Sequence[str]:
    losses = ", ".join(f"{name} {results.mean(name, 'train.mean'):.2f}" for name in ("FedAvg", *powers(results.plan)))
    low, high = np.percentile(np.concatenate(results.lists("FedAvg", "clients.test_size")), [5, 95])
    return [
        *pages.chosen(results, "3000 rounds of 100 of 865, 347 visits, at a constant rate as here"),
        f"Mean training loss in the end: {losses}. q-FedAvg divides by the curvature of the loss to the power q + 1 and so takes "
        "shorter steps the larger q is: where it has not settled, that is part of what is found of q-FFL and AFL.",
        _along_the_way(results),
        f"Nine tenths of the test clients have {low:.0f} to {high:.0f} images: data-poor means little in that range.",
        "Seeds draw from the same writers, so their test sets overlap where writers are few, and intervals are narrower than "
        "they would be for new writers. The learning rate is chosen on the training writers of the first seed, some of whom are "
        "test writers of others. Claims are judged one by one, without correction for their number.",
        "Pixels are scaled by the mean and deviation of the training writers' pixels. Figures 7 and 9 average a client over "
        "seeds; here writers are drawn anew for every seed, and those of all seeds are shown.",
    ]


def _along_the_way(results: Results) -> str:
    """The difference in the tail of the error at the first looks and the last one."""
    rounds = results.lists("FedAvg", "course.round")[0]
    tails = [np.array(results.lists(name, "course.error_p90"), dtype=float) for name in ("Delta-FL 0.5", "FedAvg")]
    looks = sorted({0, min(1, len(rounds) - 1), len(rounds) - 1})
    seen = ", ".join(f"{interval(list((tails[0] - tails[1])[:, at]))} after {rounds[at]:.0f} rounds" for at in looks)
    return (f"The 90th percentile of the test error, theta 0.5 less FedAvg, was {seen}. Where training writers are few and "
            "trained on to the end, a lower tail of their loss need not be a lower tail of other writers' errors.")


TABLE2 = Study(
    name="table2", paper="PLMH23", item="tables 2, 3, 4, 6, figures 7, 9; LPMH21, figures 7, 12, 14, 16, 17",
    title="A linear model for EMNIST", cost=Cost(625, 240, 23), full=FULL, quick=QUICK, cells=HERE.cells, tables=tables,
    data=FEMNIST, figures=drawn, notes=notes,
    claims=(
        Claim("The 90th percentile falls with theta = 0.8.", "[PLMH23, table 2]",
              partial(claims.p90_falls, method="Delta-FL 0.8", printed=TABLE6)),
        Claim("The 90th percentile falls with theta = 0.5.", "[PLMH23, table 2]",
              partial(claims.p90_falls, method="Delta-FL 0.5", printed=TABLE6)),
        Claim("Delta-FL has the smallest 90th percentile of all methods.", "[PLMH23, section 7.3]", claims.smallest_p90),
        Claim("The mean rises by less than the 90th percentile falls.", "[PLMH23, section 7.3]", claims.mean_stays_close),
        Claim("theta = 0.1 is worse than 0.5 in both.", "[PLMH23, section 7.3]",
              partial(claims.small_theta_loses, printed=TABLE6)),
        Claim("AFL has the highest mean and 90th percentile.", "[PLMH23, section 7.3]", claims.afl_is_last),
        Claim("theta goes from FedAvg to AFL.", "[PLMH23, section 7.3]", claims.between_fedavg_and_afl),
        Claim("The distribution over clients has a thinner tail and a lower variance.", "[PLMH23, figure 7, section C.4]",
              claims.thinner_tail),
        Claim("The tail of the training loss is lower.", "[PLMH23, figure 7]", claims.loss_tail_falls),
        Claim("Data-poor clients gain most.", "[PLMH23, section 7.4, for the ConvNet]", claims.poor_gain_most),
        Claim("Among data-poor clients the error varies less.", "[PLMH23, section C.4, figure 9]", claims.poor_vary_less),
        Claim("After personalisation FedAvg and Delta-FL are close.", "[PLMH23, table 4, for the ConvNet]",
              claims.close_after_personalisation),
        Claim("Delta-FL is not slower than FedAvg by rounds.", "[LPMH21, figures 6 and 7]",
              partial(claims.as_fast, reach=CLOSE)),
        Claim("The number of clients that count is stable.", "[LPMH21, figure 16]", claims.stable_count),
        Claim("A threshold that is kept for many rounds helps training clients.", "[LPMH21, figure 17]",
              partial(keeping_helps, path="train.p90", what="90th percentile of the training loss")),
        Claim("It helps test clients.", "[LPMH21, figure 17]",
              partial(keeping_helps, path="test.p90", what="90th percentile of the error")),
    ),
)
