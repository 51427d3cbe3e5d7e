"""The command line: what each command prints, and that refusals are one line and status 2."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from gcsolve.cli import main
from gcsolve.cost.devices import devices
from gcsolve.demo import GPT
from gcsolve.errors import ArgumentError
from gcsolve.solver.registry import solvers
from gcsolve.util.factory import named_factory

MODELS = """
import torch

def small():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(32, 32), torch.nn.GELU()] * 4)
    return model, torch.randn(512, 32)

def with_loss():
    model, x = small()
    return model, x, lambda y: y.square().mean()

def nothing(**sizes):
    return 7

def raising():
    raise ValueError("no such checkpoint: small.pt")

def sized(batch, seq):
    return nothing()

broken = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with a module of factories in it; its name."""
    name = f"cli_models_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(MODELS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line on standard error of a command that must be refused."""
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("gcsolve: ")
    assert err.count("\n") == 1
    return err


def test_solvers_lists_every_registered(capsys):
    assert main(["solvers"]) == 0
    out = capsys.readouterr().out
    for name in solvers():
        assert f" {name} " in out
    methods = [line.split(maxsplit=1)[1] for line in out.splitlines() if line.strip().split(" ")[0] in solvers()]
    assert len(set(methods)) == len(solvers())  # no two read the same


def test_devices_lists_every_known_with_its_source(capsys):
    assert main(["devices"]) == 0
    out = capsys.readouterr().out
    for spec in devices():
        assert f" {spec.name} " in out
        assert spec.source in out


def test_plan_prints_the_summary(capsys, here):
    assert main(["plan", f"{here}:small", "--budget", "0.8", "--decisions"]) == 0
    out = capsys.readouterr().out
    assert "of budget" in out
    assert "overhead" in out
    assert "recompute" in out


def test_plan_with_loss_optimizer_device_and_verify(capsys, here):
    words = ["plan", f"{here}:with_loss", "--budget-gb", "0.1", "--optimizer", "AdamW", "--solver", "store_all"]
    assert main([*words, "--cost", "flops", "--verify", "1"]) == 0
    out = capsys.readouterr().out
    assert "optimizer" in out
    assert "bitwise equal" in out
    assert main([*words, "--device", "h200"]) == 0
    assert "h200" in capsys.readouterr().out


def test_compare_has_a_row_a_solver(capsys, here):
    assert main(["compare", f"{here}:with_loss", "--budgets", "1.0", "0.8", "1kB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines if line.split() and line.split()[0] in solvers()}
    assert set(rows) == set(solvers())
    assert rows["store_all"].split()[1] == "0.00%"
    assert all("no plan" in row for row in rows.values())  # nothing fits 1 kB


def test_budget_that_cannot_be_met(capsys, here):
    assert "cannot be met" in refused(capsys, "plan", f"{here}:small", "--budget", "1kB")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--budget", "much"], "'much' is not a size"),
        (["--budget", "-1"], "above 0"),
        (["--budget-gb", "nan"], "finite"),
        (["--budget", "0.5", "--solver", "magic"], "known solvers"),
        (["--budget", "0.5", "--device", "h9000"], "known devices"),
        (["--budget", "0.5", "--cost", "speed"], "known cost models"),
        (["--budget", "0.5", "--scope", "moon"], "known scopes"),
        (["--budget", "0.5", "--optimizer", "Adamm"], "AdamW"),
    ],
)
def test_bad_words_name_what_is_accepted(capsys, here, words, text):
    assert text in refused(capsys, "plan", f"{here}:small", *words)


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("nocolon", "module:factory"),
        ("no_such_module_here:f", "no module"),
        ("./sub/{here}.py:small", "names a file; write the module, seen from the current folder: sub.{here}:small"),
        ("{here}:absent", "no function 'absent'"),
        ("{here}:broken", "no function 'broken'"),
        ("{here}:raising", "the factory {here}:raising() raised ValueError at {here}.py:17: no such checkpoint"),
        (
            "{here}:sized",
            "takes (batch, seq), and it is called as {here}:sized(): missing a required argument: 'batch'",
        ),
        ("{here}:nothing", "must return (model, example_input)"),
    ],
)
def test_bad_targets(capsys, here, target, text):
    for command, options in (("plan", ["--budget", "0.5"]), ("compare", []), ("fit", ["--batch", "1"])):
        if command != "fit" or "()" not in text:  # fit calls it with a batch size
            assert text.format(here=here) in refused(capsys, command, target.format(here=here), *options)


def test_a_factory_that_raises_for_a_batch_size_names_the_call_and_the_line(capsys, here):
    Path(f"{here}.py").write_text("def small(batch, seq=8):\n    return [][batch]\n")
    expected = f"the factory {here}:small(batch=3, seq=16) raised IndexError at {here}.py:2: list index out of range"
    assert expected in refused(capsys, "fit", f"{here}:small", "--batch", "3", "--seq", "16", "--device", "h200")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (
            "import no_such_dependency",
            "raised ModuleNotFoundError at {here}.py:1: No module named 'no_such_dependency'",
        ),
        ("\n1 / 0", "raised ZeroDivisionError at {here}.py:2: division by zero"),
        ("def small(:", "raised SyntaxError: invalid syntax ({here}.py, line 1)"),
    ],
)
def test_an_import_that_fails_inside_the_users_module_names_its_line(capsys, here, code, text):
    Path(f"{here}.py").write_text(code + "\n")
    expected = f"{here}:small: importing {here} " + text.format(here=here)
    for command in ("plan", "compare", "fit"):
        assert expected in refused(capsys, command, f"{here}:small")
    with pytest.raises(ArgumentError) as raised:
        named_factory(f"{here}:small")
    assert raised.value.__cause__ is not None


def test_both_budgets_are_refused(capsys, here):
    with pytest.raises(SystemExit) as exit_:
        main(["plan", f"{here}:small", "--budget", "0.5", "--budget-gb", "1"])
    assert exit_.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


def test_what_cannot_be_written_or_run_is_refused_before_the_work(capsys, here, tmp_path):
    compare = ("compare", f"{here}:raising")  # so that any work would be another refusal
    for option in ("--json", "--plot"):
        assert f"there is no folder {tmp_path / 'no'}" in refused(capsys, *compare, option, f"{tmp_path}/no/x.png")
        assert "is a folder" in refused(capsys, *compare, option, str(tmp_path))
    assert "no figure is written as .doc; known endings: " in refused(capsys, *compare, "--plot", "x.doc")
    assert "--verify=0 must be" in refused(capsys, "plan", f"{here}:raising", "--verify", "0")
    assert "steps=0 must be" in refused(capsys, "demo", "--steps", "0")
    assert "is not a size" in refused(capsys, "demo", "--budget", "much")


def test_an_interrupt_is_one_line(capsys, here):
    Path(f"{here}.py").write_text("def small():\n    raise KeyboardInterrupt\n")
    assert main(["plan", f"{here}:small"]) == 130
    assert capsys.readouterr() == ("", "gcsolve: interrupted\n")


def test_without_a_command_all_are_listed(capsys):
    assert main([]) == 2
    err = capsys.readouterr().err
    for command in ("demo", "plan", "compare", "fit", "solvers", "devices"):
        assert f"\n    {command} " in err


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "gcsolve", "solvers"], capture_output=True, text=True, check=True)
    assert "store_all" in done.stdout
    assert done.stderr == ""


def test_demo(capsys, monkeypatch):
    """As it is called, on a narrower GPT: every plan's gradients equal, the solved plan within half the peak."""

    def narrow() -> tuple[GPT, torch.Tensor]:
        torch.manual_seed(0)
        return GPT(vocabulary=512, layers=4, width=96, heads=4), torch.randint(0, 512, (1, 512))

    monkeypatch.setattr("gcsolve.demo.gpt2_small", narrow)
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    assert "NOT" not in out
    assert out.count("bitwise equal") == 5
    solved = next(line for line in out.splitlines() if "solved (" in line)
    assert " yes " in solved


@pytest.mark.heavy
def test_the_demos_model_is_planned_at_half_its_peak(capsys):
    assert main(["plan", "gcsolve.demo:gpt2_small", "--budget", "0.5"]) == 0
    assert "of budget" in capsys.readouterr().out
