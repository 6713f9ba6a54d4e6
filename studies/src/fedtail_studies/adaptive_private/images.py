"""AdaDPS on MNIST, a small autoencoder and a small classifier: table 6.1 and rows of tables 6.2, 6.6 to 6.9 of [Li23]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fedtail_studies.adaptive_private.optimisers import Ranges, methods
from fedtail_studies.adaptive_private.pages import below, claim, draw_courses, errors, scores_table
from fedtail_studies.adaptive_private.training import Length, Problem, Samples, error_percent
from fedtail_studies.adaptive_private.tuning import Case, cells_of, search_note, settings_note
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Claim, Cost, Figure, Measure, Study
from fedtail_studies.tables import Table
from fedtail_studies.tilted.classes_data import MNIST, generator, mnist_sides

PIXELS, VALIDATED = 28 * 28, 2_000
AUTOENCODER = Ranges(rates=(16.0, 32.0, 64.0, 128.0), clips=(0.05,), adaptive_rates=(0.006, 0.02),
                     divided_rates=(0.3, 1.0), divided_clips=(3.0,), epsilons=(1e-4, 1e-3),
                     free_rates=(10.0, 30.0, 100.0, 300.0))
CLASSIFIER = Ranges(rates=(0.4, 0.8, 1.6, 3.2), clips=(1.0,), adaptive_rates=(0.01, 0.03),
                    divided_rates=(0.3, 1.0), divided_clips=(2.0,), epsilons=(1e-3, 1e-2))
PUBLIC, ADAM = "AdaDPS, public data", "AdaDPS (Adam), public data"
CODED = ("DP-SGD", "DP-Adam", "DP-RMSProp", PUBLIC, ADAM, "DP-Adam-Pub", "PDA-DPMD", "DP-SGD, warm start")
WEAKER = ("DP-SGD", "DP-Adam", PUBLIC)                 # at the larger epsilon
CLASSIFIED = ("DP-SGD", "DP-Adam", "DP-RMSProp", PUBLIC, ADAM)
FREE = ("SGD", "Adam", "AdaS, public data")


@dataclass(frozen=True)
class ImagesPlan:
    """Small networks and few steps; epsilons are those of tables 6.1 and 6.6."""

    seeds: int = 3
    train: int = 50_000
    batch: int = 256
    steps: int = 300
    hidden: int = 32
    code: int = 8
    epsilon: float = 1.6
    weaker: float = 3.0
    classified: float = 1.25
    delta: float = 2e-5
    trials: int = 4
    evaluations: int = 8


def pixel_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean squared error over pixels, for each image."""
    return (outputs - targets).square().mean(1)


def reconstruction(module: nn.Module, samples: Samples) -> float:
    """The mean squared error over pixels, times a hundred."""
    with torch.no_grad():
        return 100 * float(pixel_error(module(samples.x), samples.y).mean())


def seeded(make: Callable[[], nn.Module], seed: int) -> Callable[[], nn.Module]:
    """The module with first weights that follow from the seed."""
    def made() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(generator(seed, 28).initial_seed()))
            return make()
    return made


def images(cell: Cell) -> tuple[Samples, Samples, Samples]:
    """MNIST's training images in an order that follows from the seed, some of them to validate, and test images."""
    train, test = mnist_sides(cell.data, "cpu")
    order = torch.randperm(len(train.y), generator=generator(cell.seed, 29))
    size = min(cell.plan.train, len(order) - len(order) // 30)
    validated = order[size:][:VALIDATED]
    return (Samples(train.x[order[:size]], train.y[order[:size]]), Samples(train.x[validated], train.y[validated]),
            Samples(test.x, test.y))


def autoencoder(cell: Cell) -> Problem:
    """A network of four linear layers whose targets are its inputs; 1% of the training images is public."""
    plan: ImagesPlan = cell.plan
    train, validation, test = (Samples(one.x, one.x) for one in images(cell))

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(PIXELS, plan.hidden), nn.ReLU(), nn.Linear(plan.hidden, plan.code), nn.ReLU(),
                             nn.Linear(plan.code, plan.hidden), nn.ReLU(), nn.Linear(plan.hidden, PIXELS), nn.Sigmoid())

    return Problem(train, validation, test, seeded(make, cell.seed), reconstruction, pixel_error,
                   train.rows(slice(len(train.y) // 100)).public(64, cell.seed))


def classifier(cell: Cell) -> Problem:
    """A network with one hidden layer."""
    train, validation, test = images(cell)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(PIXELS, cell.plan.hidden), nn.ReLU(), nn.Linear(cell.plan.hidden, 10))

    return Problem(train, validation, test, seeded(make, cell.seed), error_percent,
                   public=train.rows(slice(len(train.y) // 100)).public(64, cell.seed))


def weaker(name: str) -> str:
    return f"{name}, larger epsilon"


def classes(name: str) -> str:
    return f"{name}, classes"


def cases(plan: ImagesPlan) -> list[Case]:
    """The autoencoder at two epsilons and without privacy, and the classifier."""
    length, coded, classified = Length(plan.batch, plan.steps), methods(AUTOENCODER), methods(CLASSIFIER)
    return [
        *(Case(name, coded[name], autoencoder, length, plan.epsilon) for name in CODED),
        *(Case(name, coded[name], autoencoder, length) for name in FREE),
        *(Case(weaker(name), coded[name], autoencoder, length, plan.weaker, settings_of=name) for name in WEAKER),
        *(Case(classes(name), classified[name], classifier, length, plan.classified) for name in CLASSIFIED),
    ]


def cells(plan: ImagesPlan, seed: int) -> dict[str, Measure]:
    return cells_of(cases(plan), seed)


LOSSES = {"DP-SGD": 5.013, "DP-Adam": 3.697, "DP-RMSProp": 3.636, PUBLIC: 3.566, ADAM: 3.443, "DP-Adam-Pub": 6.4, "PDA-DPMD": 3.9,
          "DP-SGD, warm start": 4.9, weaker("DP-SGD"): 3.792, weaker("DP-Adam"): 3.286, weaker(PUBLIC): 3.158}
FREE_LOSSES = {"SGD": 5.013, "Adam": 1.151, "AdaS, public data": 1.805}
ERRORS = errors({classes("DP-SGD"): 0.9273, classes("DP-Adam"): 0.9333, classes("DP-RMSProp"): 0.9314, classes(PUBLIC): 0.9377,
                 classes(ADAM): 0.9541})
LOSS = "loss x 100"


def tables(results: Results) -> list[Table]:
    """Reconstruction losses and errors beside those printed for larger networks, and the settings."""
    return [
        scores_table(results, "Autoencoder with privacy (tables 6.1, 6.2, 6.6 to 6.8)", list(LOSSES), LOSS,
                     {"printed": LOSSES}, 3),
        scores_table(results, "Autoencoder without privacy (table 6.9)", FREE, LOSS, {"printed": FREE_LOSSES}, 3),
        scores_table(results, "Classes (table 6.6)", list(ERRORS), "error, %", {"printed": ERRORS}),
    ]


def figures(results: Results, folder: Path) -> list[Figure]:
    return [draw_courses(results, folder, "autoencoder.png", CODED, LOSS,
                         "The autoencoder's loss on test images, mean over seeds."),
            draw_courses(results, folder, "classes.png", [classes(name) for name in CLASSIFIED], "test error, %",
                         "The classifier, mean over seeds.")]


def notes(results: Results) -> Sequence[str]:
    plan = results.plan
    return [
        f"The autoencoder has {PIXELS}, {plan['hidden']}, {plan['code']}, {plan['hidden']} and {PIXELS} units, where the thesis "
        f"has more than two million weights; the classifier one hidden layer of {plan['hidden']}. Batch {plan['batch']}, "
        f"{plan['steps']} steps, {plan['steps'] * plan['batch'] / plan['train']:.1f} epochs; the thesis's epsilons would be 80 "
        "epochs of batch 64. Values are not comparable, orderings are.",
        f"Epsilon {plan['epsilon']:g} and {plan['weaker']:g} for the autoencoder, {plan['classified']:g} for the classifier, at "
        f"delta {plan['delta']:g}. The larger epsilon has the settings of the smaller.",
        "Printed losses of tables 6.2, 6.7 and 6.8 are rounded there to three digits. The printed loss of SGD without privacy is "
        "that of DP-SGD to the last digit, which is taken to be a slip of the thesis.",
        "Adaptive methods have two learning rates and two epsilons to choose from, the others four learning rates: orderings "
        "after so few steps may depend on it, that of DP-Adam above all.",
        search_note(results, cases(ImagesPlan(**plan))),
        settings_note(results, cases(ImagesPlan(**plan))),
    ]


CLAIMS: tuple[Claim, ...] = (
    claim("The autoencoder's loss with AdaDPS is below those with DP-SGD and DP-Adam.", "table 6.1", below,
          ((PUBLIC, "DP-SGD"), (PUBLIC, "DP-Adam"))),
    claim("So it is at the larger epsilon.", "table 6.1", below,
          ((weaker(PUBLIC), weaker("DP-SGD")), (weaker(PUBLIC), weaker("DP-Adam")))),
    claim("Here DP-Adam has a lower loss than DP-SGD.", "table 6.1", below, (("DP-Adam", "DP-SGD"),)),
    claim("AdaDPS has a lower loss than PDA-DPMD.", "table 6.2", below, ((PUBLIC, "PDA-DPMD"),)),
    claim("AdaDPS has a lower loss than DP-SGD with a warm start.", "table 6.7", below, ((PUBLIC, "DP-SGD, warm start"),)),
    claim("AdaDPS has a lower loss than DP-Adam-Pub.", "table 6.8", below, ((PUBLIC, "DP-Adam-Pub"),)),
    claim("DP-Adam-Pub has a larger loss than DP-SGD.", "table 6.8", below, (("DP-SGD", "DP-Adam-Pub"),)),
    claim("Without privacy AdaS, with 1% public data, is between Adam and SGD.", "table 6.9", below,
          (("Adam", "AdaS, public data"), ("AdaS, public data", "SGD"))),
    claim("As a classifier AdaDPS has a lower error than DP-SGD, DP-Adam and DP-RMSProp.", "table 6.6", below,
          tuple((classes(PUBLIC), classes(name)) for name in CLASSIFIED[:3])),
    claim("AdaDPS with Adam has the lowest error of all.", "table 6.6", below,
          tuple((classes(ADAM), classes(name)) for name in CLASSIFIED[:4])),
)
ADADPS_MNIST = Study(
    name="adadps_mnist", paper="Li23", item="tables 6.1, 6.2, 6.6 to 6.9 (MNIST)", title="AdaDPS", cost=Cost(0, 15),
    full=ImagesPlan(), quick=ImagesPlan(train=10_000, batch=128, steps=60, trials=3, evaluations=4),
    data=MNIST, cells=cells, tables=tables, figures=figures, notes=notes, claims=CLAIMS)
