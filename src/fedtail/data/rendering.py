"""A description of a population, for the terminal."""

from __future__ import annotations

from typing import Any

_BAR = 40        # characters of the longest bar


def render(description: dict[str, Any]) -> Any:
    """What `describe` found as something a `rich` console prints: facts, a histogram of sizes, warnings, a suggestion."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    for title, value in _facts(description):
        facts.add_row(title, Text(value))
    sizes = Table.grid(padding=(0, 2))
    sizes.add_column(justify="right")
    sizes.add_column(style="cyan", no_wrap=True)
    sizes.add_column(justify="right")
    for span, bar, clients in _bars(description["sizes"]["histogram"]):
        sizes.add_row(span, bar, clients)
    heading = [Text(description["name"], style="bold underline")] if description["name"] else []
    warnings = [Text(f"! {warning}", style="yellow") for warning in description["warnings"]]
    return Group(*heading, facts, Text("\nexamples per client, and how many clients hold that many", style="bold"), sizes,
                 *([Text()] if warnings else []), *warnings)


def _facts(about: dict[str, Any]) -> list[tuple[str, str]]:
    sizes, largest = about["sizes"], about["largest"]
    rows = [
        ("clients", f"{about['clients']:,}"),
        ("examples", f"{about['examples']:,}"),
        ("per client", f"{sizes['min']:,} to {sizes['max']:,}, mean {sizes['mean']:,.1f}, median {sizes['median']:,g}, "
                       f"10th and 90th percentile {sizes['p10']:,g} and {sizes['p90']:,g}"),
        ("largest client", f"{largest['name']} with {largest['share']:.2%} of the examples"),
        *((f"input {name}", _input(part)) for name, part in about["inputs"].items()),
        ("targets", _targets(about["targets"])),
        ("clients differ", _difference(about["difference"])),
    ]
    if about["groups"] is not None:
        rows.append(("groups", f"{len(about['groups'])}, of {_few(about['groups'])} clients"))
    return [*rows, ("start from", _call(about["suggested"]))]


def _input(part: dict[str, Any]) -> str:
    shape = " x ".join(map(str, part["shape"])) or "one number"
    return f"{shape}, {part['dtype']}, from {part['min']:g} to {part['max']:g}"


def _targets(targets: dict[str, Any]) -> str:
    if targets["kind"] == "numbers":
        each = "numbers" if targets["outputs"] == 1 else f"{targets['outputs']} numbers for each example"
        return f"{each}, mean {targets['mean']:g}, deviation {targets['std']:g}, from {targets['min']:g} to {targets['max']:g}"
    what = f"{targets['count']:,} classes" if targets["kind"] == "classes" else (
        f"sequences of {targets['length']['mean']:.1f} positions on average, {targets['count']:,} classes")
    counts = f", {_few(list(targets['counts'].values()))} of each" if "counts" in targets else ""
    return f"{what} ({targets['min']} to {targets['max']}){counts}"


def _difference(difference: dict[str, Any]) -> str:
    if "total_variation" in difference:
        distance, shuffled, single = (difference[name] for name in ("total_variation", "if_shuffled", "single_label"))
        return (f"labels are {distance:.3f} from everybody's in total variation ({shuffled:.3f} if they were shuffled); "
                f"{single:.1%} of clients have one label")
    between, correlation = difference["variance_between"], difference["intraclass_correlation"]
    if between is None:
        return "all targets are equal"
    estimate = "" if correlation is None else f" (intraclass correlation {correlation:.3f})"
    return f"{between:.1%} of the variance of targets lies between clients{estimate}"


def _call(suggested: dict[str, Any] | None) -> str:
    if suggested is None:
        return "a module of your own: no linear model or image model of fedtail fits these inputs and targets"
    settings = ", ".join(f"{name}={value}" for name, value in suggested.items() if name != "part")
    return f"{suggested['part']}({settings})"


def _few(counts: list[int]) -> str:
    return ", ".join(f"{count:,}" for count in counts) if len(counts) <= 5 else f"{min(counts):,} to {max(counts):,}"


def _bars(histogram: list[dict[str, int]]) -> list[tuple[str, str, str]]:
    """A line for each bin; a bin with anybody in it has a bar."""
    most = max(part["clients"] for part in histogram)
    spans = [f"{part['from']:,}" if part["from"] == part["to"] else f"{part['from']:,}-{part['to']:,}" for part in histogram]
    return [(span, "█" * -(-_BAR * part["clients"] // most), f"{part['clients']:,}")
            for span, part in zip(spans, histogram, strict=True)]
