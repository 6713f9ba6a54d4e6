"""`python -m fedtail.deployment.nvflare.process join|serve FOLDER`: the process of a node or of the server, which SIGTERM ends.

`fedtail deploy join` and `fedtail deploy serve` are these, with help and sentences for errors.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from pathlib import Path


def main(words: list[str]) -> None:
    """Run the process that the command line `words` asks for, until it has finished or is told to end."""
    parser = argparse.ArgumentParser(prog="fedtail deploy")
    parser.add_argument("what", choices=["join", "serve"])
    parser.add_argument("folder", type=Path)
    for name, kind in (("listen", str), ("port", int), ("method", str), ("out", str), ("seed", int), ("nodes", int),
                       ("wait", float), ("timeout", float), ("schedule", str), ("trust", str)):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--resume", action="store_true", default=None)
    given = vars(parser.parse_args(words))
    what, folder = given.pop("what"), given.pop("folder")
    (join if what == "join" else serve)(folder, **{name: value for name, value in given.items() if value is not None})


def join(folder: Path, address: str = "", file: str = "node.toml") -> None:
    """Run the node of `folder`, whose settings are in `file`, until SIGTERM or Ctrl-C; "" takes the `address` in server.toml."""
    from fedtail.deployment.nvflare.node import serve_node

    until = threading.Event()
    before = {one: signal.signal(one, lambda *_: until.set()) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        serve_node(folder, until, address, file)
    finally:                                     # where a node is refused, Ctrl-C is the caller's again
        for one, handler in before.items():
            signal.signal(one, handler)
    leave(0)


def serve(folder: Path, **settings: object) -> None:
    """Run the experiment of the server's `folder`; the settings replace those of run.toml. SIGTERM interrupts it.

    The process exits with code 1 where a model is of no use, such as after rounds that were all lost.
    """
    from fedtail.deployment.nvflare.server import run_server

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if run_server(folder, **settings):
        sys.exit(1)


def leave(code: int) -> None:
    """End this process now: threads of NVFlare that wait for a server that is not there would keep it for seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
