"""Settings around a call that decide how it computes: autocast, and the default dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

KINDS = ("cpu", "cuda", "mps")


@dataclass(frozen=True)
class Context:
    """`autocast`: (kind of device, whether it is on, dtype) for each of `KINDS`. `casts_once`: autocast keeps its cast of a
    weight until the end of its block."""

    default_dtype: torch.dtype
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    casts_once: bool

    @classmethod
    def here(cls) -> Context:
        """The context of the calling thread."""
        states = tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in KINDS)
        return cls(torch.get_default_dtype(), states, torch.is_autocast_cache_enabled())

    @property
    def regions(self) -> tuple[tuple[str, torch.dtype], ...]:
        """(kind of device, dtype) of the autocast that is on."""
        return tuple((kind, dtype) for kind, on, dtype in self.autocast if on)

    def outside_autocast(self) -> Context:
        return replace(self, autocast=tuple((kind, False, dtype) for kind, _, dtype in self.autocast))

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """This context in the block, whatever is around it. Autocast's casts of weights in the block end with it."""
        before = Context.here()
        torch.autocast_increment_nesting()  # so that a block of the model's own, inside this one, does not end the casts
        torch.clear_autocast_cache()
        self._set()
        try:
            yield
        finally:
            torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()
            before._set()

    def _set(self) -> None:
        for kind, on, dtype in self.autocast:
            torch.set_autocast_enabled(kind, on)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.casts_once)
        if torch.get_default_dtype() != self.default_dtype:  # set only where it differs: it is shared by all threads
            torch.set_default_dtype(self.default_dtype)
