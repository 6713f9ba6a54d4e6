"""Run every attack, or those named, and print what each found: `make attacks`, or `python tests/attacks/run.py ledger_deleted`.

An attack is a file of its own, tests/attacks/attack_NAME.py. Its docstring says what is claimed, who attacks and how; its
function `attack()` tries it on the code that users run, and returns an `Outcome`. Exit status 1 where a claim did not hold.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]


def main(names: list[str]) -> int:
    """Run the attacks; the number of those against which a claim did not hold."""
    there = sorted(path.stem.removeprefix("attack_") for path in HERE.glob("attack_*.py"))
    unknown = [name for name in names if name not in there]
    if unknown:
        print(f"there is no attack {unknown[0]!r}. There are {', '.join(there)}.", file=sys.stderr)
        return 2
    width, failed = max(map(len, there), default=0), 0
    for name in names or there:
        began = time.perf_counter()
        outcome = importlib.import_module(f"attack_{name}").attack()
        failed += not outcome.held
        print(f"{'held' if outcome.held else 'DID NOT HOLD':<12}  {name:<{width}}  {outcome.measured}  ({time.perf_counter() - began:.1f} s)",
              flush=True)
    print(f"{len(names or there)} attacks, {failed} succeeded")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
