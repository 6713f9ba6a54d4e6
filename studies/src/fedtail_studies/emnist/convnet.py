"""The ConvNet on EMNIST: tables 2, 3, 4, 7 and figures 3, 4, 7, 9 of [PLMH23], figures 4 to 6, 8, 12, 14, 16 of [LPMH21].

Methods, writers, protocol and most claims are those of the linear model (`table2`): the power of q-FFL, the tilt and the fraction
of FedAvg-Sub as printed, by the test clients, and beside it by validation clients; mu always by these. There is no lambda here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import fedtail
from fedtail.models import ConvNet
from fedtail_studies.compared import claims, figures, pages
from fedtail_studies.compared.methods import methods
from fedtail_studies.compared.printed import less
from fedtail_studies.compared.protocol import Field, Plan
from fedtail_studies.compared.rows import as_printed
from fedtail_studies.emnist.printed import TABLE4, TABLE7
from fedtail_studies.emnist.writers import FEMNIST, classes, sides_of
from fedtail_studies.judging import all_of, difference, lower
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Figure, Finding, Study
from fedtail_studies.tables import Printed, Table

CLOSE = 1.0                                      # points of error by which a course may be behind
ALSO_DRAWN = ("Tilted-ERM 1", "q-FFL 0.1")
LIKE = ("figures 3 and 7 of [PLMH23], 4 and 12 of [LPMH21]", "figures 4 and 9 of [PLMH23], 5 and 14 of [LPMH21]",
        "figures 6 and 8 of [LPMH21]", "figure 16 of [LPMH21]")


def task_of(cell: Cell) -> fedtail.Task:
    assert cell.data is not None
    torch.manual_seed(cell.seed)
    return fedtail.Task(ConvNet(classes(cell.data)))


HERE = Field(sides_of, task_of, ALSO_DRAWN, personal=True)
FULL = Plan(visits=115.0, batch=16, learning_rates=(0.03, 0.06, 0.12), decay=0.5, decay_every=0.4)
QUICK = replace(FULL, seeds=2, visits=5.0, cohort=10, learning_rates=(0.12,), powers=(0.1, 10.0), tilts=(1.0,), proximal=(0.1,),
                rate_share=0.4, tuning_share=0.4, clients=20, looks=3)


def tables(results: Results) -> list[Table]:
    return [*pages.errors(results, "writers", TABLE7, "[PLMH23, tables 2, 3 and 7]; tables 2 and 3 repeat columns of table 7"),
            pages.by_size(results), pages.personal(results, TABLE4, "[PLMH23, table 4]", False), pages.grids(results),
            pages.losses(results, "writers", methods(results.plan))]


def drawn(results: Results, folder: Path) -> Sequence[Figure]:
    return figures.figures(results, folder, "images", LIKE, ALSO_DRAWN)


def mean_falls(results: Results) -> Finding:
    return lower(results.difference("Delta-FL 0.5", "FedAvg", "test.mean"), results.papers_data,
                 less(TABLE7, "Delta-FL 0.5", "FedAvg", "mean"), "mean, theta 0.5 less FedAvg,")


def better_than_tilted(results: Results) -> Finding:
    best = as_printed(results, "Tilted-ERM")
    return lower(results.difference("Delta-FL 0.5", best, "test.p90"), results.papers_data,
                 less(TABLE7, "Delta-FL 0.5", "Tilted-ERM", "p90"), f"90th percentile, theta 0.5 less {best},")


def personalisation_helps(results: Results) -> Finding:
    return all_of(*(lower(difference(results.values(name, "personal.after.mean"), results.values(name, "personal.before.mean")),
                          results.papers_data, Printed(TABLE4[name]["after.mean"].mean - TABLE4[name]["before.mean"].mean),
                          f"mean, {name}, after less before,") for name in ("FedAvg", "Delta-FL 0.5")))


def notes(results: Results) -> Sequence[str]:
    return [*pages.chosen(results, "1000 rounds of 100 of 865, 116 visits"),
            f"The rate is multiplied by {results.plan['decay']:g} after each two fifths of the rounds, as often as printed; the "
            "factor was not tuned (the paper tries 1/8, 1/4, 1/2, 1). A client is personalised at the last rate, as printed, and "
            "beside it at the first.",
            "Pixels are scaled by the mean and deviation of the training writers' pixels. Writers are drawn anew for every seed; "
            "figures show those of all seeds."]


EMNIST_CONVNET = Study(
    name="emnist_convnet", paper="PLMH23", item="tables 2, 3, 4, 7, figures 3, 4, 7, 9; LPMH21, figures 4 to 6, 8, 12, 14, 16",
    title="A ConvNet for EMNIST", cost=Cost(207, 1200, 25), full=FULL, quick=QUICK, cells=HERE.cells, tables=tables, data=FEMNIST,
    figures=drawn, notes=notes,
    claims=(
        Claim("The 90th percentile falls with theta = 0.8.", "[PLMH23, table 2]",
              partial(claims.p90_falls, method="Delta-FL 0.8", printed=TABLE7)),
        Claim("The 90th percentile falls with theta = 0.5.", "[PLMH23, table 2]",
              partial(claims.p90_falls, method="Delta-FL 0.5", printed=TABLE7)),
        Claim("Delta-FL has the smallest 90th percentile of all methods.", "[PLMH23, section 7.3]", claims.smallest_p90),
        Claim("At theta = 0.5 it is smaller than with Tilted-ERM.", "[PLMH23, section 7.3]", better_than_tilted),
        Claim("The mean falls too with theta = 0.5.", "[PLMH23, table 3]", mean_falls),
        Claim("theta = 0.1 is worse than 0.5 in both.", "[PLMH23, section 7.3]",
              partial(claims.small_theta_loses, printed=TABLE7)),
        Claim("AFL has the highest mean and 90th percentile.", "[PLMH23, section 7.3]", claims.afl_is_last),
        Claim("theta goes from FedAvg to AFL.", "[PLMH23, section 7.3]", claims.between_fedavg_and_afl),
        Claim("The distribution over clients has a thinner tail and a lower variance.", "[PLMH23, figures 3 and 7]",
              claims.thinner_tail),
        Claim("The tail of the training loss is lower.", "[PLMH23, figure 7]", claims.loss_tail_falls),
        Claim("The loss varies less over training clients.", "[PLMH23, section C.4, figure 9]", claims.loss_varies_less),
        Claim("Data-poor clients gain most.", "[PLMH23, section 7.4, figure 4]", claims.poor_gain_most),
        Claim("Among data-poor clients the error varies less.", "[PLMH23, section C.4, figure 9]", claims.poor_vary_less),
        Claim("Personalisation lowers the mean error of both.", "[PLMH23, table 4]", personalisation_helps),
        Claim("After personalisation FedAvg and Delta-FL are close.", "[PLMH23, table 4]", claims.close_after_personalisation),
        Claim("Delta-FL is not slower than FedAvg by rounds.", "[LPMH21, figures 6 and 8]",
              partial(claims.as_fast, reach=CLOSE)),
        Claim("The number of clients that count is stable.", "[LPMH21, figure 16]", claims.stable_count),
    ),
)
