"""Memory that a step frees stays with the process: a round asks the system for next to no pages anew."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator only")

FAULTS = """
import resource
import torch
from fedtail.engine.allocator import SETTINGS, keep_freed_memory
from fedtail.engine.threads import use_one_thread

{start}
def step():
    parts = [torch.ones(2**20) for _ in range(8)]      # 4 MiB each, freed together
    del parts

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, keep_freed_memory())
"""


def faults_of_steps(start: str, **environment: str) -> list[str]:
    """Page faults of four steps in a process of its own that begins with `start`, and whether it keeps freed memory."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    code = FAULTS.format(start=start)
    return subprocess.run([sys.executable, "-c", code], env={**clean, **environment}, capture_output=True, text=True, check=True).stdout.split()


def test_steps_on_one_thread_fault_no_pages_in_again():
    faults, keeps = faults_of_steps("restore = use_one_thread(1)")
    assert keeps == "True"
    assert int(faults) < 200                         # of the 32,768 that a process asks for without


def test_an_allocator_that_is_set_from_outside_stays_as_it_is():
    faults, keeps = faults_of_steps("restore = use_one_thread(1)", MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072")
    assert keeps == "False"
    assert int(faults) > 10_000
