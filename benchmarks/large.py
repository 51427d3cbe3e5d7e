"""Solvers on traced models of full size: `python benchmarks/large.py`; and wall time against op count: `--growth`.

Each model is built on the meta device from its configuration, so nothing is allocated, and traced for an A100 with
80 GB (workspace is estimated). Budgets are shares of what forward and backward allocate in the store-all step
(scope="activations"), or the least feasible + 5 % where that is higher.

Results go to benchmarks/results/large.json and .txt; models named by --models replace their part. --problems DIR keeps
the traced problems there (pickles: only open your own).
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import pickle
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gcsolve
from benchmarks import models
from benchmarks.main_job import RESULTS, mb, say, table, where
from gcsolve.problem import Problem
from gcsolve.solver.base import Certificate
from gcsolve.solver.minimum import least_kept_budget

SHARES = (0.7, 0.5, 0.3)
DEVICE = "a100-80gb"
GROWTH_LAYERS = (6, 12, 24, 48, 96)
GROWTH_SHARE = 0.6
CLASSES = {
    str(Certificate.ANY_SCHEDULE): "any",
    str(Certificate.ASCENDING): "ascending",
    str(Certificate.ONE_RERUN): "one rerun",
}
HEADS = ("share", "MB", "overhead", "bound", "holds for", "any bound", "gap to it", "solve s", "greedy", "uniform √L")


def on_meta(build: Callable[[], models.Case]) -> models.Case:
    with torch.device("meta"):
        return build()


def gpt2(
    layers: int, width: int, heads: int, batch: int = 8, length: int = 1024, vocabulary: int = 50257
) -> models.Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocabulary, use_cache=False)
    tokens = torch.zeros((batch, length), dtype=torch.int64)
    return GPT2LMHeadModel(config).train(), {"input_ids": tokens, "labels": tokens}, None


def llama(layers: int, width: int, inner: int, heads: int, groups: int, length: int = 4096) -> models.Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=length,
        use_cache=False,
    )
    tokens = torch.zeros((1, length), dtype=torch.int64)
    return LlamaForCausalLM(config).bfloat16().train(), {"input_ids": tokens, "labels": tokens}, None


def vision(build: Callable[[], torch.nn.Module], batch: int, size: int) -> models.Case:
    model = models.WithLoss(build()).train()
    return model, (torch.zeros(batch, 3, size, size), torch.zeros(batch, dtype=torch.int64)), None


def tv(name: str) -> torch.nn.Module:
    import torchvision

    return torchvision.models.get_model(name, weights=None)


def timm_model(name: str) -> torch.nn.Module:
    import timm

    return timm.create_model(name, pretrained=False)


def unet() -> models.Case:
    model = models.WithLoss(models.UNet(width=64, depth=5)).train()
    return model, (torch.zeros(8, 3, 512, 512), torch.zeros((8, 512, 512), dtype=torch.int64)), None


MODELS: dict[str, Callable[[], models.Case]] = {
    "gpt2-small": functools.partial(gpt2, 12, 768, 12),
    "gpt2-medium": functools.partial(gpt2, 24, 1024, 16),
    "gpt2-xl": functools.partial(gpt2, 48, 1600, 25),
    "llama-7b": functools.partial(llama, 32, 4096, 11008, 32, 32),
    "llama-70b": functools.partial(llama, 80, 8192, 28672, 64, 8),
    "resnet152": functools.partial(vision, functools.partial(tv, "resnet152"), 32, 224),
    "densenet201": functools.partial(vision, functools.partial(tv, "densenet201"), 32, 224),
    "swin_s": functools.partial(vision, functools.partial(timm_model, "swin_small_patch4_window7_224"), 32, 224),
    "efficientnetv2_s": functools.partial(vision, functools.partial(timm_model, "tf_efficientnetv2_s"), 32, 300),
    "unet": unet,
}


def traced(name: str, build: Callable[[], models.Case], folder: Path | None) -> tuple[Problem, float]:
    """The problem at the budget of its store-all peak, and the seconds that tracing took."""
    kept = folder / f"{name}.pkl" if folder else None
    if kept and kept.exists():
        return pickle.loads(kept.read_bytes())
    model, example, loss = on_meta(build)
    plan = gcsolve.solve(
        model, example, budget=1.0, solver="store_all", loss=loss, scope="activations", device=DEVICE, progress=False
    )
    found = plan.problem.with_budget(plan.baseline_peak_bytes), plan.trace_s
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(pickle.dumps(found))
    return found


def run_model(name: str, problem: Problem, trace_s: float, limit_s: float) -> dict[str, Any]:
    full = problem.budget_bytes
    graph = problem.graph
    least = least_kept_budget(problem)
    found: dict[str, Any] = {
        "forward_ops": graph.backward_start,
        "backward_ops": len(graph.nodes) - graph.backward_start,
        "store_all_bytes": full,
        "least_bytes": least.bytes,
        "trace_s": trace_s,
        "rows": [],
    }
    for share in SHARES:
        budget = max(round(share * full), math.ceil(1.05 * least.bytes))
        found["rows"].append(run_budget(problem.with_budget(budget), share, full, limit_s))
        say(f"{name}: " + " | ".join(f"{h} {c}" for h, c in zip(HEADS, cells(found["rows"][-1]), strict=True)))
    return found


def run_budget(problem: Problem, share: float, full: int, limit_s: float) -> dict[str, Any]:
    solution = gcsolve.solve_problem(problem, time_limit_s=limit_s)
    rivals = {}
    for rival in ("greedy", "uniform_sqrt"):
        other = gcsolve.solve_problem(problem, rival)
        rivals[rival] = other.overhead if 0 < other.peak_bytes <= problem.budget_bytes else None
    return {
        "share": share,
        "asked": problem.budget_bytes / full,
        "budget_bytes": problem.budget_bytes,
        "status": solution.status.name,
        "overhead": solution.overhead,
        "bound": solution.lower_bound,
        "certificate": str(solution.certificate),
        "any_bound": solution.any_bound,
        "any_gap": (solution.overhead - solution.any_bound) / (1 + solution.overhead),
        "solve_s": solution.solve_s,
        "rivals": rivals,
    }


def cells(row: dict[str, Any]) -> list[str]:
    asked = f"{row['share']:.0%}"
    if row["asked"] > row["share"] + 0.001:
        asked += f" → {row['asked']:.1%}"
    rivals = ["-" if r is None else f"{r:.3%}" for r in row["rivals"].values()]
    return [
        asked,
        mb(row["budget_bytes"]),
        f"{row['overhead']:.3%}",
        f"{row['bound']:.3%}",
        CLASSES.get(row["certificate"], "-"),
        f"{row['any_bound']:.3%}",
        f"{row['any_gap']:.3%}",
        f"{row['solve_s']:.1f}",
        *rivals,
    ]


def checks(results: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    for name, found in results["models"].items():
        limit = 60 if found["forward_ops"] > 1000 else 15
        for row in found["rows"]:
            yield f"{name} at {row['share']:.0%}: gap to any schedule ≤ 0.5 %", row["any_gap"] <= 0.005 + 1e-9
            yield f"{name} at {row['share']:.0%}: solved in ≤ {limit} s", row["solve_s"] <= limit


def run_growth(limit_s: float) -> list[dict[str, Any]]:
    """GPT-2 of small width with more and more layers: seconds to trace and to solve.

    With a vocabulary so small that the layers make the peak, few or many.
    """
    rows = []
    for layers in GROWTH_LAYERS:
        build = functools.partial(gpt2, layers, 256, 4, 8, 512, 2048)
        problem, trace_s = traced("", build, None)
        solution = gcsolve.solve_problem(
            problem.with_budget(round(GROWTH_SHARE * problem.budget_bytes)), time_limit_s=limit_s
        )
        ops = len(problem.graph.nodes)
        rows.append(
            {"layers": layers, "ops": ops, "trace_s": trace_s, "solve_s": solution.solve_s, "gap": solution.gap}
        )
        say(
            f"{layers} layers, {ops} ops: trace {trace_s:.1f} s, solve {solution.solve_s:.2f} s, gap {solution.gap:.3%}"
        )
    return rows


def run_chain(ops: int = 3000) -> dict[str, float]:
    """A chain of small ops: CPU seconds to plan it."""

    class Chain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for _ in range(ops):
                x = torch.sin(x)
            return x

    started = time.process_time()
    plan = gcsolve.solve(Chain(), torch.zeros(64, 8), budget=0.5)
    found = {"ops": ops, "cpu_s": time.process_time() - started, "gap": plan.gap}
    say(f"chain of {ops} ops: planned in {found['cpu_s']:.1f} s of CPU")
    return found


def exponent(rows: list[dict[str, Any]], key: str) -> float:
    """Slope of log seconds over log ops, by least squares."""
    x = [math.log(r["ops"]) for r in rows]
    y = [math.log(r[key]) for r in rows]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def report(results: dict[str, Any]) -> str:
    lines = [
        results["where"],
        f"traced on meta for {DEVICE}, activations only; bounds and overheads in store-all step time",
        "",
    ]
    for name, found in results["models"].items():
        lines += [
            f"## {name}: {found['forward_ops']} + {found['backward_ops']} ops, store-all {mb(found['store_all_bytes'])} MB, "
            f"least {mb(found['least_bytes'])} MB, trace {found['trace_s']:.1f} s",
            "",
            *table(HEADS, [cells(row) for row in found["rows"]]),
            "",
        ]
    if "growth" in results:
        rows = results["growth"]
        lines += [f"## growth: GPT-2, width 256, {GROWTH_SHARE:.0%} of store-all", ""]
        heads = ("layers", "ops", "trace s", "solve s", "gap")
        lines += table(
            heads,
            [
                [str(r["layers"]), str(r["ops"]), f"{r['trace_s']:.1f}", f"{r['solve_s']:.2f}", f"{r['gap']:.3%}"]
                for r in rows
            ],
        )
        if "chain" in results:
            chain = results["chain"]
            lines += [f"chain of {chain['ops']} ops: planned in {chain['cpu_s']:.1f} s of CPU, gap {chain['gap']:.3%}"]
        lines += [f"trace ~ ops^{exponent(rows, 'trace_s'):.2f}, solve ~ ops^{exponent(rows, 'solve_s'):.2f}", ""]
    held = list(checks(results))
    failed = [what for what, holds in held if not holds]
    lines += [f"{len(held) - len(failed)} of {len(held)} checks hold", *(f"FAILS: {what}" for what in failed)]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Solvers on traced models of full size.")
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--growth", action="store_true", help="also wall time against op count")
    parser.add_argument("--problems", type=Path, help="folder that keeps traced problems")
    parser.add_argument("--time-limit-s", type=float, default=60.0)
    asked = parser.parse_args()
    path = RESULTS / "large.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"models": {}}
    results["where"] = where()
    for name in asked.models:
        say(f"--- {name}")
        problem, trace_s = traced(name, MODELS[name], asked.problems)
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        say(f"{name}: {len(problem.graph.nodes)} ops, trace {trace_s:.1f} s, at most {rss / 1e9:.2f} GB so far")
        results["models"][name] = run_model(name, problem, trace_s, asked.time_limit_s)
        keep(path, results)
    if asked.growth:
        results["growth"] = run_growth(asked.time_limit_s)
        results["chain"] = run_chain()
        keep(path, results)
    print(report(results))
    return 0 if all(holds for _, holds in checks(results)) else 1


def keep(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    path.with_suffix(".txt").write_text(report(results) + "\n")


if __name__ == "__main__":
    sys.exit(main())
