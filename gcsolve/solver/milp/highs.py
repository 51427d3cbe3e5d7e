"""Keep the stray debugging line that HiGHS 1.x prints (`HighsMipSolverData::...`) off the user's stdout."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator

STRAY = b"HighsMipSolverData::"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back what is written to file descriptor 1, drop HiGHS's stray lines, then write the rest.

    HiGHS prints from C with no switch to stop it. Where descriptor 1 or the C library cannot be had, nothing is held
    back.
    """
    try:
        flush = ctypes.CDLL(None).fflush
        if sys.stdout is not None:
            sys.stdout.flush()
        flush(None)
        real = os.dup(1)
    except (OSError, TypeError, AttributeError, ValueError):
        yield
        return
    with tempfile.TemporaryFile() as held:
        try:
            os.dup2(held.fileno(), 1)
            yield
        finally:
            flush(None)
            os.dup2(real, 1)
            os.close(real)
            held.seek(0)
            rest = b"".join(line for line in held if not line.startswith(STRAY))
            while rest:
                rest = rest[os.write(1, rest) :]
