"""`gcsolve demo`: a plain-torch GPT of GPT-2-small's shape, trained under four plans, nothing to download."""

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

    The vocabulary is cut from 50257 to 8192: with batches small enough for a CPU the full one leaves little of the
    memory to the layers, which are what is to be seen. Usable as `gcsolve plan gcsolve.demo:gpt2_small --budget 0.5`.
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
    """SGD on a copy of `module`, measured. Peaks in bytes (whole step, of the first one), times in seconds."""

    def __init__(self, module: nn.Module, tokens: Tensor, seed: int = 0) -> None:
        self.module, self.tokens = copy.deepcopy(module), tokens
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        torch.manual_seed(seed)
        self.generator_state = torch.get_rng_state()
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.peak_bytes = 0

    def step(self) -> list[Tensor]:
        """One step; its gradients."""
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
            always = sum(t.nbytes for t in [*self.module.parameters(), *self.module.buffers(), self.tokens])
            self.peak_bytes = always + meter.peak_bytes
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return gradients


def run(budget: str | float = 0.5, *, steps: int = 2, layers: int = 12) -> None:
    """Print one table: the untouched model, store-all, two usual rules and the solved plan, all at the same budget.

    Args:
        budget: fraction of the store-all peak, or a size; the solved plan keeps it.
        steps: training steps of the untouched model and of each plan, in turn; the table has the fastest.
        layers: of the GPT.
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
    plans = {name: solved if name == "auto" else _plan_of(solved, name) for name in RULES}
    eager = Training(model, tokens)
    trained = {name: Training(plan.module, tokens) for name, plan in plans.items() if plan is not None}
    equal = dict.fromkeys(trained, True)
    for step in range(steps):  # turn and turn about: whatever else the machine does then takes time from all of them
        with console.status(f"step {step + 1} of {steps}: untouched"):
            expected = eager.step()
        for name, training in trained.items():
            with console.status(f"step {step + 1} of {steps}: {name}"):
                equal[name] &= _equal(training.step(), expected)
    heads = ("plan", "predicted peak", "measured peak", "in budget", "overhead", "step", "gradients")
    table = _table(heads, align="lrrcrrl")
    table.add_row("untouched", "", size_text(eager.peak_bytes), "", "", f"{min(eager.seconds):.2f} s", "")
    for name, plan in plans.items():
        if plan is None:
            table.add_row(name, "", "", "", "no plan", "", "")
            continue
        done = trained[name]
        table.add_row(
            f"solved ({plan.solution.solver})" if name == "auto" else name,
            size_text(plan.peak_bytes),
            size_text(done.peak_bytes),
            "yes" if done.peak_bytes <= solved.budget_bytes else "no",
            f"{plan.overhead:.1%}",
            f"{min(done.seconds):.2f} s",
            "bitwise equal" if equal[name] else "NOT EQUAL",
        )
    console.print(table)
    ours = trained["auto"]
    parameters = ([*run.module.parameters()] for run in (ours, eager))
    same = ours.losses == eager.losses and _equal(*parameters)
    console.print(
        f"losses of {steps} steps, solved plan: {_texts(ours.losses)}; untouched: {_texts(eager.losses)}\n"
        f"losses and parameters after {steps} steps: {'bitwise equal' if same else 'NOT EQUAL'}\n"
        f"proven: no plan, however often it recomputes, has an overhead below {solved.any_bound:.1%}"
    )


def _plan_of(solved: Any, solver: str) -> Any:
    """The plan of a rule that may miss the budget: then the least peak that it reaches, None when it says none."""
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


def _equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _texts(losses: list[float]) -> str:
    return ", ".join(f"{loss:.4f}" for loss in losses)


def _table(heads: tuple[str, ...], align: str) -> Any:
    from rich import box
    from rich.table import Table

    words: dict[str, Any] = {"l": "left", "r": "right", "c": "center"}
    table = Table(box=box.SIMPLE_HEAD)
    for head, side in zip(heads, align, strict=True):
        table.add_column(head, justify=words[side])
    return table
