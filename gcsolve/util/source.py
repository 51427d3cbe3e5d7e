"""Lines of the user's source: which file is theirs, how it is shown, where an error or a running call is in it."""

from __future__ import annotations

import random
import traceback
from pathlib import Path
from typing import Any

import torch


def user_line(error: BaseException) -> str:
    """ "file:line" of the deepest frame that belongs neither to torch nor to gcsolve nor to the standard library; that of
    torch's own modules and functions, where only these are run."""
    frames: list[traceback.FrameSummary] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        frames += reversed(traceback.extract_tb(current.__traceback__))
        current = current.__cause__ or current.__context__
    for is_meant in (is_user_file, _is_module_of_torch):
        for frame in frames:
            if is_meant(frame.filename):
                return f"{shown_path(frame.filename)}:{frame.lineno}"
    return ""


def running_line() -> str:
    """ "file:line" of the user's innermost line that is running now."""
    for frame in reversed(traceback.extract_stack()):
        if is_user_file(frame.filename):
            return f"{shown_path(frame.filename)}:{frame.lineno}"
    return ""


_TORCH = str(Path(str(torch.__file__)).parent)
PACKAGE = str(Path(__file__).parents[1])
_STDLIB = str(Path(str(random.__file__)).parent)


def shown_path(filename: str) -> str:
    """A source file as people know it: below site-packages, below the working directory, or in full."""
    _, found, installed = filename.rpartition("site-packages/")
    if found:
        return installed
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename


def is_user_file(filename: str) -> bool:
    """Whether a source line there is the user's (or a model zoo's), not torch's, gcsolve's or Python's."""
    if filename.startswith((_TORCH, PACKAGE, "<")):
        return False
    return not filename.startswith(_STDLIB) or "site-packages" in filename


def _is_module_of_torch(filename: str) -> bool:
    """Whether a line there is of what torch offers to models, `nn.Module.__call__` and the like aside."""
    offered = (f"{_TORCH}/nn/", f"{_TORCH}/functional.py", f"{_TORCH}/distributions/")
    return filename.startswith(offered) and not filename.endswith("modules/module.py")


def code_name(code: Any) -> str:
    """Name of a function, and where the user wrote it."""
    made = getattr(code, "__func__", getattr(code, "func", code))
    name = getattr(made, "__qualname__", type(made).__name__)
    where = getattr(made, "__code__", None)
    return f"{name} ({shown_path(where.co_filename)}:{where.co_firstlineno})" if where else name
