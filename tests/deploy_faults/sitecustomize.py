"""Puts faults into the processes of a deployment, which Python reads when they start; others are left alone.

FEDTAIL_NETNS names a network namespace that a node's processes enter. FEDTAIL_FAULT is what a node does: garbage, late (by
FEDTAIL_LATE seconds, 45 unless it says so), lying, or killed; at every message, or with FEDTAIL_AT only at the rows it names by
their number in the node's life, counted in the file FEDTAIL_COUNT. FEDTAIL_STAGE is when the server is killed, once, which the file
FEDTAIL_ONCE remembers: before:N or after:N its N-th exchange, or saved:N, after its N-th checkpoint.
"""

import os
import sys

WORDS = " ".join(sys.orig_argv)
NODES = ("flwr-clientapp", "fedtail.deployment.nvflare.process join")
SERVERS = ("flwr-serverapp", "fedtail.deployment.nvflare.process serve")
FLOWER_NODE = "fedtail.deployment.flower.process join"
ALL_OF_A_NODE = (*NODES, FLOWER_NODE, "flower-supernode")


def enter_namespace(name):
    """Everything that this process connects and listens to is in the network namespace from here on."""
    import ctypes

    with open(f"/run/netns/{name}") as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), 0x40000000):
            raise OSError(ctypes.get_errno(), f"the namespace {name} could not be entered")


def die():
    """Kill this process by SIGKILL, as a crash would, after those that started it; of a node over Flower its SuperNode too."""
    import signal
    from glob import glob

    def parent(pid):
        with open(f"/proc/{pid}/stat") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])

    def words(pid):
        with open(f"/proc/{pid}/cmdline", "rb") as line:
            return line.read().replace(b"\0", b" ")

    def children(pid):
        for place in glob("/proc/[0-9]*"):
            try:
                if parent(one := int(os.path.basename(place))) == pid and one != os.getpid():
                    yield one
            except OSError:
                continue

    chain, pid = [], parent(os.getpid())
    while pid > 1 and any(name in words(pid) for name in (b"flwr-", b"flower-", FLOWER_NODE.encode())):
        chain.append(pid)
        pid = parent(pid)
    beside = list(children(chain[-1])) if chain and FLOWER_NODE.encode() in words(chain[-1]) else []
    for one in [*beside, *reversed(chain), os.getpid()]:
        os.kill(one, signal.SIGKILL)


def next_number():
    """How many rows this node was asked for before this one, whatever processes it had."""
    with open(os.environ["FEDTAIL_COUNT"], "ab") as count:
        count.write(b".")
        return count.tell() - 1


def spoil_every_message(fault):
    from fedtail.deployment.site import Site

    handle = Site.handle

    def faulty(site, content, *more, **named):
        if fault == "garbage":
            return b"rubbish"
        linger()
        return handle(site, content, *more, **named)

    Site.handle = faulty


def spoil_rows(fault, numbers):
    """`lying` sends three times the node's row: well formed, and wrong. The others are as their names say."""
    from fedtail.deployment.site import Site

    row = Site._integer_row

    def faulty(site, message, ask, attempt):
        hit = next_number() in numbers
        if hit and fault == "killed":
            die()
        if hit and fault == "late":
            linger()
        found, context = row(site, message, ask, attempt)
        return (found * 3 % (1 << ask.modulus_bits) if hit and fault == "lying" else found), context

    Site._integer_row = faulty


def linger():
    import time

    time.sleep(float(os.environ.get("FEDTAIL_LATE", "45")))


def die_once():
    try:
        os.close(os.open(os.environ["FEDTAIL_ONCE"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    die()


def kill_at(stage, number):
    from fedtail.deployment.remote import RemoteFleet
    from fedtail.runs.checkpoint import Checkpoints

    made, save, exchanges, saves = RemoteFleet.__init__, Checkpoints.save, [0], [0]

    def begin(fleet, exchange, *more, **named):
        def counted(messages):
            exchanges[0] += 1
            if (stage, exchanges[0]) == ("before", number):
                die_once()
            replies = exchange(messages)
            if (stage, exchanges[0]) == ("after", number):
                die_once()
            return replies
        made(fleet, counted, *more, **named)

    def saved(checkpoints, *more, **named):
        save(checkpoints, *more, **named)
        saves[0] += 1
        if (stage, saves[0]) == ("saved", number):
            die_once()

    RemoteFleet.__init__, Checkpoints.save = begin, saved


def sleep_by_select():
    """libfaketime takes the absolute time of a monotonic clock for one of the wall's: sleeping fails with "Invalid argument"."""
    import select
    import time

    def sleep(seconds):
        select.select([], [], [], seconds)

    time.sleep = sleep


if os.environ.get("FAKETIME"):
    sleep_by_select()
if os.environ.get("FEDTAIL_NETNS") and any(name in WORDS for name in ALL_OF_A_NODE):
    enter_namespace(os.environ["FEDTAIL_NETNS"])
if os.environ.get("FEDTAIL_FAULT") and any(name in WORDS for name in NODES):
    if os.environ.get("FEDTAIL_AT"):
        spoil_rows(os.environ["FEDTAIL_FAULT"], set(map(int, os.environ["FEDTAIL_AT"].split(","))))
    else:
        spoil_every_message(os.environ["FEDTAIL_FAULT"])
if os.environ.get("FEDTAIL_STAGE") and any(name in WORDS for name in SERVERS):
    when, _, which = os.environ["FEDTAIL_STAGE"].partition(":")
    kill_at(when, int(which))
