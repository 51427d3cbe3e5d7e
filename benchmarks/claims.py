"""What people say about activation memory, computed: `python benchmarks/claims.py`.

One table; each row says what is claimed, what gcsolve finds for a stated model and device, whether the claim holds there,
and when it does not. Then a Llama of 70 billion parameters with adapters, planned for two GPUs, in a process of its own each.
Nothing is allocated (all models are on meta) and no GPU is used; times are roofline seconds.

Results go to benchmarks/results/claims.json and .txt; parts named by --parts replace theirs.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gcsolve
from benchmarks import models
from gcsolve.demo import GPT
from gcsolve.report.tables import text_table

RESULTS = Path(__file__).parent / "results"
DEPTHS = (16, 36, 64, 100, 144)
GB = 1e9


@dataclass(frozen=True)
class Row:
    claim: str
    found: str
    holds: str  # yes, no, or partly
    when: str


# --- a 7-billion-parameter model ---------------------------------------------------------------------------------------


def seven_b() -> Iterator[Row]:
    model, example, _ = models.llama_7b_meta(batch=8, length=4096)
    plan = gcsolve.solve(
        model, example, budget=1.0, solver="store_all", device="h200", optimizer=torch.optim.AdamW, progress=False
    )
    parts = plan.breakdown
    weights, states = parts["parameters"] / GB, parts["optimizer"] / GB
    count = sum(p.numel() for p in model.parameters())
    yield Row(
        "7B in bf16: weights take 14 GB",
        f"{weights:.2f} GB ({count / 1e9:.2f} billion parameters)",
        verdict(abs(weights / 14 - 1) < 0.05),
        "always: two bytes a parameter",
    )
    yield Row(
        "Adam's states take twice the weights' memory",
        f"{states:.2f} GB = {states / weights:.2f} x weights, in bf16",
        verdict(abs(states / weights - 2) < 0.02),
        "states in the weights' own type; in float32 beside bf16 weights they take 4 x, with master weights 6 x",
    )
    live = (plan.peak_bytes - parts["parameters"] - parts["optimizer"] - parts.get("gradients", 0)) / GB
    yield Row(
        "4k context, batch 8: activations take more than 80 GB",
        f"{live:.1f} GB beside weights, states and gradients, flash attention (store-all peak {plan.peak_bytes / GB:.1f} GB)",
        verdict(live > 80),
        f"from batch {math.floor(80 / (live / 8)) + 1} on; about {live / 8:.1f} GB a sequence",
    )


# --- depth -------------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """A stack whose activations dwarf its weights."""

    def __init__(self, depth: int, width: int = 64) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.gelu(up(x)))
        return x.square().mean()


def by_depth() -> Iterator[Row]:
    names = ("store_all", "uniform_sqrt", "greedy")
    peaks: dict[str, list[int]] = {name: [] for name in names}
    for depth in DEPTHS:
        with torch.device("meta"):
            model, x = Residual(depth), torch.empty(1 << 18, 64)
        plan = gcsolve.solve(
            model, x, budget=1.0, solver="store_all", device="h200", scope="activations", progress=False
        )
        for name in names:
            peaks[name].append(gcsolve.solve_problem(plan.problem.with_budget(1), name, time_limit_s=20).peak_bytes)
    powers = {name: exponent(DEPTHS, sizes) for name, sizes in peaks.items()}
    shown = {name: " ".join(f"{size / GB:.2f}" for size in sizes) for name, sizes in peaks.items()}
    depths = " ".join(map(str, DEPTHS))
    yield Row(
        f"keeping everything takes memory in proportion to depth L (L = {depths})",
        f"GB: {shown['store_all']}; fitted L^{powers['store_all']:.2f}",
        verdict(abs(powers["store_all"] - 1) < 0.05),
        "where activations dwarf the rest",
    )
    yield Row(
        "uniform checkpoints of √L layers take memory in √L",
        f"GB: {shown['uniform_sqrt']}; fitted L^{powers['uniform_sqrt']:.2f}",
        verdict(abs(powers["uniform_sqrt"] - 0.5) < 0.1),
        "segments count ops, and the gradients of the weights grow with L",
    )
    yield Row(
        "√L is the best that recomputation can do",
        f"least found, GB: {shown['greedy']}; fitted L^{powers['greedy']:.2f}",
        verdict(powers["greedy"] > 0.45),
        "only if each value is computed twice at most; with more reruns memory falls further, at more time",
    )


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Least-squares slope of log y over log x."""
    x, y = [math.log(v) for v in xs], [math.log(v) for v in ys]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


# --- a checkpoint a block ----------------------------------------------------------------------------------------------


def per_block() -> Iterator[Row]:
    with torch.device("meta"):
        model = GPT(vocabulary=50257, layers=24, width=1024, heads=16).bfloat16()
        tokens = torch.zeros((8, 1024), dtype=torch.int64)
    what = "GPT-2 medium's shape, bf16, 8 x 1024 tokens, AdamW, h200"
    plan = gcsolve.solve(
        model, tokens, budget=1.0, solver="store_all", device="h200", optimizer=torch.optim.AdamW, progress=False
    )
    base = plan.peak_bytes
    forward_flops = sum(plan.costed.flops[: plan.problem.graph.backward_start])
    ratio = sum(plan.costed.flops) / forward_flops - 1
    everything = whole_forward(plan)
    yield Row(
        "recomputing the whole forward adds a third of the FLOPs, as backward is twice forward",
        f"backward {ratio:.2f} x forward; the whole forward again {everything:.1%} of a step's FLOPs ({what})",
        verdict(abs(everything - 1 / 3) < 0.02),
        "matmuls alone: backward twice forward; flash attention's backward is 2.5 x its forward, so the share falls with "
        "sequence length",
    )
    blocks = gcsolve.solve_problem(plan.problem.with_budget(1), "blocks")
    saved = 1 - blocks.peak_bytes / base
    yield Row(
        "a checkpoint a block saves 30 to 50 % of the memory",
        f"{saved:.1%} of the step's peak: {base / GB:.2f} -> {blocks.peak_bytes / GB:.2f} GB",
        verdict(0.3 <= saved <= 0.5),
        "falls with the share of weights, optimizer and logits in the step, grows with batch and length",
    )
    yield Row(
        "and costs about 20 % of the time",
        f"{blocks.overhead:.1%} of the step's roofline time",
        verdict(abs(blocks.overhead - 0.2) <= 0.05),
        "a third of forward and backward at the most, as every op but the last block's is run again",
    )
    same_memory = plan.at(budget=f"{blocks.peak_bytes}B", solver="auto", progress=False)
    yield Row(
        "at the memory of a checkpoint a block nothing can be gained",
        f"solved plan: {same_memory.overhead:.1%} instead of {blocks.overhead:.1%} (no schedule below "
        f"{same_memory.any_bound:.1%})",
        verdict(same_memory.overhead > 0.95 * blocks.overhead),
        "a block's cheap ops free as much as its dear ones",
    )
    low = cheapest(plan, blocks.overhead, blocks.peak_bytes)
    yield Row(
        "at the time of a checkpoint a block nothing can be gained",
        f"solved plan: {low / GB:.2f} instead of {blocks.peak_bytes / GB:.2f} GB at no more time",
        verdict(low > 0.95 * blocks.peak_bytes),
        "as above",
    )


def whole_forward(plan: Any) -> float:
    """FLOPs of all rerunnable forward ops over those of the step."""
    graph = plan.problem.graph
    again = sum(f for f, n in zip(plan.costed.flops, graph.nodes[: graph.backward_start], strict=False) if n.rerunnable)
    return again / sum(plan.costed.flops)


def cheapest(plan: Any, overhead: float, above: int) -> int:
    """The least peak among solved plans that cost no more than `overhead`, by bisection."""
    low, high = plan.minimum_budget(time_limit_s=10).one_rerun_bytes, above
    for _ in range(6):
        middle = (low + high) // 2
        try:
            found = plan.at(budget=f"{middle}B", solver="auto", time_limit_s=10, progress=False)
            low, high = (low, found.peak_bytes) if found.overhead <= overhead else (middle, high)
        except gcsolve.InfeasibleBudget:
            low = middle
    return high


# --- 70 billion parameters ---------------------------------------------------------------------------------------------


class EightBit(nn.Module):
    """A frozen linear layer: 8 bits a weight, one 16-bit scale a row, widened where it is used."""

    weight: Tensor
    scale: Tensor

    def __init__(self, of: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty_like(of.weight, dtype=torch.int8))
        self.register_buffer("scale", torch.empty_like(of.weight[:, :1]))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


def llama_70b_lora(batch: int, seq: int, layers: int = 80, eight_bit: bool = False) -> models.Case:
    """Llama-70B's shape in bf16, frozen, with rank-16 adapters on the attention projections."""
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("meta"):
        base = LlamaForCausalLM(config).bfloat16()
        adapters = peft.LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
        model = peft.get_peft_model(base, adapters).bfloat16().train()  # type: ignore[arg-type]
        if eight_bit:
            for name, module in list(model.named_modules()):
                if isinstance(module, nn.Linear) and not module.weight.requires_grad and "lm_head" not in name:
                    parent, _, last = name.rpartition(".")
                    setattr(model.get_submodule(parent), last, EightBit(module))
        tokens = torch.zeros((batch, seq), dtype=torch.int64)
    return model, {"input_ids": tokens, "labels": tokens}, None


# What is planned, in a process of its own each, whose time and memory are what is reported.
SEVENTY_B: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bf16-h200": ("frozen base in bf16", "h200", {}),
    "bf16-rtx4090": ("frozen base in bf16", "rtx4090", {}),
    "int8-h200": ("frozen base in 8 bits, widened to bf16 where it is used", "h200", {"eight_bit": True}),
}


def planned_70b(kind: str) -> dict[str, Any]:
    _, device, options = SEVENTY_B[kind]
    wall = time.perf_counter()
    factory = functools.partial(llama_70b_lora, **options)
    found = gcsolve.fit(factory, [1], seq=4096, device=device, optimizer=torch.optim.AdamW, progress=False)
    return {
        "text": found.summary(),
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time(),
        "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def seventy_b_text() -> str:
    parts = []
    for kind, (what, device, _) in SEVENTY_B.items():
        print(f"70b {kind}", file=sys.stderr, flush=True)
        done = subprocess.run([sys.executable, __file__, "--child", kind], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"planning the 70B model ({kind}) failed:\n{done.stderr[-3000:]}")
        told = json.loads(done.stdout.splitlines()[-1])
        within = told["cpu_s"] < 300 and told["bytes"] < 6e9
        shared = ", shared with other work" if told["wall_s"] > 1.5 * told["cpu_s"] else ""
        parts += [
            f"## Llama-70B's shape, {what}, rank-16 adapters in bf16, AdamW, batch 1, length 4096, {device}",
            told["text"],
            f"planned in {told['cpu_s']:.0f} s of one core (here {told['wall_s']:.0f} s{shared}) and at most "
            f"{told['bytes'] / GB:.2f} GB of this machine's memory: {'within' if within else 'NOT within'} 5 minutes of one "
            "core and 6 GB",
        ]
    return "\n\n".join(parts)


# --- the table ---------------------------------------------------------------------------------------------------------


def verdict(holds: bool) -> str:
    return "yes" if holds else "NO"


PARTS = {"7b": seven_b, "depth": by_depth, "block": per_block}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Claims about activation memory, computed.")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS, "70b"], help="default: all")
    parser.add_argument("--child", choices=list(SEVENTY_B), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        print(json.dumps(planned_70b(arguments.child)))
        return 0
    stored = RESULTS / "claims.json"
    known: dict[str, Any] = json.loads(stored.read_text()) if stored.exists() else {}
    for part in arguments.parts or [*PARTS, "70b"]:
        print(part, file=sys.stderr, flush=True)
        known[part] = seventy_b_text() if part == "70b" else [astuple(row) for row in PARTS[part]()]
    heads = ("claim", "found", "holds", "and when")
    table = text_table(heads, [row for part in PARTS for row in known.get(part, ())])
    where = f"gcsolve {gcsolve.__version__}, torch {torch.__version__}, Python {platform.python_version()}, no GPU used"
    text = "\n\n".join([where, table, *([known["70b"]] if "70b" in known else [])])
    stored.write_text(json.dumps(known, indent=1) + "\n")
    (RESULTS / "claims.txt").write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
