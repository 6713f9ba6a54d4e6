"""What the pages of chapter 5 say of their runs: how often devices took part, and how attacks and rules differ from [Li23]."""

from __future__ import annotations

import statistics

from fedtail_studies.ditto.attacked import PARTICIPATION
from fedtail_studies.results import Results


def participation_note(results: Results) -> str:
    """How often devices took part, over all seeds."""
    median, fewest, most, never = (results.values(PARTICIPATION, key) for key in ("median", "min", "max", "never"))
    absent = f"; {max(never):.0f} devices of a seed never did" if any(never) else ""
    return (f"A device took part in {statistics.fmean(median):.0f} rounds in the median, in {min(fewest):.0f} to "
            f"{max(most):.0f}{absent}.")


def common_notes(results: Results) -> list[str]:
    """What holds for every data set: how runs differ from the thesis."""
    plan = results.plan
    direction = (f" FedMGDA+ has epsilon 0.1 and server steps of length {plan['direction_step']:g}, of 0.3, 1 and 3 the best "
                 "without attacks on a seed that is not shown.") if "FedMGDA+" in plan["rules"] else ""
    return [
        participation_note(results),
        f"{plan['rounds']} rounds of {plan['cohort']} devices drawn uniformly, {plan['local_steps']} batches of {plan['batch']} "
        f"with step {plan['learning_rate']:g} as printed, for shared and personal models alike; the thesis's programs draw "
        "devices by size. Samples are split 72/8/20 anew for every seed, and corrupted devices are drawn by it: with a higher "
        "share they are the same and more.",
        "A2 sends noise as large as the device's own update, A3 multiplies an update trained on poisoned labels by the cohort "
        "size, as the released programs do; the thesis states neither. All personal models of a column are trained beside one "
        "run of FedAvg; local models are lambda = 0.",
        "Dynamic lambda: a device takes, of its final models, that with the lowest validation loss; with fewer than four "
        "validation samples a fixed lambda. Best lambda: by validation accuracy of benign devices, which no server knows.",
        "Rules are told the share of corrupted devices. Krum and multi-Krum have no meaning for half and more: there they are "
        f"told {max(0, (plan['cohort'] - 3) // 2)} of {plan['cohort']}.{direction}",
        "The strongest robust rule is named by the same test accuracies with which Ditto is then compared: it is favoured.",
        "The claims and their rules were fixed before any result was seen.",
    ]
