"""Sentiment by account: tables 2, 3, 8, 9 and figures 3, 8, 10 of [PLMH23], figures 9, 10, 13, 15, 18 of [LPMH21].

Two studies: logistic regression on the mean of a tweet's word vectors, and an LSTM on the vectors. Where accounts have a few
tweets each, claims about percentiles of their errors are called not testable, whatever the numbers say.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import fedtail
from fedtail.models import LogisticRegression, LSTMClassifier
from fedtail_studies.compared import claims as said
from fedtail_studies.compared import figures as drawing
from fedtail_studies.compared import pages
from fedtail_studies.compared.courses import Sides
from fedtail_studies.compared.methods import methods, periods
from fedtail_studies.compared.printed import PrintedTable, as_table, less
from fedtail_studies.compared.protocol import LAMBDAS, POWERS, PROXIMAL, TILTS, Field, Plan
from fedtail_studies.compared.rows import afl
from fedtail_studies.judging import LEVEL, all_of, difference, lower, not_above, within
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Figure, Finding, Study, Verdict
from fedtail_studies.tables import Table
from fedtail_studies.text.tweets import POOR, SENT140, WIDTH, accounts

ENOUGH = 20                                      # tweets of a median account, for percentiles of its error to mean something
CLOSE = 0.5                                      # points of error
SIZES, COUNTED = "figures 10 of [PLMH23] and 15 of [LPMH21]", "figure 16 of [LPMH21] has it for EMNIST"
LINEAR_FIGURES = ("figures 8 of [PLMH23] and 13 of [LPMH21]", SIZES, "figure 9 of [LPMH21]", COUNTED)
LSTM_FIGURES = ("figures 3 and 8 of [PLMH23], 13 of [LPMH21]", SIZES, "figure 10 of [LPMH21]", COUNTED)

# Tables 8 and 9: mean, 10th percentile, median, 90th percentile of the test error, %, with deviations over five seeds. The best q
# is 1 and 0.01, the best tilt 1 in both.
TABLE8 = as_table({
    "FedAvg": ((34.74, 0.31), (21.89, 0.24), (34.81, 0.38), (46.83, 0.54)),
    "FedAvg-Sub 0.8": ((34.47, 0.03), (21.69, 0.26), (34.62, 0.17), (46.59, 0.38)),
    "FedAvg-Sub 0.5": ((34.46, 0.07), (21.55, 0.51), (34.48, 0.20), (47.00, 0.40)),
    "FedAvg-Sub 0.1": ((34.79, 0.32), (22.08, 0.75), (34.93, 0.35), (46.69, 0.84)),
    "FedProx": ((34.74, 0.31), (21.89, 0.24), (34.82, 0.39), (46.83, 0.54)),
    "q-FFL": ((34.48, 0.06), (21.61, 0.24), (34.57, 0.16), (46.38, 0.40)),
    "Tilted-ERM": ((34.71, 0.31), (21.83, 0.34), (34.91, 0.39), (46.70, 0.50)),
    "AFL": ((35.97, 0.08), (23.58, 0.28), (36.09, 0.17), (47.51, 0.32)),
    "Delta-FL 0.8": ((34.41, 0.22), (21.77, 0.34), (34.64, 0.25), (46.44, 0.38)),
    "Delta-FL 0.5": ((35.28, 0.25), (23.03, 0.38), (35.55, 0.53), (46.64, 0.41)),
    "Delta-FL 0.1": ((37.78, 0.89), (23.93, 0.99), (37.80, 1.30), (51.38, 1.07)),
})
TABLE9 = as_table({
    "FedAvg": ((30.16, 0.44), (10.06, 2.06), (29.51, 0.33), (49.66, 3.95)),
    "FedAvg-Sub 0.8": ((29.85, 0.46), (11.90, 2.27), (29.57, 0.31), (46.93, 3.84)),
    "FedAvg-Sub 0.5": ((31.06, 1.01), (9.69, 4.89), (30.14, 0.71), (53.10, 7.22)),
    "FedAvg-Sub 0.1": ((31.96, 1.47), (11.65, 4.83), (31.55, 1.13), (52.87, 8.41)),
    "FedProx": ((30.20, 0.48), (10.37, 2.08), (29.51, 0.32), (49.85, 4.07)),
    "q-FFL": ((29.99, 0.56), (10.98, 2.88), (29.56, 0.39), (48.65, 4.68)),
    "Tilted-ERM": ((30.13, 0.49), (13.18, 3.33), (29.96, 0.84), (46.54, 3.27)),
    "AFL": ((37.74, 0.65), (18.19, 1.99), (36.95, 1.03), (57.78, 1.19)),
    "Delta-FL 0.8": ((30.30, 0.33), (13.05, 3.87), (29.92, 0.38), (46.46, 4.39)),
    "Delta-FL 0.5": ((33.58, 2.44), (16.77, 6.62), (33.28, 2.27), (50.47, 8.24)),
    "Delta-FL 0.1": ((51.97, 11.81), (16.67, 9.15), (52.44, 13.21), (86.44, 10.95)),
})


def sides_of(cell: Cell, means: bool) -> Sides:
    assert cell.data is not None
    return accounts(cell.data, cell.plan.clients, means, cell.device)


def lstm_task(cell: Cell) -> fedtail.Task:
    torch.manual_seed(cell.seed)
    return fedtail.Task(LSTMClassifier(dimension=WIDTH, hidden=WIDTH))


LINEAR = Field(partial(sides_of, means=True), lambda cell: fedtail.Task(LogisticRegression(WIDTH)))
LSTM = Field(partial(sides_of, means=False), lstm_task)
LINEAR_FULL = Plan(visits=228.0, learning_rates=(0.1, 0.3, 1.0, 3.0), powers=POWERS, tilts=TILTS, proximal=PROXIMAL,
                   lambdas=LAMBDAS, periods=(1, 10, 50), rate_share=1.0)
LINEAR_QUICK = replace(LINEAR_FULL, seeds=3, visits=40.0, learning_rates=(0.3,), lambdas=(1e-5,), powers=(1.0, 10.0),
                       tilts=(1.0,), proximal=(0.1,), periods=(1, 10), clients=438, looks=8)
LSTM_FULL = Plan(visits=30.0, cohort=50, learning_rates=(0.3, 1.0, 3.0), decay=0.5, decay_every=1 / 3,
                 powers=(0.01, 0.1, 1.0, 10.0), rate_share=1.0)
LSTM_QUICK = replace(LSTM_FULL, seeds=2, visits=6.0, cohort=30, learning_rates=(0.3,), powers=(0.1, 10.0), tilts=(1.0,),
                     proximal=(0.1,), clients=200, looks=4)


def tables(results: Results, printed: PrintedTable, source: str) -> list[Table]:
    made = [*pages.errors(results, "accounts", printed, source), pages.losses(results, "accounts", methods(results.plan))]
    return [*made, *([pages.kept(results)] if results.plan["periods"] else [])]


def figures(results: Results, folder: Path, sources: Sequence[str]) -> Sequence[Figure]:
    made = drawing.figures(results, folder, "tweets", sources)
    return [*made, *([drawing.kept(results, folder, "figure 18 of [LPMH21]")] if results.plan["periods"] else [])]


def if_accounts_are_large(judge: Callable[[Results], Finding]) -> Callable[[Results], Finding]:
    """Claims about percentiles over accounts need accounts whose error can take many values."""
    def judged(results: Results) -> Finding:
        median, seen = statistics.median(results.lists("FedAvg", "clients.test_size")[0]), judge(results)
        if median >= ENOUGH:
            return seen
        return Finding(Verdict.NOT_TESTABLE, f"half of the accounts have at most {median:g} tweets, so that their error is one "
                                             f"of a few fractions and its percentiles jump; for the record: {seen.reason}")
    return judged


def mean_is_close(results: Results) -> Finding:
    return not_above(results.difference("Delta-FL 0.8", "FedAvg", "test.mean"), CLOSE, results.papers_data,
                     "mean, theta 0.8 less FedAvg,")


def mean_is_lower(results: Results, than: str, printed: PrintedTable) -> Finding:
    """FedAvg's, than that of AFL or of theta = 0.1."""
    name = afl(results) if than == "AFL" else than
    return lower(results.difference("FedAvg", name, "test.mean"), results.papers_data, less(printed, "FedAvg", than, "mean"),
                 f"mean, FedAvg less {than},")


def poor_vary_less(results: Results) -> Finding:
    if not all(results.numbers("FedAvg", seed)["rich"] for seed in results.seeds):
        return Finding(Verdict.NOT_TESTABLE, f"every account has fewer than {POOR} tweets")
    return lower(results.difference("Delta-FL 0.5", "FedAvg", "poor.std"), results.papers_data, None,
                 f"deviation over accounts with fewer than {POOR} tweets, theta 0.5 less FedAvg,")


def unstable(results: Results) -> Finding:
    """theta = 0.1 is above FedAvg, or varies more from seed to seed than chance gives in 95% (a ratio of variances)."""
    from scipy.stats import f

    plain, small = (results.values(name, "test.mean") for name in ("FedAvg", "Delta-FL 0.1"))
    if len(plain) < 2:
        return Finding(Verdict.NOT_TESTABLE, "one seed does not show whether it is stable")
    gap, spread = difference(plain, small), (statistics.stdev(plain), statistics.stdev(small))
    limit = float(f.ppf(LEVEL, len(plain) - 1, len(plain) - 1))
    told = (f"mean, FedAvg less theta 0.1, {gap}; deviation over seeds {spread[1]:.2f}, FedAvg's {spread[0]:.2f} (chance gives "
            f"up to {limit**0.5:.1f} times as much)")
    if gap.sign < 0 or spread[1] ** 2 > limit * spread[0] ** 2:
        return Finding(Verdict.AGREES, told)
    return Finding(Verdict.DISAGREES if gap.sign > 0 else Verdict.NOT_TESTABLE, told)


def period_does_not_matter(results: Results) -> Finding:
    first, *others = periods(results.plan)
    return all_of(*(within(results.difference(name, first, "test.mean"), CLOSE, results.papers_data,
                           f"mean, {name}, less {first},") for name in others))


def notes(results: Results, printed: str) -> Sequence[str]:
    made = [*pages.chosen(results, printed),
            "The two halves of the accounts are the same for every seed, as in the paper, so that intervals are about training, "
            "not about accounts."]
    if not results.papers_data:
        made.append("Can be tested on such data: means over accounts, what training does to the loss, who is unstable. Cannot: "
                    "percentiles of the error over accounts, and what depends on how many tweets an account has.")
    return made


def claims(printed: PrintedTable, histogram: str, table: str) -> tuple[Claim, ...]:
    return (
        Claim("The 90th percentile falls with theta = 0.8.", "[PLMH23, table 2]",
              if_accounts_are_large(partial(said.p90_falls, method="Delta-FL 0.8", printed=printed))),
        Claim("The distribution over accounts has a thinner tail.", f"[PLMH23, {histogram}]",
              if_accounts_are_large(said.thinner_tail)),
        Claim("Among accounts with fewer than 100 tweets the error varies less.", "[PLMH23, section C.4]", poor_vary_less),
        Claim("The mean is on par at theta = 0.8.", "[PLMH23, table 3]", mean_is_close),
        Claim("The mean is higher at theta = 0.1 than with FedAvg.", f"[PLMH23, {table}]",
              partial(mean_is_lower, than="Delta-FL 0.1", printed=printed)),
        Claim("The mean is higher with AFL than with FedAvg.", f"[PLMH23, {table}]",
              partial(mean_is_lower, than="AFL", printed=printed)),
        Claim("The loss varies less over training accounts.", "[PLMH23, section C.4, figure 10]", said.loss_varies_less),
        Claim("The tail of the training loss is lower.", "[PLMH23, figure 8]", said.loss_tail_falls),
    )


SENT140_LINEAR = Study(
    name="sent140_linear", paper="PLMH23", item="tables 2, 3, 8, figures 8, 10; LPMH21, figures 9, 13, 15, 18",
    title="A linear model for Sent140", cost=Cost(1774, 20), full=LINEAR_FULL, quick=LINEAR_QUICK, cells=LINEAR.cells,
    tables=partial(tables, printed=TABLE8, source="[PLMH23, tables 2, 3 and 8]"), data=SENT140,
    figures=partial(figures, sources=LINEAR_FIGURES),
    notes=partial(notes, printed="1000 rounds of 100 of 438, 228 visits"),
    claims=(*claims(TABLE8, "figure 8", "table 8"),
            Claim("How often the threshold is found makes no difference.", "[LPMH21, figure 18]", period_does_not_matter)),
)
SENT140_LSTM = Study(
    name="sent140_lstm", paper="PLMH23", item="tables 2, 3, 9, figures 3, 8, 10; LPMH21, figures 10, 13, 15",
    title="An LSTM for Sent140", cost=Cost(467, 180, 22), full=LSTM_FULL, quick=LSTM_QUICK, cells=LSTM.cells,
    tables=partial(tables, printed=TABLE9, source="[PLMH23, tables 2, 3 and 9]"), data=SENT140,
    figures=partial(figures, sources=LSTM_FIGURES),
    notes=partial(notes, printed="600 rounds of 50 of 438, 68 visits"),
    claims=(*claims(TABLE9, "figures 3 and 8", "table 9"),
            Claim("theta = 0.1 is unstable with five clients that count in a round.", "[PLMH23, section 7.3]", unstable)),
)
