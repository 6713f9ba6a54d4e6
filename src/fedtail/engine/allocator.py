"""Memory that a step frees stays with the process for the next one.

The C library (glibc) gives free memory at the end of its heap back to the system, and asks for it again in the next step: every
page of it is then cleared and mapped once more, up to a fifth of the time of a round with images or sequences.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import cache

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3      # names of glibc's mallopt
KEPT_FREE = 2**28                            # bytes at the end of the heap that are not given back
FROM_HEAP = 2**25                            # bytes up to which a tensor lies in the heap: what glibc would come to by itself
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")


@cache
def keep_freed_memory() -> bool:
    """Let this process, and those that it forks from now on, keep up to 256 MiB of freed memory; whether that was done.

    Not where the C library is another than glibc, or its allocator is set by the environment. Later calls do nothing.
    """
    if any(name in os.environ for name in SETTINGS):
        return False
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        if not hasattr(library, "gnu_get_libc_version"):     # another C library may give these numbers another meaning
            return False
        return bool(library.mallopt(MMAP_THRESHOLD, FROM_HEAP)) and bool(library.mallopt(TRIM_THRESHOLD, KEPT_FREE))
    return False
