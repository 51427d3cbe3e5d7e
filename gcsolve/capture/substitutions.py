"""Every function or op that is traced as another one, or refused by name: `SUBSTITUTIONS` is the only table of them.

A trace should have the ops that eager runs, and only ops that a plan can run again. Where torch's own way to a trace gives
others, the row names what is traced instead. To add one, write the function in `replacements/` and a row here.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from gcsolve._torch import PACK_PADDED_SEQUENCE
from gcsolve.capture.replacements import attention, bilinear, dropout, recurrent, refused, value_checks

aten = torch.ops.aten


class When(enum.Enum):
    """Where in a trace a function is replaced, and what the replacement is called with."""

    CALLED = "a torch function, where the user's code calls it; with the call's arguments"
    CALLED_FOR_DEVICE = (
        "the same, in a trace for a device that is not here; with the `TargetKernels` before the arguments"
    )
    DISPATCHED = "an op, where autograd would see it, in a trace for the CPU; with the op's arguments"
    DECOMPOSED = "an op of the joint graph, in a trace for the CPU; with its arguments; it may return NotImplemented"


@dataclass(frozen=True)
class Substitution:
    """One row: the torch function or op that is replaced (None where this torch has none), what is traced instead, when,
    and why."""

    target: Any
    replacement: Callable[..., Any]
    when: When
    reason: str


def substitutes(when: When) -> Mapping[Any, Callable[..., Any]]:
    """Target → replacement, of the rows for that moment whose target this torch has."""
    return {row.target: row.replacement for row in SUBSTITUTIONS if row.when is when and row.target is not None}


_LENGTHS = "Shapes follow from the values of the lengths, which a trace does not have."
_LOOKS = "It looks at values only to raise an error; its ops are those that torch composes it of, without the look."

SUBSTITUTIONS: tuple[Substitution, ...] = (
    Substitution(torch.istft, value_checks.istft, When.CALLED, _LOOKS),
    Substitution(torch.Tensor.istft, value_checks.istft, When.CALLED, _LOOKS),
    Substitution(F.gaussian_nll_loss, value_checks.gaussian_nll_loss, When.CALLED, _LOOKS),
    Substitution(F.ctc_loss, refused.ctc_loss, When.CALLED, _LENGTHS),
    Substitution(torch.ctc_loss, refused.ctc_loss, When.CALLED, _LENGTHS),
    Substitution(PACK_PADDED_SEQUENCE, refused.packed_sequence, When.CALLED, _LENGTHS),
    Substitution(
        getattr(torch.linalg, "polar", None),  # since torch 2.14
        refused.polar,
        When.CALLED,
        "Its kernel casts inside under autocast, where a trace does not see it.",
    ),
    Substitution(
        F.scaled_dot_product_attention,
        attention.attention,
        When.CALLED_FOR_DEVICE,
        "A GPU runs attention as a kernel that the CPU does not have, and which saves other things for backward.",
    ),
    Substitution(
        aten.gru.input,
        recurrent.gru,
        When.DISPATCHED,
        "The CPU's kernel changes gates in place, in rows of a wider tensor; traced, they would lie densely, and round "
        "otherwise.",
    ),
    Substitution(aten.gru_cell.default, recurrent.gru_cell, When.DISPATCHED, "As the GRU, of one step."),
    Substitution(
        aten.bilinear.default,
        bilinear.bilinear,
        When.DISPATCHED,
        "Autocast casts inside its kernel, and a plan runs without autocast.",
    ),
    Substitution(
        aten.native_dropout.default,
        dropout.native_dropout,
        When.DECOMPOSED,
        "Eager's CPU dropout divides a mask by 1-p; the fused op multiplies by 1/(1-p), for some p another number.",
    ),
    Substitution(
        aten.native_dropout_backward.default,
        dropout.native_dropout_backward,
        When.DECOMPOSED,
        "The same of its gradient; and in half precision the fused op does not round the scale, as eager does.",
    ),
)
