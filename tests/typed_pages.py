"""Pages whose blocks say on which machine they are typed, by their first line; here each machine is a folder, and may be more.

    # on the server                                  and where else, in words: a block that is run in the machine's folder
    # on each node, in its folder                    at all nodes at once, in NAME/NAME, where the server's `scp` put it
    # on ..., in a terminal of its own               it stays until `end_all`, or until the end
    # on the server, when serve has returned         what stays there is waited for first, and must have succeeded
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import chdir, suppress
from pathlib import Path
from typing import NamedTuple

NODES = ("north", "south", "east")
HOST, PORT = "fl.example.org", "8443"       # of the server, on pages
LONGEST = 300.0                             # seconds of a block that does not stay
SCP = """#!/bin/sh
# scp -pr FOLDER NAME.example.org: to the folder of the machine NAME
test "$#" = 3 && test "$1" = -pr && exec cp -pr "$2" "$MACHINES/${3%%.example.org:}/"
echo "got: scp $*" >&2
exit 1
"""


class Block(NamedTuple):
    language: str
    text: str

    @property
    def place(self) -> str:
        """Where the block is typed, "the server" or "each node"; "" where it does not say so."""
        found = re.match(r"# on (the server|each node)\b.*\n", self.text)
        return found[1] if found else ""

    @property
    def stays(self) -> bool:
        return "in a terminal of its own" in self.text.partition("\n")[0]

    @property
    def waits(self) -> bool:
        return "when serve has returned" in self.text.partition("\n")[0]


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text(), flags=re.S | re.M)]


def file_name(block: Block) -> str | None:
    """The file that a block is, by its first line."""
    found = re.match(r"# (\S+\.toml)\n", block.text)
    return found[1] if found and block.language == "toml" else None


def shell_environment(home: Path, **more: str) -> dict[str, str]:
    """The environment of a reader's shell, in which `fedtail` and `python` are those of the tests."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HOME": str(home), "COLUMNS": "100", "OMP_NUM_THREADS": "1", **more}


class Machines:
    """The server, whose folder is `server`, and the nodes and others, each in a folder of `path`, which need not exist.

    `enter(name)` are the words before each command on that machine, "server" among the names; on one machine, with no such words,
    `host` and `port` are put in the place of those of the page.
    """

    def __init__(self, path, server, enter=lambda name: [], host=HOST, port=PORT):
        self.path, self.server, self.enter = path, server, enter
        self.host, self.port = host, str(port)
        self.staying: dict[str, subprocess.Popen] = {}
        self.tools = path / "tools"
        self.outputs: dict[int, Path] = {}      # of each process, by its number

    def __enter__(self):
        for folder in (self.tools, *(self.path / name for name in NODES)):
            folder.mkdir(parents=True)
        (self.tools / "scp").write_text(SCP)
        (self.tools / "scp").chmod(0o755)
        return self

    def __exit__(self, *reason):
        self.end_all()

    def end_all(self):
        """End what stays, as a service manager would, and whatever is left of it."""
        for process in self.staying.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        end = time.monotonic() + 20
        for process in self.staying.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, end - time.monotonic()))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.staying.clear()

    def folder(self, name):
        """Where commands are typed at a machine."""
        return self.server if name == "server" else self.path / name / name if name in NODES else self.path / name

    def printed(self, process):
        """What a process has printed."""
        return self.outputs[process.pid].read_text(errors="replace")

    def begin(self, name, text, language="bash"):
        """Start a block at a machine, in a group of processes of its own."""
        text = text.replace(HOST, self.host).replace(PORT, self.port)
        words = [sys.executable, "-c", text] if language == "python" else ["bash", "-c", f"set -euo pipefail\n{text}"]
        home = shell_environment(self.folder(name), MACHINES=str(self.path))
        home["PATH"] = f"{self.tools}:{home['PATH']}"
        printed = self.tools / f"{name}-{len(self.outputs)}.txt"
        with printed.open("w") as out:
            process = subprocess.Popen([*self.enter(name), *words], cwd=self.folder(name), env=home, stdout=out, stderr=subprocess.STDOUT,
                                       start_new_session=True)
        self.outputs[process.pid] = printed
        return process

    def end(self, name, process, text="", codes=(0,)):
        """Wait for a block that was started at a machine; returns its code, which must be one of `codes`."""
        try:
            code = process.wait(LONGEST)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert code in codes, f"at {name}, code {code}: {text}\n{self.printed(process)[-6000:]}"
        return code

    def type(self, block):
        """Do what a block says, at the machines that it says."""
        names = NODES if block.place == "each node" else ("server",)
        if block.waits:
            self.wait_for_server()
        if block.language == "python" and not any(map(self.enter, names)):
            for name in names:                    # in this process, which has torch already
                with chdir(self.folder(name)):
                    exec(compile(block.text, name, "exec", dont_inherit=True), {"__name__": "example"})
            return
        started = {name: self.begin(name, block.text, block.language) for name in names}
        if block.stays:
            self.staying.update(started)
            return
        try:
            for name, process in started.items():
                self.end(name, process, block.text)
        except BaseException:
            self.staying.update(started)      # so that they are ended
            raise

    def wait_for_server(self):
        """Wait until what stays on the server has returned."""
        self.end("server", self.staying.pop("server"), "fedtail deploy serve")
