"""`gcsolve demo`: a GPT of GPT-2-small's shape in plain torch, trained under four plans; nothing is downloaded."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Pre-norm attention and MLP with dropout, as in GPT-2."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_dropout = dropout
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm_attention(x)).view(split).permute(2, 0, 3, 1, 4)
        drop = self.attention_dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True)
        x = x + self.dropout(self.project(mixed.transpose(1, 2).reshape(batch, length, width)))
        hidden = F.gelu(self.up(self.norm_mlp(x)), approximate="tanh")
        return x + self.dropout(self.down(hidden))


class GPT(nn.Module):
    """Next-token loss of a GPT; the output layer shares the embedding's weight.

    Called with tokens of shape (batch, length); returns the mean cross-entropy of each token given those before it.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 8192,
        length: int = 1024,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x[:, :-1]))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def gpt2_small(batch: int = 1, length: int = 768, vocabulary: int = 8192, seed: int = 0) -> tuple[GPT, Tensor]:
    """(model, tokens): GPT-2-small's 12 layers of width 768 with dropout, random weights and tokens.

    The vocabulary is 8192 instead of 50257: with batches small enough for a CPU, the logits of the full one would take most
    of the memory, and the demo is about the layers. Usable as `gcsolve plan gcsolve.demo:gpt2_small --budget 0.5`.
    """
    torch.manual_seed(seed)
    model = GPT(vocabulary=vocabulary)
    return model, torch.randint(0, vocabulary, (batch, length))


def gpt_medium(batch: int, seq: int = 1024) -> tuple[GPT, Tensor]:
    """(model, tokens): a GPT of GPT-2 medium's shape in bfloat16, for `gcsolve fit gcsolve.demo:gpt_medium`."""
    model = GPT(vocabulary=50257, length=seq, layers=24, width=1024, heads=16).bfloat16()
    return model, torch.randint(0, 50257, (batch, seq))


# --- the demo itself -------------------------------------------------------------------------------------------------

RULES = ("store_all", "uniform_sqrt", "blocks", "auto")
"""The solvers whose plans are trained."""


class Training:
    """SGD on a copy of `module`, measured.

    Attributes:
        losses: of each step.
        seconds: of each step's forward and backward.
        peak_bytes: of the first step, with what is alive during the whole step.
    """

    def __init__(self, module: nn.Module, tokens: Tensor, seed: int = 0) -> None:
        self.module, self.tokens = copy.deepcopy(module), tokens
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        torch.manual_seed(seed)
        self.generator_state = torch.get_rng_state()
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.peak_bytes = 0

    def step(self) -> list[Tensor]:
        """Run one step; returns its gradients."""
        from gcsolve.ops.peak_meter import PeakMeter

        torch.set_rng_state(self.generator_state)
        with PeakMeter() as meter:
            started = time.perf_counter()
            loss = self.module(self.tokens)
            loss.backward()
            self.seconds.append(time.perf_counter() - started)
        self.generator_state = torch.get_rng_state()
        self.losses.append(loss.item())
        if len(self.losses) == 1:
            external_bytes = sum(t.nbytes for t in [*self.module.parameters(), *self.module.buffers(), self.tokens])
            self.peak_bytes = external_bytes + meter.peak_bytes
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return gradients


def run(budget: str | float = 0.5, *, steps: int = 2, layers: int = 12) -> None:
    """Train under each plan, and print a table: the untouched model, store-all, two rules of thumb and the solved plan.

    Args:
        budget: fraction of the store-all peak, or a size; the rules may miss it.
        steps: training steps of each, in turn; the table has the time of the fastest.
        layers: number of layers of the GPT.
    """
    from rich.console import Console

    import gcsolve
    from gcsolve.util.checks import whole
    from gcsolve.util.sizes import check_budget, size_text

    check_budget(None, budget)
    steps = whole("steps", steps, least=1)
    console = Console(width=None if sys.stdout.isatty() else 200)  # a file or a pipe: nothing is folded
    model, tokens = gpt2_small()
    if layers != 12:
        torch.manual_seed(0)
        model = GPT(layers=layers)
    size = sum(p.numel() for p in model.parameters())
    console.print(f"GPT: {layers} layers, width 768, {size / 1e6:.0f} M parameters, {tokens.numel()} tokens a step")

    with console.status("tracing and solving"):
        solved = gcsolve.solve(model, tokens, budget=budget, progress=False)
    console.print(
        f"store-all peak {size_text(solved.baseline_peak_bytes)}, budget {size_text(solved.budget_bytes)}; "
        f"planned in {solved.trace_s + solved.solution.solve_s:.1f} s "
        f"(trace {solved.trace_s:.1f} s, solve {solved.solution.solve_s:.1f} s)"
    )
    plans = {name: solved if name == "auto" else _rule_plan(solved, name) for name in RULES}
    eager = Training(model, tokens)
    trained = {name: Training(plan.module, tokens) for name, plan in plans.items() if plan is not None}
    equal = _train(eager, trained, steps, console)
    console.print(_results_table(plans, eager, trained, equal, solved.budget_bytes))
    auto = trained["auto"]
    parameters = ([*training.module.parameters()] for training in (auto, eager))
    same = auto.losses == eager.losses and _equal(*parameters)
    console.print(
        f"losses of {steps} steps, solved plan: {_texts(auto.losses)}; untouched: {_texts(eager.losses)}\n"
        f"losses and parameters after {steps} steps: {'bitwise equal' if same else 'NOT EQUAL'}\n"
        f"proven: no plan, however often it recomputes, has an overhead below {solved.any_bound:.1%}"
    )


def _train(eager: Training, trained: dict[str, Training], steps: int, console: Any) -> dict[str, bool]:
    """Train all for `steps` steps; returns whether the gradients of each plan were bitwise equal to the untouched model's.

    The trainings take turns step by step, so that other load on the machine affects all alike.
    """
    equal = dict.fromkeys(trained, True)
    for step in range(steps):
        with console.status(f"step {step + 1} of {steps}: untouched"):
            expected = eager.step()
        for name, training in trained.items():
            with console.status(f"step {step + 1} of {steps}: {name}"):
                equal[name] &= _equal(training.step(), expected)
    return equal


def _results_table(
    plans: dict[str, Any], eager: Training, trained: dict[str, Training], equal: dict[str, bool], budget_bytes: int
) -> Any:
    """The table of the untouched model and of each plan."""
    from gcsolve.util.sizes import size_text

    columns = ("plan", "predicted peak", "measured peak", "in budget", "overhead", "step", "gradients")
    table = _empty_table(columns, align="lrrcrrl")
    table.add_row("untouched", "", size_text(eager.peak_bytes), "", "", f"{min(eager.seconds):.2f} s", "")
    for name, plan in plans.items():
        if plan is None:
            table.add_row(name, "", "", "", "no plan", "", "")
            continue
        training = trained[name]
        table.add_row(
            f"solved ({plan.solution.solver})" if name == "auto" else name,
            size_text(plan.peak_bytes),
            size_text(training.peak_bytes),
            "yes" if training.peak_bytes <= budget_bytes else "no",
            f"{plan.overhead:.1%}",
            f"{min(training.seconds):.2f} s",
            "bitwise equal" if equal[name] else "NOT EQUAL",
        )
    return table


def _rule_plan(solved: Any, solver: str) -> Any:
    """The plan of a rule of thumb for the budget of `solved`, or the rule's plan of the least peak; None if it has none."""
    import gcsolve

    budget: int | None = solved.baseline_peak_bytes if solver == "store_all" else solved.budget_bytes
    for _ in range(2):
        try:
            return solved.at(budget=f"{budget}B", solver=solver, progress=False)
        except gcsolve.InfeasibleBudget as error:
            budget = error.least_bytes
            if budget is None:
                return None
    return None


def _equal(tensors: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether both have the same number of tensors, bitwise equal pair by pair."""
    return len(tensors) == len(expected) and all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


def _texts(losses: list[float]) -> str:
    return ", ".join(f"{loss:.4f}" for loss in losses)


def _empty_table(columns: tuple[str, ...], align: str) -> Any:
    """A table without rows; `align` has a letter for each column: l, r or c."""
    from rich import box
    from rich.table import Table

    sides: dict[str, Any] = {"l": "left", "r": "right", "c": "center"}
    table = Table(box=box.SIMPLE_HEAD)
    for column, letter in zip(columns, align, strict=True):
        table.add_column(column, justify=sides[letter])
    return table
