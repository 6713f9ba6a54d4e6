"""`fedtail privacy`: the noise that a privacy budget needs, or the guarantee that noise gives."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedtail.cli import options
from fedtail.cli.privacy_of_run import show_privacy_of_run
from fedtail.cli.terminal import print_errors_as_sentences, print_json

if TYPE_CHECKING:
    from fedtail.privacy.accounting import Guarantee
    from fedtail.privacy.calibration import NoiseLevels
    from fedtail.privacy.events import Sampling
    from fedtail.privacy.group_privacy import GroupGuarantee

SAMPLINGS, ADJACENCIES, ACCOUNTANTS = ("poisson", "fixed", "none"), ("zero-out", "replace-one"), ("pld", "rdp", "zcdp")
UNITS = ("client", "example")
SHARES = (0.1, 0.25, 0.5, 0.75, 1, 2)      # of the rounds, in the table
POINTS = 24                                # of the plot


@print_errors_as_sentences
def privacy(
    run: Path | None = typer.Argument(None, metavar="[RUN]", show_default=False,
                                      help="A run folder: its privacy statement, instead of a plan."),
    population: int | None = typer.Option(None, "--population", metavar="N", show_default=False,
                                          help="How many clients (or examples, with --unit example) there are."),
    cohort: int | None = typer.Option(None, "--cohort", metavar="M", show_default=False,
                                      help="How many of them are sampled in a round, on average."),
    rounds: int | None = typer.Option(None, "--rounds", metavar="T", show_default=False, help="How many rounds."),
    delta: float | None = typer.Option(None, "--delta", show_default=False, help="Well below one over the population."),
    epsilon: float | None = typer.Option(None, "--epsilon", show_default=False, help="The budget; prints the noise it needs."),
    noise: float | None = typer.Option(None, "--noise", metavar="Z", show_default=False,
                                       help="The noise multiplier of a whole round; prints epsilon instead."),
    quantile_ratio: float | None = typer.Option(None, "--quantile-ratio", metavar="R", show_default=False,
                                                help="Cost of a quantile over that of an update; without, no quantile."),
    models: int = typer.Option(1, "--models", help="Models of a family, each with an update and a quantile."),
    sampling: str = typer.Option("poisson", "--sampling", metavar="|".join(SAMPLINGS), help="How cohorts are sampled."),
    minimum: int | None = typer.Option(None, "--minimum", metavar="M", show_default=False,
                                       help="Rounds of fewer clients are skipped (Poisson sampling)."),
    adjacency: str = typer.Option("zero-out", "--adjacency", metavar="|".join(ADJACENCIES),
                                  help="Neighbouring data: a client's rows are zeroed, or others."),
    unit: str = typer.Option("client", "--unit", metavar="|".join(UNITS),
                             help="Whom it protects: a client with all its examples, or one example."),
    group: int | None = typer.Option(None, "--group", metavar="K", show_default=False,
                                     help="Also for any K of them together, such as a client's examples."),
    accountant: str | None = typer.Option(None, "--accountant", metavar="|".join(ACCOUNTANTS), show_default=False,
                                          help="By default pld, the sharpest."),
    plot: Path | None = typer.Option(None, "--plot", metavar="FILE.html", show_default=False,
                                     help="Draw epsilon against rounds."),
    discrete: bool = typer.Option(False, "--discrete", help="Noise in integers, in shares from the clients."),
    anyway: bool = typer.Option(False, "--anyway", help="Also for so few clients that it will be useless."),
    for_release: bool = typer.Option(False, "--for-release", help="Refuse a RUN whose guarantee is only a simulated one."),
    as_json: bool = options.JSON,
) -> None:
    """Say which noise a budget of differential privacy needs, or with --noise which epsilon a noise gives.

    With a RUN, print its privacy statement, from its ledger.

    The releases of a round are composed first, then amplified once by how its cohort was sampled. A noise multiplier is the
    standard deviation of the noise over the largest norm of one client's row.
    """
    if run is not None or for_release:
        if run is None:
            raise ValueError("--for-release is about a run. Write fedtail privacy RUN --for-release.")
        show_privacy_of_run(run, delta, for_release, as_json, group)
        return
    named = {"--population": population, "--rounds": rounds, "--delta": delta,
             **({"--cohort": cohort} if sampling != "none" else {})}
    request = Request(*_required_options(named), cohort=cohort, epsilon=epsilon, noise=noise, quantile_ratio=quantile_ratio,
                      models=models, sampling=sampling,
                      minimum=_minimum_cohort(minimum, discrete, sampling, population, cohort),
                      adjacency=adjacency, accountant=accountant, discrete=discrete, unit=unit, group=group)
    check_request(request, anyway)
    if plot and plot.suffix != ".html":
        raise ValueError(f"--plot writes a page, .html, got {plot}.")
    found = solve_request(request)
    if plot:
        plot_epsilon(replace(request, noise=found.whole_round), plot)
    if as_json:
        print_json(plan_as_json(request, found))
    else:
        show_plan(request, found)
        typer.echo(f"Wrote {plot}." if plot else "", nl=bool(plot))


@dataclass(frozen=True)
class Request:
    """The options of `fedtail privacy` for a plan. `noise` (a multiplier), where given, is used; else `epsilon`, the budget."""

    population: int
    rounds: int
    delta: float
    cohort: int | None
    epsilon: float | None
    noise: float | None
    quantile_ratio: float | None
    models: int
    sampling: str
    minimum: int | None
    adjacency: Any
    accountant: Any
    discrete: bool = False
    unit: Any = "client"
    group: int | None = None

    @property
    def sampling_event(self) -> Sampling:
        """How cohorts are sampled, as the accountant takes it: no sampling, cohorts of fixed size, or Poisson sampling.

        Poisson sampling is at the rate cohort / population, and carries the probability that skipping rounds below the minimum
        cohort (none by default, as the server adds the noise) reveals whether a client participated.
        """
        from fedtail.privacy.events import FixedSampling, NoSampling, PoissonSampling
        from fedtail.privacy.minimum_cohort import reveal_probability

        if self.sampling == "none" or self.cohort is None:
            return NoSampling()
        if self.sampling == "fixed":
            return FixedSampling(self.cohort, self.population)
        rate = self.cohort / self.population
        return PoissonSampling(rate, reveal_probability(rate, self.population, 0 if self.minimum is None else self.minimum))


def _minimum_cohort(minimum: int | None, discrete: bool, sampling: str, population: int | None, cohort: int | None) -> int | None:
    """The minimum cohort: `minimum` where given, else a default for discrete noise under Poisson sampling, else None.

    The default is the largest that a round misses with a probability below 1e-5; ValueError where there is none. None also where
    `population` or `cohort` is missing or the cohort is the larger one, which `check_request` refuses.
    """
    if minimum is not None or not discrete or sampling != "poisson" or not population or not cohort or cohort > population:
        return minimum
    from fedtail.privacy.minimum_cohort import minimum_cohort_for

    return minimum_cohort_for(cohort / population, population)


def _required_options(named: dict[str, Any]) -> tuple[int, int, float]:
    """The triple (population, rounds, delta) from `named`, the required options by name.

    Raises ValueError, which names all that are None.
    """
    missing = [name for name, value in named.items() if value is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} must be given too.")
    return named["--population"], named["--rounds"], named["--delta"]


def check_request(request: Request, anyway: bool) -> None:
    """Raise ValueError for options of `request` that are out of range or contradict each other, before anything is computed.

    Unless `anyway`, also for fewer than 100 clients, for whom a private result is useless.
    """
    from fedtail.privacy.calibration import check_population
    from fedtail.privacy.concentrated import check_delta

    for name, value, known in (("--sampling", request.sampling, SAMPLINGS), ("--adjacency", request.adjacency, ADJACENCIES),
                               ("--accountant", request.accountant, (None, *ACCOUNTANTS)), ("--unit", request.unit, UNITS)):
        if value not in known:
            raise ValueError(f"{name} must be {', '.join(filter(None, known[:-1]))} or {known[-1]}, got {value}.")
    if (request.epsilon is None) == (request.noise is None):
        raise ValueError("give either --epsilon, for the noise it needs, or --noise, for the epsilon it gives.")
    if request.group is not None and request.group < 2:
        raise ValueError(f"--group is for 2 or more together, got {request.group}.")
    if request.population < 1:
        raise ValueError(f"--population must be 1 or more, got {request.population}.")
    if request.cohort is not None and not 1 <= request.cohort <= request.population:
        raise ValueError(f"--cohort must be between 1 and the population of {request.population}, got {request.cohort}.")
    check_delta(request.delta)
    if request.minimum is not None and request.sampling != "poisson":
        raise ValueError("--minimum is for Poisson sampling: other cohorts have a size that is known.")
    if not anyway:
        try:
            check_population(request.population)
        except ValueError as reason:
            raise ValueError(f"{reason} Write --anyway to see the numbers.") from None


def solve_request(request: Request) -> NoiseLevels:
    """The noise multipliers of a round, an update and a quantile, and the guarantee that they give after the request's rounds.

    They follow from `request.noise` where it is given. Otherwise they are calibrated to spend `request.epsilon`, which must then
    be given.
    """
    from fedtail.privacy.calibration import noise_for, noise_levels

    rest = (request.delta, request.rounds, request.sampling_event, request.quantile_ratio, request.models, request.adjacency,
            request.accountant, request.discrete, request.unit)
    if request.noise is not None:
        return noise_levels(request.noise, *rest)
    assert request.epsilon is not None
    return noise_for(request.epsilon, *rest)


def guarantee_of_group(request: Request, found: NoiseLevels) -> GroupGuarantee | None:
    """The guarantee of the answer `found` for any `request.group` clients or examples together; None where that is not asked."""
    from fedtail.privacy.calibration import round_event
    from fedtail.privacy.group_privacy import group_privacy

    if request.group is None:
        return None
    event = round_event(found.whole_round, request.sampling_event, request.quantile_ratio, request.models, request.discrete,
                        request.unit)
    return group_privacy([(event, request.rounds)], request.group, request.delta, request.adjacency)


def plan_as_json(request: Request, found: NoiseLevels) -> dict[str, Any]:
    """The answer `found` to a request as a dict of plain values for --json.

    It has the noise multipliers, epsilon and delta with the accountant, its second opinion and what holds without amplification,
    the request's own settings, and notes and warnings as lists of texts. With --epsilon, `epsilon` is the budget and
    `epsilon_spent` what the noise spends of it, which may be a little less; with --noise both are the same. `unit` says whom it
    protects; `group` is the guarantee for several together, None without --group.
    """
    from fedtail.privacy.calibration import privacy_setting_warnings
    from fedtail.privacy.composed_mechanism import sampling_rate

    bought = found.guarantee
    second, together = bought.second_opinion, guarantee_of_group(request, found)
    return {
        "noise_multiplier": found.whole_round, "quantile_noise_multiplier": found.quantile,
        "update_noise_multiplier": found.update, "epsilon": request.epsilon or bought.epsilon, "delta": bought.delta,
        "accountant": bought.accountant, "sampling": request.sampling, "adjacency": bought.adjacency,
        "unit": bought.unit, "group": asdict(together) if together else None,
        "epsilon_spent": bought.epsilon,
        "second_opinion": {"accountant": second[0], "epsilon": second[1]} if second else None,
        "epsilon_without_amplification": bought.without_amplification, "epsilon_one_participation": bought.one_participation,
        "population": request.population, "cohort": request.cohort, "rounds": request.rounds, "models": request.models,
        "quantile_ratio": request.quantile_ratio or None, "rate": sampling_rate(request.sampling_event),
        "minimum": request.minimum, "notes": list(bought.notes),
        "warnings": privacy_setting_warnings(request.population, request.sampling_event, request.delta)}


def show_plan(request: Request, found: NoiseLevels) -> None:
    """Print the answer `found` to a request: the guarantee, a table of noise and epsilon, and one of epsilon against rounds.

    Warnings go to stderr.
    """
    from fedtail.cli.terminal import show_table
    from fedtail.privacy.accounting import SAMPLES
    from fedtail.privacy.calibration import privacy_setting_warnings

    drawn = f"every {request.unit} in every round" if request.sampling == "none" else \
        f"{SAMPLES[request.unit]} of {request.cohort} by {request.sampling} sampling"
    title = (f"{request.rounds} rounds, {request.population} {request.unit}s, {drawn}, {request.adjacency}, "
             f"delta {request.delta:g}")
    typer.echo(str(found.guarantee))
    if (together := guarantee_of_group(request, found)) is not None:
        typer.echo(str(together))
    show_table(title, ["what", "value"], [[name, value] for name, value in plan_rows(request, found)])
    shown = sorted({max(1, round(share * request.rounds)) for share in SHARES})
    bought = guarantees_after_rounds(replace(request, noise=found.whole_round), shown)
    rows = [[str(count), _epsilon_text(one.epsilon), _epsilon_text(one.without_amplification)]
            for count, one in zip(shown, bought, strict=True)]
    show_table("Epsilon against rounds, at this noise", ["rounds", "epsilon", "without amplification"], rows)
    for note in (*found.guarantee.notes, *privacy_setting_warnings(request.population, request.sampling_event, request.delta)):
        typer.echo(f"warning: {note}", err=True)


def plan_rows(request: Request, found: NoiseLevels) -> list[tuple[str, str]]:
    """The rows (what, value) of the printed table, as texts, for the answer `found` to a request.

    They are the noise multipliers, rounded up, and epsilon with and without amplification; where sampling is Poisson, rows about
    skipped rounds follow.
    """
    bought = found.guarantee
    second, one = bought.second_opinion, "an example" if bought.unit == "example" else "a client"
    quantile = [("noise multiplier of each histogram", _noise_text(found.quantile))] if found.quantile else []
    return [
        ("noise multiplier of a whole round", _noise_text(found.whole_round)), *quantile,
        ("noise multiplier of each update", _noise_text(found.update)),
        (f"epsilon, by {bought.accountant}", _epsilon_text(bought.epsilon)),
        *([(f"second opinion, by {second[0]}", _epsilon_text(second[1]))] if second else []),
        (f"without amplification, {one} in one round", _epsilon_text(bought.one_participation)),
        (f"without amplification, {one} in every round", _epsilon_text(bought.without_amplification)),
        *_skipped_round_rows(request)]


def _skipped_round_rows(request: Request) -> list[tuple[str, str]]:
    """Rows (what, value) about rounds that `request` skips under Poisson sampling: their probability at its minimum cohort.

    Without one, the largest minimum that is missed less than once in 100000 rounds. [] for other sampling, or where there is
    none.
    """
    from fedtail.privacy.minimum_cohort import minimum_cohort_for, skip_probability

    if request.sampling != "poisson" or request.cohort is None:
        return []
    rate = request.cohort / request.population
    if request.minimum is not None:
        return [(f"rounds of fewer than {request.minimum} are skipped, with probability",
                 f"{skip_probability(rate, request.population, request.minimum):.2g}")]
    try:
        return [("largest minimum missed less than once in 100000 rounds", str(minimum_cohort_for(rate, request.population)))]
    except ValueError:
        return []


def guarantees_after_rounds(request: Request, counts: list[int]) -> list[Guarantee]:
    """The guarantees after each number of rounds in `counts`, in that order, with the noise of `request`, which must be set."""
    return [solve_request(replace(request, rounds=count)).guarantee for count in counts]


def plot_epsilon(request: Request, file: Path) -> None:
    """Write an HTML page to `file` with a plot of epsilon against rounds, at the noise of `request`; it works offline.

    The second accountant's epsilon is drawn too where there is one. Folders are created, and an existing file is overwritten.
    """
    from plotly import graph_objects

    counts = sorted({max(1, round(request.rounds * point / POINTS)) for point in range(1, POINTS + 1)})
    bought = guarantees_after_rounds(request, counts)
    figure = graph_objects.Figure(layout={
        "template": "simple_white", "xaxis_title": "rounds", "yaxis_title": f"epsilon at delta {request.delta:g}",
        "yaxis_rangemode": "tozero",
        "title": f"{request.population} {request.unit}s, {request.sampling} sampling, noise multiplier {request.noise:.4g}"})
    figure.add_scatter(x=counts, y=[one.epsilon for one in bought], name=bought[0].accountant, mode="lines")
    if all(one.second_opinion for one in bought):
        seconds = [one.second_opinion for one in bought if one.second_opinion]
        figure.add_scatter(x=counts, y=[epsilon for _, epsilon in seconds], name=seconds[0][0], mode="lines", line_dash="dot")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.write_html(str(file), include_plotlyjs=True)


def _epsilon_text(value: float) -> str:
    """The text of an epsilon, `value`, in a table: three decimals below 100, none above, or "infinite"."""
    return "infinite" if math.isinf(value) else f"{value:.3f}" if value < 100 else f"{value:.0f}"


def _noise_text(noise: float) -> str:
    """The text of a noise multiplier, four decimals, rounded up, so that never less noise is printed than is needed."""
    return f"{math.ceil(noise * 1e4 - 1e-6) / 1e4:.4f}"
