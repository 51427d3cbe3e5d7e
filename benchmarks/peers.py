"""gcsolve beside what one could use instead, on the same models in one process: `python benchmarks/peers.py`.

| peer | what it is |
|---|---|
| eager | the untouched model |
| per block | `torch.utils.checkpoint` around every block |
| √L | `checkpoint_sequential` into √L segments (the last one kept); for loops of blocks, the same by groups of blocks |
| selective | selective checkpoint of every block that keeps matmuls, convolutions and attention |
| compile b | `torch.compile` with `activation_memory_budget` b, the joint graph run by eager kernels |
| HF | Hugging Face's `gradient_checkpointing_enable` |

For each: measured peak of one step, FLOPs over eager's, step time over eager's, and whether gradients and buffers equal
eager's. Then gcsolve's plan at that very peak, measured the same way. Times are CPU seconds of all threads (the clock to
trust on a machine that does other things too), medians of interleaved steps; eager is timed twice, and the ratio of the
two is the noise. gcsolve plans for the least time by its roofline; beside it stand the FLOPs of its plan with cost="flops",
which weighs arithmetic alone, and ops without any by their bytes. Where the plan for the least time has more FLOPs than the
peer, that one is run and timed too. Results go to benchmarks/results/peers.{json,txt,png}; `--models` with none named
writes the stored ones out again; --quick runs smaller models and writes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gcsolve
from benchmarks import models
from benchmarks.main_job import table, where
from gcsolve._torch import functorch_config
from gcsolve.cost.flops import op_info
from gcsolve.ops.peak_meter import PeakMeter, interleaved_times

RESULTS = Path(__file__).parent / "results"
COMPILE_BUDGETS = (0.7, 0.4, 0.0)
FRONTIER = 7  # plans at evenly falling budgets, for the figure
TIE = 1.02  # step times closer than this are equal
SAME_FLOPS = 0.001

Row = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A model with its example input, and where its repeated blocks are."""

    make: Callable[[], models.Case]
    blocks: Callable[[Any], list[nn.Module]]


def _residual_blocks(model: Any) -> list[nn.Module]:
    net = model.model
    return [block for part in (net.layer1, net.layer2, net.layer3, net.layer4) for block in part]


SUBJECTS = {
    "gpt2": Subject(
        functools.partial(models.gpt2, layers=9, width=384, batch=2, length=256, vocabulary=8192),
        lambda model: list(model.transformer.h),
    ),
    "llama": Subject(
        functools.partial(models.llama, layers=9, width=256, batch=2, length=128, vocabulary=4096),
        lambda model: list(model.model.layers),
    ),
    "resnet50": Subject(functools.partial(models.resnet50, batch=2, size=96), _residual_blocks),
}
QUICK = {
    "gpt2": Subject(
        functools.partial(models.gpt2, layers=4, width=64, batch=2, length=64, vocabulary=256), SUBJECTS["gpt2"].blocks
    ),
    "llama": Subject(
        functools.partial(models.llama, layers=4, width=64, batch=2, length=64, vocabulary=256),
        SUBJECTS["llama"].blocks,
    ),
    "resnet50": Subject(functools.partial(models.resnet50, batch=2, size=64), _residual_blocks),
}

# --- the peers -------------------------------------------------------------------------------------------------------


def per_block(model: nn.Module, subject: Subject) -> nn.Module:
    for block in subject.blocks(model):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


class _Group(nn.Module):
    """Consecutive blocks as one, for a model that loops over its blocks and hands the first argument on."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        for block in self.blocks:
            x = block(x, *args, **kwargs)
        return x


def root_l(model: Any, subject: Subject) -> nn.Module:
    """√L segments of the blocks, all but the last under checkpoint."""
    blocks = subject.blocks(model)
    k = round(math.sqrt(len(blocks)))
    if hasattr(model.model if hasattr(model, "model") else model, "layer1"):
        net = model.model
        stem = [nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool)]
        chain = nn.Sequential(*stem, *blocks)

        def forward(x: torch.Tensor) -> torch.Tensor:
            deep: Any = checkpoint_sequential(chain, k, x, use_reentrant=False)
            return net.fc(torch.flatten(net.avgpool(deep), 1))

        net.forward = forward
        return model
    groups = [_Group(blocks[i * len(blocks) // k : (i + 1) * len(blocks) // k]) for i in range(k)]
    for group in groups[:-1]:
        group.forward = functools.partial(checkpoint, group.forward, use_reentrant=False)
    body = model.transformer if hasattr(model, "transformer") else model.model
    setattr(body, "h" if hasattr(body, "h") else "layers", nn.ModuleList(groups))
    return model


_aten = torch.ops.aten
KEPT = {
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default, _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
}  # fmt: skip


def _policy(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def selective(model: nn.Module, subject: Subject) -> nn.Module:
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    for block in subject.blocks(model):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    return model


def hugging_face(model: Any, subject: Subject) -> nn.Module | None:
    if not hasattr(model, "gradient_checkpointing_enable"):
        return None
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


class Compiled(nn.Module):
    """The model under torch.compile with an activation memory budget; `flops`: of the graphs that it made."""

    def __init__(self, model: nn.Module, budget: float) -> None:
        super().__init__()
        self.budget = budget
        self.flops = 0
        self.inner = model
        backend = aot_autograd(
            fw_compiler=self._counted,
            bw_compiler=self._counted,
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,  # as torch's own aot_eager: BatchNorm's statistics are written in the graph
        )
        self.compiled = torch.compile(model, backend=backend)

    def _counted(self, graph: Any, _inputs: Any) -> Any:
        infos = [op_info(n) for n in graph.graph.nodes if n.op == "call_function" and "val" in n.meta]
        self.flops += sum(info.flops for info in infos)
        return graph.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with functorch_config.patch(activation_memory_budget=self.budget):
            return self.compiled(*args, **kwargs)


def peers(subject: Subject, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module), each with a copy of `model` of its own."""
    yield "eager", copy.deepcopy(model)
    ways = {"per block": per_block, "√L": root_l, "selective": selective, "HF": hugging_face}
    for name, make in ways.items():
        made = make(copy.deepcopy(model), subject)
        if made is not None:
            yield name, made
    for budget in COMPILE_BUDGETS:
        yield f"compile {budget:g}", Compiled(copy.deepcopy(model), budget)


# --- one step, measured ----------------------------------------------------------------------------------------------


def step(module: nn.Module, example: Any) -> None:
    """Forward and backward from one seed, beginning without gradients."""
    for parameter in module.parameters():
        parameter.grad = None
    torch.manual_seed(0)
    result = module(**example) if isinstance(example, dict) else module(*example)
    (result if isinstance(result, torch.Tensor) else result.loss).backward()


def measured(module: nn.Module, example: Any) -> Row:
    """Peak bytes, FLOPs, and copies of gradients and buffers after the first step."""
    buffers = {k: v.clone() for k, v in module.named_buffers()}
    step(module, example)
    grads = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    after = [b.clone() for b in module.buffers()]
    for parameter in module.parameters():
        parameter.grad = None
    always = [*module.parameters(), *module.buffers(), *(example.values() if isinstance(example, dict) else example)]
    with PeakMeter() as meter:
        step(module, example)
    if isinstance(module, Compiled):  # a counter around it would make it run eagerly
        flops = module.flops
    else:
        with FlopCounterMode(display=False) as counter:
            step(module, example)
        flops = counter.get_total_flops()
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])
    size = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in always}
    return {"peak_bytes": meter.peak_bytes + sum(size.values()), "flops": flops, "grads": grads, "buffers": after}


def sameness(a: Row, b: Row) -> str:
    """How gradients and buffers of `a` compare with those of eager, `b`."""
    grads = [(x, y) for x, y in zip(a["grads"], b["grads"], strict=True) if x is not None and y is not None]
    missing = any((x is None) != (y is None) for x, y in zip(a["grads"], b["grads"], strict=True))
    worst = max((float((x - y).norm() / (y.norm() + 1e-30)) for x, y in grads), default=0.0)
    if missing:
        text = "gradients MISSING"
    elif all(torch.equal(x, y) for x, y in grads):
        text = "bitwise"
    elif worst < 1e-4:
        text = f"to rounding ({worst:.0e})"
    else:
        text = f"gradients WRONG by {worst:.1%}"
    same = all(torch.equal(x, y) for x, y in zip(a["buffers"], b["buffers"], strict=True))
    return text if same else f"{text}, buffers DIFFER"


def run_subject(name: str, subject: Subject, repeats: int) -> Row:
    """All peers, gcsolve at each one's peak, all timed together."""
    model, example, _ = subject.make()
    arms: dict[str, nn.Module] = {}
    rows: dict[str, Row] = {}
    for peer, module in peers(subject, model):
        say(f"{name}: {peer}")
        try:
            rows[peer] = measured(module, example)
        except Exception as error:
            rows[peer] = {"failed": f"{type(error).__name__}: {str(error)[:60].splitlines()[0] if str(error) else ''}"}
            continue
        arms[peer] = module
    eager = rows["eager"]
    say(f"{name}: planning")
    traced = gcsolve.solve(model, example, budget=1.0, solver="store_all", progress=False)
    counted = gcsolve.solve(model, example, budget=1.0, solver="store_all", cost="flops", progress=False)
    for peer, row in list(rows.items()):
        if "failed" in row:
            continue
        ours = f"gcsolve at {peer}"
        budget = min(row["peak_bytes"], traced.baseline_peak_bytes)
        try:
            plan = traced.at(budget=f"{budget}B", solver="auto", progress=False)
        except gcsolve.InfeasibleBudget as error:
            rows[ours] = {"failed": f"no plan: the least is {mb(error.least_bytes or 0)} MB"}
            continue
        arms[ours] = copy.deepcopy(plan.module)
        least = counted.at(budget=f"{budget}B", solver="auto", progress=False, time_limit_s=20)
        rows[ours] = measured(arms[ours], example) | {
            "predicted_bytes": plan.peak_bytes,
            "overhead": plan.overhead,
            "least_flops": least.overhead_flops,  # of a plan for the fewest FLOPs instead of the least time
        }
        if rows[ours]["flops"] > (1 + SAME_FLOPS) * row["flops"]:
            arms[f"{ours}, flops"] = copy.deepcopy(least.module)
            rows[f"{ours}, flops"] = measured(arms[f"{ours}, flops"], example)
    say(f"{name}: timing {len(arms)} ways, {repeats} times each")
    arms["eager again"] = arms["eager"]
    seconds = interleaved_times(
        [functools.partial(step, module, example) for module in arms.values()], repeats, clock=time.process_time
    )
    times = dict(zip(arms, seconds, strict=True))
    noise = times.pop("eager again") / times["eager"]
    for arm, row in rows.items():
        if "failed" in row:
            continue
        row["step_s"] = times[arm]
        row["time_ratio"] = times[arm] / times["eager"]
        row["extra_flops"] = row["flops"] / eager["flops"] - 1
        row["same"] = sameness(row, eager)
    for row in rows.values():
        row.pop("grads", None)
        row.pop("buffers", None)
    return {"rows": rows, "noise": noise, "frontier": list(frontier(traced))}


def frontier(traced: gcsolve.Plan) -> Iterator[Row]:
    """Plans at falling budgets, predicted: for the figure's curve."""
    top, least = traced.baseline_peak_bytes, traced.minimum_budget(time_limit_s=20).one_rerun_bytes
    for k in range(FRONTIER):
        budget = top - (top - least) * k // (FRONTIER - 1)
        with contextlib.suppress(gcsolve.InfeasibleBudget):
            plan = traced.at(budget=f"{budget}B", solver="auto", progress=False, time_limit_s=20)
            yield {"peak_bytes": plan.peak_bytes, "extra_flops": plan.overhead_flops, "overhead": plan.overhead}


# --- table and figure ------------------------------------------------------------------------------------------------

HEADS = ("peer", "peak MB", "extra FLOPs", "step time", "same as eager", "gcsolve there: peak MB", "extra FLOPs",
         "(cost=flops)", "step time", "same as eager", "verdict")  # fmt: skip


def verdict(peer: Row, ours: Row, fewest: Row | None, noise: float) -> str:
    """What the pair shows, in words; FLOPs to `SAME_FLOPS`, times to `TIE` or the noise, whichever is wider.

    `fewest`: the plan with cost="flops", where it was measured.
    """

    def beside(plan: Row) -> str:
        flops = plan["extra_flops"] - peer["extra_flops"]
        ratio = plan["time_ratio"] / peer["time_ratio"]
        more = f"MORE FLOPs (+{flops:.1%})" if flops > SAME_FLOPS else "same FLOPs"
        counted = "fewer FLOPs" if flops < -SAME_FLOPS else more
        timed = "faster" if ratio < 1 / tie else "as fast" if ratio <= tie else "SLOWER"
        return f"{counted}, {timed} (x {ratio:.3f})"

    tie = max(TIE, noise, 1 / noise)
    told = [beside(ours)]
    if fewest:
        told.append(f"with cost=flops {beside(fewest)}")
    if "WRONG" in peer["same"] or "MISSING" in peer["same"] or "DIFFER" in peer["same"]:
        told.append("peer trains something else")
    return ", ".join(told)


def lines(results: dict[str, Any]) -> Iterator[str]:
    yield results["where"]
    yield ""
    for name, found in results["models"].items():
        yield f"## {name} (noise: eager against itself x {found['noise']:.3f})"
        yield ""
        body = []
        for peer, row in found["rows"].items():
            if peer.startswith("gcsolve"):
                continue
            if "failed" in row:
                body.append([peer, row["failed"], *[""] * (len(HEADS) - 2)])
                continue
            ours = found["rows"][f"gcsolve at {peer}"]
            left = [peer, mb(row["peak_bytes"]), f"{row['extra_flops']:.1%}", f"x {row['time_ratio']:.3f}", row["same"]]
            if "failed" in ours:
                body.append([*left, ours["failed"], "", "", "", "", "not reached"])
                continue
            right = [mb(ours["peak_bytes"]), f"{ours['extra_flops']:.1%}", f"{ours['least_flops']:.1%}"]
            right += [f"x {ours['time_ratio']:.3f}", ours["same"]]
            fewest = found["rows"].get(f"gcsolve at {peer}, flops")
            body.append([*left, *right, verdict(row, ours, fewest, found["noise"])])
        yield from table(HEADS, body)
        yield ""


def figure(results: dict[str, Any], path: Path) -> None:
    """Extra FLOPs and step time against measured peak, a column a model."""
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    from gcsolve.report.colours import BLACK, BLUE, GREEN, ORANGE, PINK, SKY

    style = {"eager": ("s", "#8c8c8c"), "per block": ("D", ORANGE), "√L": ("*", GREEN), "selective": ("P", PINK),
             "HF": ("X", BLUE), "compile": ("v", SKY)}  # fmt: skip
    found = results["models"]
    figure, axes = pyplot.subplots(2, len(found), figsize=(4 * len(found), 6.4), layout="constrained", squeeze=False)
    for column, (name, one) in enumerate(found.items()):
        top, bottom = axes[0, column], axes[1, column]
        curve = sorted((p["peak_bytes"] / 1e6, 100 * p["extra_flops"]) for p in one["frontier"])
        top.plot(*zip(*curve, strict=True), color=BLACK, linewidth=1, drawstyle="steps-post", zorder=2)
        for peer, row in one["rows"].items():
            if "failed" in row:
                continue
            ours = peer.startswith("gcsolve")
            if ours and peer.endswith(", flops"):
                continue
            mark, colour = ("o", BLACK) if ours else style[peer.split()[0] if "compile" in peer else peer]
            hollow = "WRONG" in row["same"] or "MISSING" in row["same"]
            for ax, y in ((top, 100 * row["extra_flops"]), (bottom, row["time_ratio"])):
                ax.plot(row["peak_bytes"] / 1e6, y, mark, color=colour, markersize=5 if ours else 9 if mark != "*" else 13,
                        markerfacecolor="none" if hollow else colour, zorder=4 if ours else 3)  # fmt: skip
        top.set_title(name, loc="left")
        bottom.set_xlabel("measured peak of the step, MB")
        for ax in (top, bottom):
            ax.grid(color="#ececec", linewidth=0.6)
            ax.set_axisbelow(True)
    axes[0, 0].set_ylabel("FLOPs over eager's, %")
    axes[1, 0].set_ylabel("step time / eager's")
    line = functools.partial(Line2D, [], [])
    handles = [line(marker=m, color=c, linestyle="none", label=n) for n, (m, c) in style.items()]
    handles.append(
        line(marker="v", color=SKY, markerfacecolor="none", linestyle="none", label="compile, wrong gradients")
    )
    handles.append(line(marker="o", color=BLACK, label="gcsolve at each peer's peak (line: predicted)"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=130)


def mb(size: float) -> str:
    return f"{size / 1e6:.1f}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="gcsolve beside its peers, measured.")
    parser.add_argument("--models", nargs="*", choices=[*SUBJECTS], help="default: all")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each way")
    parser.add_argument("--quick", action="store_true", help="smaller models; nothing is written")
    arguments = parser.parse_args(argv)
    stored = RESULTS / "peers.json"
    results: dict[str, Any] = {"models": {}}
    if stored.exists() and not arguments.quick:
        results = json.loads(stored.read_text())
    names = SUBJECTS if arguments.models is None else arguments.models
    if names:
        results["where"] = where()
    for name in names:
        torch.compiler.reset()
        results["models"][name] = run_subject(name, (QUICK if arguments.quick else SUBJECTS)[name], arguments.repeats)
        gc.collect()
        if not arguments.quick:
            RESULTS.mkdir(exist_ok=True)
            stored.write_text(json.dumps(results, indent=1) + "\n")
    if not arguments.quick:
        (RESULTS / "peers.txt").write_text("\n".join(lines(results)) + "\n")
        figure(results, RESULTS / "peers.png")
    print("\n".join(lines(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
