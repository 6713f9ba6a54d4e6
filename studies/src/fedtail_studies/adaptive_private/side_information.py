"""AdaDPS with public data, token frequencies and TF-IDF on bags of words: tables 6.2 to 6.4, 6.6 to 6.10, figures 6.5, 6.6.

Generated documents stand in for IMDB. Orderings are claims about these data, and printed numbers are shown beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fedtail.privacy.accounting import epsilon_at
from fedtail.privacy.calibration import round_event
from fedtail.privacy.events import PoissonSampling
from fedtail.private_optim import PrivateMethod
from fedtail_studies.adaptive_private import words
from fedtail_studies.adaptive_private.optimisers import Ranges, methods
from fedtail_studies.adaptive_private.pages import below, claim, draw_courses, errors, missing, near, scores_table
from fedtail_studies.adaptive_private.training import Length, noise_multiplier
from fedtail_studies.adaptive_private.tuning import Case, cells_of, search_note, settings_note
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Figure, Measure, Numbers, Study
from fedtail_studies.tables import Row, Table

COUNTS = Ranges(rates=(0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4), clips=(1.0,), adaptive_rates=(0.003, 0.01, 0.03, 0.1),
                divided_rates=(0.03, 0.1, 0.3, 1.0), divided_clips=(5.0,), epsilons=(1e-2, 1e-1),
                free_rates=(1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2))
TFIDF = replace(COUNTS, rates=(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0), adaptive_rates=(0.01, 0.03, 0.1, 0.3),
                epsilons=(1e-3, 1e-2))
PUBLIC, FOREIGN, FREQUENT, RARE = "AdaDPS, public data", "AdaDPS, other public data", "AdaDPS, frequencies", "AdaDPS, TF-IDF"
MAIN = ("DP-SGD", "DP-Adam", "DP-RMSProp", PUBLIC, "AdaDPS (Adam), public data", FREQUENT, RARE, "ideal", "DP-R-Pub",
        "DP-Adam-Pub", "PDA-DPMD", "DP-SGD, warm start")
FREE = ("SGD", "Adam", "AdaS, public data", "AdaS, frequencies")
WEIGHTED = ("DP-SGD", "DP-Adam", RARE, "ideal")
SIZES = {"5 times less": 0.002, "25 times less": 0.0004}
TOGETHER = 4                                           # examples in a micro-batch
NEAR, NEARER = 3.0, 2.0                                # points of error that count as the same


@dataclass(frozen=True)
class WordsPlan:
    """Documents of `words`, or fewer by `scale`; epsilon is that of figure 6.5 for IMDB."""

    seeds: int = 5
    scale: float = 1.0
    batch: int = 256
    steps: int = 800
    epsilon: float = 2.8
    delta: float = 5e-5
    trials: int = 8
    evaluations: int = 10


def on_tfidf(name: str) -> str:
    return f"{name}, on TF-IDF"


def in_groups(name: str, honest: bool) -> str:
    return f"{name}, micro-batches{'' if honest else ' as accounted'}"


def grouped(method: PrivateMethod, honest: bool) -> PrivateMethod:
    """In micro-batches; the noise is doubled, as one example may turn an average round, or not, as older libraries count."""
    noise = method.noise_multiplier * (1.0 if honest else 0.5)
    return replace(method, microbatch_size=TOGETHER, noise_multiplier=noise)


def cases(plan: WordsPlan) -> list[Case]:
    """Everything that is trained, in order."""
    length, counted, weighted = Length(plan.batch, plan.steps), methods(COUNTS), methods(TFIDF)
    weighted[RARE] = replace(weighted[RARE], choices={"rate": (1.0, 3.0, 10.0, 30.0), "clip": (1.0,), "epsilon": (1e-3, 1.0)})
    main = [Case(name, counted[name], words.by_counts, length, plan.epsilon) for name in MAIN]
    free = [Case(name, counted[name], words.by_counts, length) for name in FREE]
    tfidf = [Case(on_tfidf(name), weighted[name], words.by_tfidf, length, plan.epsilon) for name in WEIGHTED]
    public = next(case for case in main if case.name == PUBLIC)
    sizes = [replace(public, name=f"{PUBLIC}, {name}", problem=partial(words.by_counts, share=share), settings_of=PUBLIC)
             for name, share in SIZES.items()]
    foreign = replace(public, name=FOREIGN, problem=words.by_foreign, settings_of=PUBLIC)
    groups = [replace(case, name=in_groups(case.name, honest), change=partial(grouped, honest=honest),
                      settings_of="" if honest else in_groups(case.name, True))
              for case in main if case.name in ("DP-SGD", FREQUENT) for honest in (True, False)]
    return [*main, *free, *tfidf, *sizes, foreign, *groups]


def accounted(cell: Cell) -> Numbers:
    """Epsilon of the runs, and of those whose micro-batches are accounted as if one example moved a sum by the clip norm."""
    plan: WordsPlan = cell.plan
    examples = len(words.documents(cell).train.y)
    noise = noise_multiplier(plan.epsilon, plan.delta, Length(plan.batch, plan.steps), examples)
    rate = PoissonSampling(plan.batch / examples)

    def epsilon(multiplier: float) -> float:
        return epsilon_at([(round_event(multiplier, rate, unit="example"), plan.steps)], plan.delta)

    return {"noise": noise, "spent": epsilon(noise), "micro-batches as accounted": epsilon(noise / 2)}


def cells(plan: WordsPlan, seed: int) -> dict[str, Measure]:
    return {**cells_of(cases(plan), seed), "epsilon": accounted}


# pages


IMDB = errors({"DP-SGD": 0.63, "DP-Adam": 0.69, "DP-RMSProp": 0.67, PUBLIC: 0.80, "AdaDPS (Adam), public data": 0.80,
               FREQUENT: 0.75, "PDA-DPMD": 0.62, "DP-SGD, warm start": 0.73, "DP-Adam-Pub": 0.74, FOREIGN: 0.79, "ideal": 0.82,
               f"{PUBLIC}, 5 times less": 0.80, f"{PUBLIC}, 25 times less": 0.75})
IMDB_FREE = errors({"SGD": 0.66, "Adam": 0.88, "AdaS, public data": 0.88, "AdaS, frequencies": 0.88})
IMDB_TFIDF = errors({on_tfidf("DP-SGD"): 0.68, on_tfidf("DP-Adam"): 0.65, on_tfidf(RARE): 0.80, on_tfidf("ideal"): 0.83})
ERROR = "error, %"


def tables(results: Results) -> list[Table]:
    """Errors of all cases beside those of IMDB, and the settings."""
    every = cases(WordsPlan(**results.plan))
    names = [case.name for case in every]
    first = [name for name in names if name not in FREE and "TF-IDF" not in name.removeprefix(RARE) and "micro" not in name]
    groups = [name for name in names if "micro" in name]
    columns = {"epsilon": "spent", "noise multiplier": "noise",
               "epsilon of micro-batches as accounted": "micro-batches as accounted"}
    spent = Row("private runs", {title: results.values("epsilon", path) for title, path in columns.items()})
    return [
        scores_table(results, "With privacy, on counts (tables 6.2, 6.3, 6.4, 6.6 to 6.8, 6.10)", first, ERROR,
                     {"IMDB, printed": IMDB}),
        scores_table(results, "With privacy, on TF-IDF (table 6.4)", list(IMDB_TFIDF), ERROR, {"IMDB, printed": IMDB_TFIDF}),
        scores_table(results, "Without privacy (table 6.9)", FREE, ERROR, {"IMDB, printed": IMDB_FREE}),
        scores_table(results, f"Micro-batches of {TOGETHER}", [*("DP-SGD", FREQUENT), *groups], ERROR, {}),
        Table("Privacy", tuple(spent.ours), (spent,), digits=3, head="of"),
    ]


def figures(results: Results, folder: Path) -> list[Figure]:
    return [draw_courses(results, folder, "public.png", ("DP-SGD", "DP-Adam", "DP-R-Pub", PUBLIC), "test error, %",
                         "With public data, mean over seeds; as figure 6.5."),
            draw_courses(results, folder, "frequencies.png", ("DP-SGD", "DP-Adam", FREQUENT), "test error, %",
                         "With token frequencies, mean over seeds; as figure 6.6.")]


def notes(results: Results) -> Sequence[str]:
    plan = results.plan
    share = f"{plan['epsilon']:g} at delta {plan['delta']:g}"
    where = (f"Documents are generated: counts of {words.WORDS:,} words with Zipf's frequencies, {words.TOKENS:g} words long on "
             f"average and of unequal length, so that 8% of the counts are not zero; the {words.STOP_WORDS} most frequent "
             f"words say nothing of the label, the others have weights N(0, {words.SPREAD:g}^2) in a logistic model")
    other = "documents whose frequencies differ by factors e^N(0, 1), with weights of correlation 0.7"
    return [
        f"{where}. {words.TRAIN:,} to train on, drawn anew for every seed; epsilon is {share}; batch {plan['batch']}, "
        f"{plan['steps']} steps (IMDB: 25,000 reviews, batch 64; the thesis does not print how many epochs).",
        f"Public are 1% of the training documents (200), or of another kind: {other}. Those of "
        "the first kind are trained on as well, as in the thesis, and no guarantee covers them. Frequencies and TF-IDF are from "
        f"{words.OPEN:,} documents that are not trained on.",
        "Where a method is shown with other public data or fewer of them, it has the settings found with the first.",
        "Micro-batches: one example can turn an average round, so that noise is twice as large here. Rows 'as accounted' have "
        "the noise by which [Li23] and older libraries count, and the settings of the others; the table has their true epsilon.",
        words.AVERAGED_NOTE,
        search_note(results, cases(WordsPlan(**plan))),
        settings_note(results, cases(WordsPlan(**plan))),
    ]


CLAIMS: tuple[Claim, ...] = (
    claim("AdaDPS with public data has a lower error than DP-SGD, DP-Adam and DP-RMSProp.", "table 6.6", below,
          ((PUBLIC, "DP-SGD"), (PUBLIC, "DP-Adam"), (PUBLIC, "DP-RMSProp"))),
    claim("Precondition first, then add noise: AdaDPS has a lower error than DP-R-Pub.", "section 6.4.1.1", below,
          ((PUBLIC, "DP-R-Pub"),)),
    claim("AdaDPS with public data has a lower error than PDA-DPMD.", "table 6.2", below, ((PUBLIC, "PDA-DPMD"),)),
    claim("AdaDPS with public data has a lower error than DP-SGD with a warm start on them.", "table 6.7", below,
          ((PUBLIC, "DP-SGD, warm start"),)),
    claim("AdaDPS with public data has a lower error than DP-Adam-Pub.", "table 6.8", below, ((PUBLIC, "DP-Adam-Pub"),)),
    claim("With token frequencies in place of public data AdaDPS has a lower error than DP-SGD and DP-Adam.", "figure 6.6", below,
          ((FREQUENT, "DP-SGD"), (FREQUENT, "DP-Adam"))),
    claim("Public data of another kind do as well: the error is below DP-SGD's.", "table 6.3", below, ((FOREIGN, "DP-SGD"),)),
    claim(f"Public data of another kind do as well as the same kind, to {NEAR:g} points.", "table 6.3", near,
          ((FOREIGN, PUBLIC),), NEAR),
    claim(f"Five times fewer public data do as well, to {NEARER:g} points.", "table 6.10", near,
          ((f"{PUBLIC}, 5 times less", PUBLIC),), NEARER),
    claim("With 25 times fewer public data the error is still below DP-SGD's.", "table 6.10", below,
          ((f"{PUBLIC}, 25 times less", "DP-SGD"),)),
    claim("On TF-IDF features AdaDPS, by TF-IDF values, has a lower error than DP-SGD and DP-Adam.", "table 6.4", below,
          ((on_tfidf(RARE), on_tfidf("DP-SGD")), (on_tfidf(RARE), on_tfidf("DP-Adam")))),
    claim("Without privacy Adam has a lower error than SGD.", "table 6.9", below, (("Adam", "SGD"),)),
    claim(f"Without privacy AdaS has the error of Adam, to {NEARER:g} points.", "table 6.9", near,
          (("AdaS, public data", "Adam"), ("AdaS, frequencies", "Adam")), NEARER),
    Claim("Micro-batches of four lower no error where one example is accounted for as it should be.", "[ours]",
          partial(below, pairs=(("DP-SGD", in_groups("DP-SGD", True)), (FREQUENT, in_groups(FREQUENT, True))))),
    missing("Accuracies on IMDB and StackOverflow are as printed.", "tables 6.2 to 6.4, 6.6 to 6.10",
            "IMDB's and StackOverflow's features are not at hand; other documents stand in, printed numbers are shown beside"),
)
QUICK = WordsPlan(seeds=3, scale=0.25, batch=128, steps=150, trials=4, evaluations=5)
ITEM = "tables 6.2 to 6.4, 6.6 to 6.10, figures 6.5, 6.6"
ADADPS_WORDS = Study(
    name="adadps_words", paper="Li23", item=f"{ITEM} (a stand-in for IMDB)", title="AdaDPS on generated bags of words",
    cost=Cost(0, 12), full=WordsPlan(), quick=QUICK, cells=cells, tables=tables, figures=figures, notes=notes, claims=CLAIMS)
