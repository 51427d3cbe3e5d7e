"""Every method behind one contract; a new one is one file and one line in `registry.py`.

The package is also what `gcsolve.solvers()` calls: the names that `solver=` accepts.
"""

from __future__ import annotations

import sys
from types import ModuleType


class _Solvers(ModuleType):
    def __call__(self) -> tuple[str, ...]:
        from gcsolve.solvers.registry import solvers

        return solvers()


sys.modules[__name__].__class__ = _Solvers
