"""GRUs as the CPU computes them, as separate ops, which a plan can keep or recompute one by one.

The CPU's kernel changes gates in place, in rows of a wider tensor. Traced, they would lie densely; but a vectorized sigmoid
rounds the last few numbers of a row in another way, so that other numbers would be rounded so. Here the gates are read where
they lie in eager.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def _cell(of_input: Tensor, of_state: Tensor, state: Tensor) -> Tensor:
    """The next state.

    Args:
        of_input, of_state: linear maps of the input and of `state`: reset, update and new gate side by side.
    """
    width = state.shape[-1]
    (input_gates, input_new), (state_gates, state_new) = (t.split([2 * width, width], -1) for t in (of_input, of_state))
    reset, update = (gate.sigmoid() for gate in (state_gates + input_gates).chunk(2, -1))
    new = (input_new + state_new * reset).tanh()
    return (state - new) * update + new


def gru_cell(
    x: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    return _cell(F.linear(x, w_ih, b_ih), F.linear(hx, w_hh, b_hh), hx)


def gru(
    x: Tensor,
    hx: Tensor,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    rest, states = iter(params), iter(hx.unbind(0))
    sequence = x.transpose(0, 1) if batch_first else x
    ends: list[Tensor] = []
    for layer in range(num_layers):
        directions: list[Tensor] = []
        for backwards in (False, True) if bidirectional else (False,):
            w_ih, w_hh = next(rest), next(rest)
            b_ih, b_hh = (next(rest), next(rest)) if has_biases else (None, None)
            state, outputs = next(states), []
            steps = F.linear(sequence, w_ih, b_ih).unbind(0)
            for step in reversed(steps) if backwards else steps:
                state = _cell(step, F.linear(state, w_hh, b_hh), state)
                outputs.append(state)
            ends.append(state)
            directions.append(torch.stack(outputs[::-1] if backwards else outputs))
        sequence = torch.cat(directions, -1) if bidirectional else directions[0]
        if train and dropout and layer + 1 < num_layers:
            sequence = torch.dropout(sequence, dropout, True)
    return sequence.transpose(0, 1) if batch_first else sequence, torch.stack(ends)
