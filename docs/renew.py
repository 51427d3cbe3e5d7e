"""Writes the parts of README.md and docs/*.md that commands print: `python docs/renew.py`.

A part stands between `<!-- renew:NAME -->` and `<!-- /renew -->`; NAME is a function of this file. Most are made from
benchmarks/results/*.json; both pictures of docs/draw_rooms.py are drawn anew too. That takes no second.

`python docs/renew.py --run` also runs the README's example, `gcsolve demo` and the `gcsolve fit` of docs/devices.md, and
puts what they print in place (about three minutes on two CPU cores). `tests/test_docs.py` says when a part is stale.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from docs import draw_rooms

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"(<!-- renew:(\w+) -->\n)(.*?)(<!-- /renew -->)", re.DOTALL)
MODEL_NAMES = {"gpt2": "GPT-2", "llama": "Llama", "resnet50": "ResNet-50", "vit_small": "ViT-S", "unet": "U-Net"}


def result(name: str) -> Any:
    """What `python benchmarks/NAME.py` stored."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def model_name(key: str) -> str:
    return MODEL_NAMES.get(key, key.upper())


def span(values: Iterable[float], form: str) -> str:
    """ "least to greatest", or the one value when both read alike."""
    numbers = list(values)
    low, high = format(min(numbers), form), format(max(numbers), form)
    return low if low == high else f"{low} to {high}"


# --- from benchmarks/results --------------------------------------------------------------------------------------------


def peers() -> str:
    """For each peer and model: the peer's peak over eager's, its step time, and gcsolve's at that peak, over eager's."""
    models = result("peers")["models"]
    heads = ["", *(model_name(key) for key in models)]
    names = [name for name in next(iter(models.values()))["rows"] if not name.startswith("gcsolve")]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name in names:
        cells = []
        for model in models.values():
            rows = model["rows"]
            cells.append(_peer_cell(rows, name) if name in rows else "–")
        lines.append(f"| {PEER_NAMES.get(name, name)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


PEER_NAMES = {"per block": "checkpoint per block", "√L": "√L segments", "HF": "HF switch", "eager": "eager itself"}


def _peer_cell(rows: dict[str, Any], name: str) -> str:
    peer, own = rows[name], rows[f"gcsolve at {name}"]
    mark = "†" if "WRONG" in peer["same"] else "‡" if "DIFFER" in peer["same"] else ""
    share = peer["peak_bytes"] / rows["eager"]["peak_bytes"]
    return f"{share:.0%}: {peer['time_ratio']:.2f}{mark} → {own['time_ratio']:.2f}"


def peers_summary() -> str:
    """Ranges of gcsolve's step time over each kind of peer's, at that peer's peak."""
    models = result("peers")["models"].values()

    def against(*names: str) -> str:
        pairs = [(m["rows"][f"gcsolve at {n}"], m["rows"][n]) for m in models for n in names if n in m["rows"]]
        return span((own["time_ratio"] / peer["time_ratio"] for own, peer in pairs), ".2f")

    compiled = [n for n in next(iter(models))["rows"] if n.startswith("compile")]
    wrong = sum("WRONG" in row["same"] for m in models for row in m["rows"].values())
    noise = span((m["noise"] for m in models), ".2f")
    return (
        f"In its place gcsolve takes {against('per block', '√L', 'HF')} of the step time of per-block, √L and Hugging Face's\n"
        f"checkpointing, {against('selective')} of selective checkpointing's, {against(*compiled)} of the compile budget's, "
        f"and\n{against('eager')} of eager's own (eager against itself: {noise}). Of the compile budget's settings, {wrong} "
        "give wrong gradients.\n"
    )


def main_job() -> str:
    """What all rows of the main job have in common, and the overheads at 80 and 60 %."""
    models = result("main_job")["models"]
    rows = [(key, row) for key, model in models.items() for row in model["rows"] if "infeasible" not in row]
    equal = sum(bool(row["equal"]) for _, row in rows)
    kept = sum(row["measured_bytes"] <= row["budget_bytes"] for _, row in rows)
    ratio = span((row["predicted_bytes"] / row["measured_bytes"] for _, row in rows), ".4f")
    overheads = "; ".join(
        f"{model_name(key)} " + " / ".join(_overhead_at(model["rows"], budget) for budget in ("80%", "60%"))
        for key, model in models.items()
    )
    gap = max(row["gap"] for _, row in rows if row["budget"] != "40%")
    return (
        f"- {len(rows)} of {sum(len(m['rows']) for m in models.values())} rows have a plan; {kept} keep the budget and "
        f"{equal} are bitwise equal over three optimizer steps.\n"
        f"- Predicted peak over measured peak: {ratio}.\n"
        f"- Overheads at 80 / 60 % of store-all: {overheads}.\n"
        f"- At 80 and 60 %, and at the least budget + 2 %, each plan is within {gap:.2%} of a step of what is proven.\n"
    )


def _overhead_at(rows: list[dict[str, Any]], budget: str) -> str:
    (row,) = [row for row in rows if row["budget"] == budget]
    return "no plan" if "infeasible" in row else f"{row['overhead']:.2%}"


def cost_accuracy() -> str:
    """How far predicted step times are from measured ones."""
    rows = [row for model in result("cost_accuracy").values() for row in model]
    off = span((row["predicted"] / row["measured"][1] - 1 for row in rows), "+.1%")
    itself = span((row["itself"][1] for row in rows), ".2f")
    return (
        f"- {len(rows)} plans; predicted step time ratio against the measured median: {off}.\n"
        f"- In the same rounds, store-all's step to itself: {itself}.\n"
    )


def large() -> str:
    """How near the plans of large models are to any schedule's bound, and how time grows."""
    stored = result("large")
    rows = [row for model in stored["models"].values() for row in model["rows"]]
    ops = max(m["forward_ops"] + m["backward_ops"] for m in stored["models"].values())
    return (
        f"- {len(rows)} plans of {len(stored['models'])} models with up to {ops:,} ops: each within "
        f"{max(row['any_gap'] for row in rows):.2%} of a step of what *any* schedule could do, "
        f"solved in {max(row['solve_s'] for row in rows):.1f} s at most.\n"
    )


def solvers() -> str:
    """How many of the overheads that are known from elsewhere are reached."""
    rows = [(graph, row) for graph, rows in result("solvers")["graphs"].items() for row in rows]
    known = [(graph, row) for graph, row in rows if row["known"] is not None]
    once = [row for _, row in known if row["solver"] == "one_epoch"]
    better = [
        f"{graph} at {float(row['budget']):.0%} ({100 * row['overhead']:.2f} instead of {row['known']:.2f} %)"
        for graph, row in known
        if row["solver"] == "auto" and 100 * row["overhead"] < row["known"] - 0.01
    ]
    return (
        f"- With at most one rerun a value, {sum(r['reached'] for r in once)} of {len(once)} overheads known from elsewhere "
        f"are reached, in {max(r['seconds'] for r in once):.1f} s at most.\n"
        f"- `auto`, which stops at its default gap of 0.5 %, finds cheaper plans with more reruns: {', '.join(better)}.\n"
    )


def zoo() -> str:
    """How many architectures are planned, equal, and reached by the two rules."""
    rows = list(result("zoo")["rows"].values())
    planned = [row for row in rows if "predicted_bytes" in row]
    ratio = span((row["predicted_bytes"] / row["measured_bytes"] for row in planned), ".4f")
    fits = {name: sum(row["rivals"][name] is not None for row in planned) for name in ("uniform", "blocks")}
    return (
        f"- {len(planned)} of {len(rows)} architectures are planned, and {sum(bool(r['equal']) for r in planned)} are bitwise "
        "equal over three optimizer steps.\n"
        f"- Predicted peak over measured peak: {ratio}.\n"
        f"- At these budgets equal segments fit {fits['uniform']} of them, and one checkpoint a block {fits['blocks']}.\n"
    )


# --- from the package's source -------------------------------------------------------------------------------------------


def rooms() -> str:
    """What each room owns and imports."""
    imports = draw_rooms.room_imports()
    lines = ["| room | owns | imports |", "|---|---|---|"]
    for room in draw_rooms.ROOMS:
        others = ", ".join(sorted(imports[room.title])) or "–"
        lines.append(f"| {room.title} | {room.owns} | {others} |")
    return "\n".join(lines) + "\n"


def files() -> str:
    """Every file of the package with the first sentence of its docstring, room by room."""
    parts: dict[str, list[Path]] = {}
    for path in sorted(draw_rooms.PACKAGE.rglob("*.py")):
        if path.read_text().strip():
            parts.setdefault(path.relative_to(draw_rooms.PACKAGE).parts[0], []).append(path)
    lines = []
    for room in draw_rooms.ROOMS:
        lines += [f"### {room.title}", "", "| file | what it holds |", "|---|---|"]
        for name in room.names:
            for path in parts.get(f"{name}.py" if name else "__init__.py", parts.get(name, [])):
                lines.append(f"| `{path.relative_to(draw_rooms.PACKAGE)}` | {_first_sentence(path)} |")
        lines.append("")
    return "\n".join(lines)


def _first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    sentence = re.split(r"(?<=[a-z`)\]])\.(?=\s)", text.split("\n\n")[0], maxsplit=1)[0]
    return " ".join(sentence.split()).rstrip(".").replace("|", "\\|")


# --- from commands ------------------------------------------------------------------------------------------------------


def example() -> str:
    """The README's example, as it prints."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return _printed([sys.executable, "-c", code])


def demo() -> str:
    return _printed([sys.executable, "-m", "gcsolve", "demo"])


def fit() -> str:
    batch, where = ("--batch", "1..64", "--seq", "1024"), ("--device", "rtx4090", "--optimizer", "adamw")
    return _printed([sys.executable, "-m", "gcsolve", "fit", "gcsolve.demo:gpt_medium", *where, *batch])


def _printed(command: list[str]) -> str:
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return "```\n" + "\n".join(line.rstrip() for line in printed.strip().splitlines()) + "\n```\n"


Maker = Callable[[], str]
FROM_FILES: dict[str, Maker] = {
    make.__name__: make for make in (peers, peers_summary, main_job, cost_accuracy, large, solvers, zoo, rooms, files)
}
FROM_COMMANDS: dict[str, Maker] = {make.__name__: make for make in (example, demo, fit)}


def renewed(text: str, makers: dict[str, Maker]) -> str:
    """`text` with each part that one of `makers` makes written anew."""

    def block(match: re.Match[str]) -> str:
        head, name, body, tail = match.groups()
        return head + (makers[name]() if name in makers else body) + tail

    return BLOCK.sub(block, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="also run the commands whose output the pages show")
    makers = FROM_FILES | (FROM_COMMANDS if parser.parse_args().run else {})
    for page in PAGES:
        page.write_text(renewed(page.read_text(), makers))
    for name, draw in draw_rooms.PICTURES.items():
        (draw_rooms.FIGURES / name).write_text(draw())


if __name__ == "__main__":
    main()
