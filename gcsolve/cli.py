"""The command line: `gcsolve demo | plan | compare | fit | solvers | devices`, also as `python -m gcsolve`.

An error of gcsolve ends in one line on standard error and exit status 2; Ctrl-C in one line and status 130.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gcsolve
from gcsolve.errors import ArgumentError, GcsolveError
from gcsolve.util.checks import whole
from gcsolve.util.factory import call_factory, named_factory


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after the program's name; None: those of the process.

    Returns:
        the exit status: 0, 2 after an error of gcsolve (argparse exits with 2 for unknown arguments), or 130 after Ctrl-C.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.run is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        arguments.run(arguments)
    except GcsolveError as error:
        # Error texts with several lines (a breakdown) are joined to one.
        print(f"gcsolve: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gcsolve: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gcsolve",
        description="Train a PyTorch model inside a given amount of memory at the least recomputation.",
    )
    parser.add_argument("--version", action="version", version=f"gcsolve {gcsolve.__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(metavar="command")

    demo = commands.add_parser("demo", help="plan and train a GPT of GPT-2-small's shape at half its store-all peak")
    demo.add_argument("--budget", default="0.5", help="fraction of the store-all peak, or a size (default: 0.5)")
    demo.add_argument("--steps", type=int, default=2, metavar="N", help="training steps of each plan (default: 2)")
    demo.add_argument("--layers", type=int, default=12, help=argparse.SUPPRESS)
    demo.set_defaults(run=_demo)

    _add_plan_options(commands.add_parser("plan", help="plan one training step of a model within a budget"))
    _add_compare_options(commands.add_parser("compare", help="compare the plans of several solvers at several budgets"))
    _add_fit_options(commands.add_parser("fit", help="find the largest batch whose training step fits a device"))
    commands.add_parser("solvers", help="list the methods that --solver accepts").set_defaults(run=_solvers)
    commands.add_parser("devices", help="list the devices that --device accepts").set_defaults(run=_devices)
    return parser


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument(
        "--budget-gb",
        type=float,
        metavar="GB",
        help="allowed peak in GB (1e9 bytes); without a budget: the device's memory less a reserve",
    )
    budget.add_argument("--budget", help='allowed peak as a size ("20GiB") or a fraction of the store-all peak ("0.5")')
    parser.add_argument("--solver", default="auto", help="a method that `gcsolve solvers` lists (default: auto)")
    _add_step_options(parser, time_limit_s=60.0)
    parser.add_argument("--decisions", action="store_true", help="also list what is kept and what is recomputed")
    parser.add_argument(
        "--verify",
        type=int,
        metavar="STEPS",
        help="also run so many steps of the plan and of the untouched model, and compare",
    )
    parser.set_defaults(run=_plan)


def _add_compare_options(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    parser.add_argument(
        "--budgets",
        nargs="+",
        metavar="BUDGET",
        default=["0.8", "0.6", "0.4"],
        help="fractions of the store-all peak, or sizes (default: 0.8 0.6 0.4)",
    )
    parser.add_argument(
        "--solvers", nargs="+", metavar="SOLVER", help="methods that `gcsolve solvers` lists (default: all)"
    )
    _add_step_options(parser, time_limit_s=60.0)
    parser.add_argument("--measure", action="store_true", help="also run every plan beside the untouched model")
    parser.add_argument("--json", metavar="FILE", help="also write all results to FILE")
    parser.add_argument("--plot", metavar="FILE", help="also draw overhead against memory to FILE (.png, .svg, .pdf)")
    parser.set_defaults(run=_compare)


def _add_fit_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="module:factory",
        help="a function of batch (and seq) that returns (model, example_input) or (model, example_input, loss)",
    )
    parser.add_argument("--batch", default="1..64", help="sizes to search (1..64) or to try (1,2,4); default: 1..64")
    parser.add_argument("--seq", type=int, metavar="N", help="sequence length, passed to the factory")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument(
        "--budget-gb",
        type=float,
        metavar="GB",
        help="allowed peak in GB (1e9 bytes); without a budget: the device's memory less a reserve",
    )
    budget.add_argument("--budget", help='allowed peak as a size ("20GiB")')
    _add_step_options(parser, time_limit_s=20.0)
    parser.set_defaults(run=_fit)


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="module:factory",
        help="a function without arguments that returns (model, example_input) or (model, example_input, loss)",
    )


def _add_step_options(parser: argparse.ArgumentParser, time_limit_s: float) -> None:
    """The options that say which step is planned, and for how long the solver may search."""
    parser.add_argument("--device", help="where the step will run; see `gcsolve devices` (default: where the model is)")
    parser.add_argument("--cost", default="auto", help="flops, roofline or measured (default: roofline)")
    parser.add_argument("--optimizer", help="a class in torch.optim (AdamW), or bytes per parameter; its memory counts")
    parser.add_argument(
        "--scope",
        default="step",
        help="what the budget covers: step (default), or activations: what forward and backward allocate",
    )
    parser.add_argument(
        "--gradient-accumulation",
        "--accumulate",
        action="store_true",
        help="the step begins with gradients of earlier steps in .grad, which count",
    )
    parser.add_argument(
        "--backward-from",
        default="scalars",
        metavar="OUTPUTS",
        help="the outputs that backward starts from: scalars (default: scalar outputs alone, if there are any), or all",
    )
    parser.add_argument(
        "--autocast-backward",
        action="store_true",
        help="backward is called inside the autocast block that the call is in (default: outside)",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=time_limit_s,
        metavar="SECONDS",
        help=f"for the solver (default: {time_limit_s:g})",
    )


# --- commands --------------------------------------------------------------------------------------------------------


def _demo(arguments: argparse.Namespace) -> None:
    from gcsolve import demo

    demo.run(_budget(arguments.budget), steps=arguments.steps, layers=arguments.layers)


def _plan(arguments: argparse.Namespace) -> None:
    if arguments.verify is not None:
        whole("--verify", arguments.verify, least=1)
    model, example_input, loss = call_factory(named_factory(arguments.target))
    size = {"budget_gb": arguments.budget_gb}
    if arguments.budget is not None:
        size = {"budget": _budget(arguments.budget)}
    plan = gcsolve.solve(model, example_input, **size, loss=loss, solver=arguments.solver, **_settings(arguments))
    print(plan.summary())
    if arguments.decisions:
        _print_decisions(plan)
    if arguments.verify is not None:
        print(plan.verify(steps=arguments.verify).summary())


def _compare(arguments: argparse.Namespace) -> None:
    """`gcsolve compare`; files that cannot be written are refused before the work."""
    _refuse_unwritable("--json", arguments.json)
    _refuse_unwritable("--plot", arguments.plot)
    if arguments.plot:
        from gcsolve.report.axes import refuse_unknown_format

        refuse_unknown_format("--plot", arguments.plot)
    model, example_input, loss = call_factory(named_factory(arguments.target))
    comparison = gcsolve.compare(
        model,
        example_input,
        budgets=[_budget(text) for text in arguments.budgets],
        solvers=arguments.solvers or gcsolve.solvers(),
        measure=arguments.measure,
        loss=loss,
        **_settings(arguments),
    )
    print(comparison.summary())
    if arguments.json:
        comparison.to_json(arguments.json)
    if arguments.plot:
        comparison.plot().figure.savefig(arguments.plot, dpi=150)


def _fit(arguments: argparse.Namespace) -> None:
    answer = gcsolve.fit(
        named_factory(arguments.target),
        _batches(arguments.batch),
        seq=arguments.seq,
        budget_gb=arguments.budget_gb,
        budget=arguments.budget,
        **_settings(arguments),
    )
    print(answer.summary())


def _solvers(_: argparse.Namespace) -> None:
    """`gcsolve solvers`: each method with the first paragraph of its file's docstring."""
    import inspect

    from gcsolve.solver.registry import SOLVERS

    def first_words(thing: Any) -> str:
        return (thing.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")

    files = [inspect.getmodule(type(solver)) for solver in SOLVERS.values()]
    rows = []
    for (name, solver), file in zip(SOLVERS.items(), files, strict=True):
        # Two solvers of one file are told apart by the docstrings of their classes.
        texts = [first_words(file), first_words(solver)] if files.count(file) > 1 else [first_words(file)]
        rows.append([name, " ".join(texts)])
    _print_table(["solver", "method"], rows)


def _devices(_: argparse.Namespace) -> None:
    """`gcsolve devices`: the figures of each device, in GB, GB/s and TFLOP/s."""
    from gcsolve.cost.devices import devices

    def tera(flops: float | None) -> str:
        return "" if flops is None else f"{flops / 1e12:.4g}"

    rows = [
        [
            spec.name,
            f"{spec.memory_bytes / 1e9:.0f}",
            f"{spec.bandwidth_bytes_per_s / 1e9:.0f}",
            *(
                tera(spec.peak_flops.get(dtype))
                for dtype in ("float8", "bfloat16", "float16", "tf32", "float32", "float64")
            ),
            f"{spec.launch_s * 1e6:g}",
            spec.source,
        ]
        for spec in devices()
    ]
    columns = [
        "device",
        "GB",
        "GB/s",
        "fp8",
        "bf16",
        "fp16",
        "tf32",
        "fp32",
        "fp64",
        "launch µs",
        "source of the figures (TFLOP/s, dense; launch: the usual time between two small kernels in eager PyTorch)",
    ]
    _print_table(columns, rows, right=range(1, 10))


# --- from arguments to values ----------------------------------------------------------------------------------------


def _refuse_unwritable(option: str, file: str | None) -> None:
    """Raise `ArgumentError` before the work if its result could not be written to `file`."""
    if not file:
        return
    if Path(file).is_dir():
        raise ArgumentError(f"{option} {file} is a folder; name a file in it")
    if not Path(file).parent.is_dir():
        raise ArgumentError(f"{option} {file}: there is no folder {Path(file).parent}; make it first")


def _budget(text: str) -> str | float:
    """A number as a float, a fraction of the store-all peak; other text as it is, which the API checks as a size."""
    try:
        return float(text)
    except ValueError:
        return text


def _batches(text: str) -> Sequence[int]:
    """The batch sizes: "1..64" is a range, "1,2,4" a list."""
    first, dots, last = text.partition("..")
    try:
        sizes = range(int(first), int(last) + 1) if dots else [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ArgumentError(f"--batch {text} is neither of the form 1..64 nor of the form 1,2,4") from error
    if not sizes or min(sizes) < 1:
        raise ArgumentError(f"--batch {text} names no batch sizes ≥ 1; write the smaller first, as in 1..64, or 1,2,4")
    return sizes


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `_add_step_options`."""
    return {
        "device": arguments.device,
        "cost": arguments.cost,
        "optimizer": _optimizer(arguments.optimizer),
        "scope": arguments.scope,
        "gradient_accumulation": arguments.gradient_accumulation,
        "backward_from": arguments.backward_from,
        "autocast_backward": arguments.autocast_backward,
        "time_limit_s": arguments.time_limit,
    }


def _optimizer(text: str | None) -> Any:
    """A number as bytes per parameter; other text as it is, the name of a class."""
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        return text


# --- tables ----------------------------------------------------------------------------------------------------------


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i in right else "left", no_wrap=i == 0)
    for row in rows:
        table.add_row(*row)
    # In a file or a pipe the table is so wide that no line is folded.
    Console(width=None if sys.stdout.isatty() else 1000).print(table)


def _print_decisions(plan: Any) -> None:
    from gcsolve.util.sizes import size_text

    rows = [
        [d.action, str(d.times), size_text(d.size_bytes), d.op, d.module, f"{d.dtype}{list(d.shape)}", d.source]
        for d in plan.decisions
    ]
    _print_table(["action", "reruns", "size", "op", "module", "value", "source"], rows, right=(1, 2))


if __name__ == "__main__":
    sys.exit(main())
