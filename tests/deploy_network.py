"""Networks of namespaces. Needs root, `ip` and `tc` (Debian's iproute2), and a kernel with network namespaces.

`a_cable`: a namespace for a node, whose only way to the server is a pair of virtual devices that can be cut, slowed and made to lose
packets. `several_machines`: a namespace for each machine, all on one switch, and none of them this machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path


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


class Switch:
    """Machines on one switch, which is in a namespace too: each has an address, and all know the first one as `host`."""

    def __init__(self, names, host):
        self.host, self.names = host, list(names)
        self.namespaces = {name: f"fedtail-{os.getpid()}-{name}" for name in ["switch", *names]}
        self.addresses = {name: f"10.215.0.{k}" for k, name in enumerate(names, 1)}

    def enter(self, name):
        """The words before a command on that machine."""
        return ["ip", "netns", "exec", self.namespaces[name]]

    def lay(self):
        switch = self.namespaces["switch"]
        for namespace in self.namespaces.values():
            run("ip", "netns", "add", namespace)
        run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "switch", "up")
        for k, name in enumerate(self.names):
            here = self.namespaces[name]
            run("ip", "-n", switch, "link", "add", f"port{k}", "type", "veth", "peer", "name", "cable", "netns", here)
            run("ip", "-n", switch, "link", "set", f"port{k}", "master", "switch", "up")
            run("ip", "-n", here, "address", "add", f"{self.addresses[name]}/24", "dev", "cable")
            for device in ("cable", "lo"):
                run("ip", "-n", here, "link", "set", device, "up")
            hosts = hosts_file(here)
            hosts.parent.mkdir(parents=True)      # `ip netns exec` shows it as /etc/hosts
            hosts.write_text(f"127.0.0.1 localhost\n{self.addresses[self.names[0]]} {self.host}\n")

    def remove(self):
        for namespace in self.namespaces.values():
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
            shutil.rmtree(hosts_file(namespace).parent, ignore_errors=True)
        with suppress(OSError):                   # namespaces of others have theirs there
            Path("/etc/netns").rmdir()

    def sockets(self, name):
        """Of TCP on that machine, the set of pairs (its own port, address at the other end); "" at the other end where it listens."""
        told = subprocess.run([*self.enter(name), "ss", "-Htan"], check=True, capture_output=True, text=True).stdout
        found = [(state, *(each.rpartition(":") for each in (ours, theirs)))
                 for state, _, _, ours, theirs, *_ in map(str.split, told.splitlines())]
        return {(int(ours[2]), "" if state == "LISTEN" else theirs[0].strip("[]").removeprefix("::ffff:")) for state, ours, theirs in found}


def hosts_file(namespace):
    return Path("/etc/netns", namespace, "hosts")


@contextmanager
def several_machines(names, host):
    one = Switch(names, host)
    try:
        one.lay()
        yield one
    finally:
        one.remove()
