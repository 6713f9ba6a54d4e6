"""A network of one cable: a namespace for a node, whose only way to the server is a pair of virtual devices that can be cut, slowed
and made to lose packets. Needs root, `ip` and `tc` (Debian's iproute2), and a kernel with network namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import contextmanager


def why_no_network():
    """A reason why there can be no namespaces here; "" where there can."""
    if not all(map(shutil.which, ("ip", "tc"))):
        return "ip and tc are missing: apt-get install iproute2"
    if os.geteuid():
        return "network namespaces need root"
    name = f"fedtail-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"no network namespaces: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


def run(*words):
    subprocess.run(words, check=True, capture_output=True)


class Cable:
    """`namespace` reaches this machine at the address `server`, and nothing else."""

    def __init__(self, number):
        number = (os.getpid() + number) % 16000
        self.namespace, self.ours, self.theirs = f"fedtail-{number}", f"fto{number}", f"ftt{number}"
        self.server, self.node = (f"10.{213 + number // 8000}.{number % 8000 // 32}.{number % 32 * 4 + k}" for k in (1, 2))

    def lay(self):
        run("ip", "netns", "add", self.namespace)
        run("ip", "link", "add", self.ours, "type", "veth", "peer", "name", self.theirs, "netns", self.namespace)
        run("ip", "address", "add", f"{self.server}/30", "dev", self.ours)
        run("ip", "link", "set", self.ours, "up")
        for words in (("address", "add", f"{self.node}/30", "dev", self.theirs), ("link", "set", self.theirs, "up"),
                      ("link", "set", "lo", "up")):
            run("ip", "netns", "exec", self.namespace, "ip", *words)

    def remove(self):
        subprocess.run(["ip", "netns", "del", self.namespace], capture_output=True)
        subprocess.run(["ip", "link", "del", self.ours], capture_output=True)

    def shape(self, *queue):
        """Send both directions through a queue, in the words of `tc`."""
        run("tc", "qdisc", "replace", "dev", self.ours, "root", *queue)
        run("ip", "netns", "exec", self.namespace, "tc", "qdisc", "replace", "dev", self.theirs, "root", *queue)

    def cut(self):
        """Every packet vanishes, without a word to either side: a bucket of ten bytes, which no packet fits into."""
        self.shape("tbf", "rate", "8bit", "burst", "10", "limit", "10")

    def slow(self):
        """200 kbit/s, and packets beyond a queue of 3000 bytes are lost."""
        self.shape("tbf", "rate", "200kbit", "burst", "1600", "limit", "3000")

    def delay(self):
        """A tenth of a second each way, give or take a fifth of it, and one packet in fifty is lost."""
        self.shape("netem", "delay", "100ms", "20ms", "loss", "2%")

    def mend(self):
        run("tc", "qdisc", "del", "dev", self.ours, "root")
        run("ip", "netns", "exec", self.namespace, "tc", "qdisc", "del", "dev", self.theirs, "root")

    def why_no_delay(self):
        """A reason why this kernel cannot delay packets; "" where it can."""
        tried = subprocess.run(["tc", "qdisc", "replace", "dev", self.ours, "root", "netem", "delay", "1ms"], capture_output=True,
                               text=True)
        return f"no netem in this kernel: {tried.stderr.strip()}" if tried.returncode else ""


@contextmanager
def a_cable(number=0):
    one = Cable(number)
    try:
        one.lay()
        yield one
    finally:
        one.remove()
