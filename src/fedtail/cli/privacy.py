"""`fedtail privacy`: the noise that a promise takes, or the promise that noise keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedtail.cli import options
from fedtail.cli.privacy_of_run import privacy_of_run
from fedtail.cli.terminal import errors_as_sentences, print_json

if TYPE_CHECKING:
    from fedtail.privacy.accounting import Guarantee
    from fedtail.privacy.calibration import NoiseLevels
    from fedtail.privacy.events import Sampling

SAMPLINGS, ADJACENCIES, ACCOUNTANTS = ("poisson", "fixed", "none"), ("zero-out", "replace-one"), ("pld", "rdp", "zcdp")
SHARES = (0.1, 0.25, 0.5, 0.75, 1, 2)      # of the rounds, in the table
POINTS = 24                                # of the plot


@errors_as_sentences
def privacy(
    run: Path | None = typer.Argument(None, metavar="[RUN]", show_default=False,
                                      help="A run folder: what that run has cost, instead of a plan."),
    population: int | None = typer.Option(None, "--population", metavar="N", show_default=False,
                                          help="How many clients there are."),
    cohort: int | None = typer.Option(None, "--cohort", metavar="M", show_default=False,
                                      help="How many of them are sampled for a round, on average."),
    rounds: int | None = typer.Option(None, "--rounds", metavar="T", show_default=False, help="How many rounds."),
    delta: float | None = typer.Option(None, "--delta", show_default=False, help="Well below one over the population."),
    epsilon: float | None = typer.Option(None, "--epsilon", show_default=False, help="What to promise; prints the noise."),
    noise: float | None = typer.Option(None, "--noise", metavar="Z", show_default=False,
                                       help="The noise multiplier of a whole round; prints epsilon instead."),
    quantile_ratio: float | None = typer.Option(None, "--quantile-ratio", metavar="R", show_default=False,
                                                help="Cost of a quantile over that of an update; without, no quantile."),
    models: int = typer.Option(1, "--models", help="Models of a family, each with an update and a quantile."),
    sampling: str = typer.Option("poisson", "--sampling", metavar="|".join(SAMPLINGS), help="How cohorts are drawn."),
    minimum: int | None = typer.Option(None, "--minimum", metavar="M", show_default=False,
                                       help="Rounds of fewer clients are skipped (Poisson sampling)."),
    adjacency: str = typer.Option("zero-out", "--adjacency", metavar="|".join(ADJACENCIES),
                                  help="What could be different: a client is silent, or has other data."),
    accountant: str | None = typer.Option(None, "--accountant", metavar="|".join(ACCOUNTANTS), show_default=False,
                                          help="By default pld, the sharpest."),
    plot: Path | None = typer.Option(None, "--plot", metavar="FILE.html", show_default=False,
                                     help="Draw epsilon against rounds."),
    discrete: bool = typer.Option(False, "--discrete", help="Noise in integers, in shares from the clients."),
    anyway: bool = typer.Option(False, "--anyway", help="Also for so few clients that it will be useless."),
    for_release: bool = typer.Option(False, "--for-release", help="Refuse a RUN whose guarantee is only a simulated one."),
    as_json: bool = options.JSON,
) -> None:
    """Say which noise keeps a promise of differential privacy for clients, or with --noise what a noise promises.

    With a RUN, say what it has cost, from its ledger.

    All that a round releases is composed first, then amplified once by how its cohort was drawn. A noise multiplier is the
    standard deviation of the noise over the largest norm of one client's row.
    """
    if run is not None or for_release:
        if run is None:
            raise ValueError("--for-release is about a run. Write fedtail privacy RUN --for-release.")
        privacy_of_run(run, delta, for_release, as_json)
        return
    named = {"--population": population, "--rounds": rounds, "--delta": delta,
             **({"--cohort": cohort} if sampling != "none" else {})}
    plan = PrivacyPlan(*_given(named), cohort=cohort, epsilon=epsilon, noise=noise, quantile_ratio=quantile_ratio, models=models,
                      sampling=sampling, minimum=_minimum(minimum, discrete, sampling, population, cohort),
                      adjacency=adjacency, accountant=accountant, discrete=discrete)
    check_plan(plan, anyway)
    if plot and plot.suffix != ".html":
        raise ValueError(f"--plot writes a page, .html, got {plot}.")
    found = noise_levels(plan)
    if plot:
        plot_epsilon(replace(plan, noise=found.whole_round), plot)
    if as_json:
        print_json(plan_as_json(plan, found))
    else:
        show_plan(plan, found)
        typer.echo(f"Wrote {plot}." if plot else "", nl=bool(plot))


@dataclass(frozen=True)
class PrivacyPlan:
    """The setting to account for, from the command line."""

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

    @property
    def event(self) -> Sampling:
        """How cohorts are drawn, for the accountant."""
        from fedtail.privacy.cohorts import decisive_share
        from fedtail.privacy.events import FixedSampling, NoSampling, PoissonSampling

        if self.sampling == "none" or self.cohort is None:
            return NoSampling()
        if self.sampling == "fixed":
            return FixedSampling(self.cohort, self.population)
        rate = self.cohort / self.population
        return PoissonSampling(rate, decisive_share(rate, self.population, 1 if self.minimum is None else self.minimum))


def _minimum(minimum: int | None, discrete: bool, sampling: str, population: int | None, cohort: int | None) -> int | None:
    """The smallest cohort that trains: where noise comes in shares, by default one that is rarely missed."""
    if minimum is not None or not discrete or sampling != "poisson" or not population or not cohort or cohort > population:
        return minimum
    from fedtail.privacy.cohorts import minimum_for

    return minimum_for(cohort / population, population)


def _given(named: dict[str, Any]) -> tuple[int, int, float]:
    """Population, rounds and delta; refused where one of the needed options is missing."""
    missing = [name for name, value in named.items() if value is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} must be given too.")
    return named["--population"], named["--rounds"], named["--delta"]


def check_plan(plan: PrivacyPlan, anyway: bool) -> None:
    """Refuse what has no answer before anything is computed."""
    from fedtail.privacy.calibration import check_population
    from fedtail.privacy.concentrated import check_delta

    for name, value, known in (("--sampling", plan.sampling, SAMPLINGS), ("--adjacency", plan.adjacency, ADJACENCIES),
                               ("--accountant", plan.accountant, (None, *ACCOUNTANTS))):
        if value not in known:
            raise ValueError(f"{name} must be {', '.join(filter(None, known[:-1]))} or {known[-1]}, got {value}.")
    if (plan.epsilon is None) == (plan.noise is None):
        raise ValueError("give either --epsilon, for the noise it takes, or --noise, for the epsilon it promises.")
    if plan.population < 1:
        raise ValueError(f"--population must be 1 or more, got {plan.population}.")
    if plan.cohort is not None and not 1 <= plan.cohort <= plan.population:
        raise ValueError(f"--cohort must be between 1 and the population of {plan.population}, got {plan.cohort}.")
    check_delta(plan.delta)
    if plan.minimum is not None and plan.sampling != "poisson":
        raise ValueError("--minimum is for Poisson sampling: other cohorts have a size that is known.")
    if not anyway:
        try:
            check_population(plan.population)
        except ValueError as reason:
            raise ValueError(f"{reason} Write --anyway to see the numbers.") from None


def noise_levels(plan: PrivacyPlan) -> NoiseLevels:
    """The noise multipliers of a plan, and the guarantee they give: from its epsilon, or from its noise."""
    from fedtail.privacy.calibration import levels, noise_for

    rest = (plan.delta, plan.rounds, plan.event, plan.quantile_ratio, plan.models, plan.adjacency,
            plan.accountant, plan.discrete)
    if plan.noise is not None:
        return levels(plan.noise, *rest)
    assert plan.epsilon is not None
    return noise_for(plan.epsilon, *rest)


def plan_as_json(plan: PrivacyPlan, found: NoiseLevels) -> dict[str, Any]:
    """One JSON object. With --epsilon that is what is promised; `epsilon_spent` may be a little less."""
    from fedtail.privacy.bill import sampling_rate
    from fedtail.privacy.calibration import doubts

    guarantee = found.guarantee
    second = guarantee.second_opinion
    return {
        "noise_multiplier": found.whole_round, "quantile_noise_multiplier": found.quantile,
        "update_noise_multiplier": found.update, "epsilon": plan.epsilon or guarantee.epsilon, "delta": guarantee.delta,
        "accountant": guarantee.accountant, "sampling": plan.sampling, "adjacency": guarantee.adjacency,
        "epsilon_spent": guarantee.epsilon,
        "second_opinion": {"accountant": second[0], "epsilon": second[1]} if second else None,
        "epsilon_against_server": guarantee.against_server, "epsilon_one_participation": guarantee.one_participation,
        "population": plan.population, "cohort": plan.cohort, "rounds": plan.rounds, "models": plan.models,
        "quantile_ratio": plan.quantile_ratio or None, "rate": sampling_rate(plan.event), "minimum": plan.minimum,
        "notes": list(guarantee.notes), "warnings": doubts(plan.population, plan.event, plan.delta)}


def show_plan(plan: PrivacyPlan, found: NoiseLevels) -> None:
    """Print the noise and epsilon of a plan, epsilon against rounds, and warnings."""
    from fedtail.cli.terminal import show_table
    from fedtail.privacy.calibration import doubts

    drawn = "all clients in every round" if plan.sampling == "none" else \
        f"cohorts of {plan.cohort} by {plan.sampling} sampling"
    title = f"{plan.rounds} rounds, {plan.population} clients, {drawn}, {plan.adjacency}, delta {plan.delta:g}"
    show_table(title, ["what", "value"], [[name, value] for name, value in plan_lines(plan, found)])
    shown = sorted({max(1, round(share * plan.rounds)) for share in SHARES})
    rows = [[str(count), _number(guarantee.epsilon), _number(guarantee.against_server)]
            for count, guarantee in zip(shown, at_rounds(replace(plan, noise=found.whole_round), shown), strict=True)]
    show_table("Epsilon against rounds, at this noise", ["rounds", "epsilon", "without amplification"], rows)
    for note in (*found.guarantee.notes, *doubts(plan.population, plan.event, plan.delta)):
        typer.echo(f"warning: {note}", err=True)


def plan_lines(plan: PrivacyPlan, found: NoiseLevels) -> list[tuple[str, str]]:
    """The table of an answer."""
    guarantee = found.guarantee
    second = guarantee.second_opinion
    quantile = [("noise multiplier of each histogram", _upwards(found.quantile))] if found.quantile else []
    return [
        ("noise multiplier of a whole round", _upwards(found.whole_round)), *quantile,
        ("noise multiplier of each update", _upwards(found.update)),
        (f"epsilon, by {guarantee.accountant}", _number(guarantee.epsilon)),
        *([(f"second opinion, by {second[0]}", _number(second[1]))] if second else []),
        ("without amplification, a client sampled once", _number(guarantee.one_participation)),
        ("without amplification, a client sampled every round", _number(guarantee.against_server)),
        *_skipping(plan)]


def _skipping(plan: PrivacyPlan) -> list[tuple[str, str]]:
    """Lines about rounds that are skipped because too few clients were sampled."""
    from fedtail.privacy.cohorts import minimum_for, skip_probability

    if plan.sampling != "poisson" or plan.cohort is None:
        return []
    rate = plan.cohort / plan.population
    if plan.minimum is not None:
        return [(f"rounds of fewer than {plan.minimum} are skipped, with probability",
                 f"{skip_probability(rate, plan.population, plan.minimum):.2g}")]
    try:
        return [("largest minimum missed less than once in 100000 rounds", str(minimum_for(rate, plan.population)))]
    except ValueError:
        return []


def at_rounds(plan: PrivacyPlan, counts: list[int]) -> list[Guarantee]:
    """What the noise of a plan promises after so many rounds."""
    return [noise_levels(replace(plan, rounds=count)).guarantee for count in counts]


def plot_epsilon(plan: PrivacyPlan, file: Path) -> None:
    """A page with epsilon against rounds; plotly's script is in it."""
    from plotly import graph_objects

    counts = sorted({max(1, round(plan.rounds * point / POINTS)) for point in range(1, POINTS + 1)})
    guarantee = at_rounds(plan, counts)
    figure = graph_objects.Figure(layout={
        "template": "simple_white", "xaxis_title": "rounds", "yaxis_title": f"epsilon at delta {plan.delta:g}",
        "yaxis_rangemode": "tozero",
        "title": f"{plan.population} clients, {plan.sampling} sampling, noise multiplier {plan.noise:.4g}"})
    figure.add_scatter(x=counts, y=[one.epsilon for one in guarantee], name=guarantee[0].accountant, mode="lines")
    if all(one.second_opinion for one in guarantee):
        seconds = [one.second_opinion for one in guarantee if one.second_opinion]
        figure.add_scatter(x=counts, y=[epsilon for _, epsilon in seconds], name=seconds[0][0], mode="lines", line_dash="dot")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.write_html(str(file), include_plotlyjs=True)


def _number(value: float) -> str:
    """An epsilon for a table."""
    return "infinite" if math.isinf(value) else f"{value:.3f}" if value < 100 else f"{value:.0f}"


def _upwards(noise: float) -> str:
    """Four decimals, never less noise than was found."""
    return f"{math.ceil(noise * 1e4 - 1e-6) / 1e4:.4f}"
