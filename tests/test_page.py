"""The page: everything in one file, what it says is what the plan says, and a real browser opens it without an error."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gcsolve
from gcsolve.demo import GPT
from gcsolve.util.sizes import size_text

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync")  # fmt: skip


@pytest.fixture(scope="module")
def plan() -> gcsolve.Plan:
    torch.manual_seed(0)
    model = GPT(vocabulary=256, layers=2, width=64, heads=2, length=64)
    return gcsolve.solve(model, torch.randint(0, 256, (4, 64)), budget=0.8)


@pytest.fixture(scope="module")
def page(plan: gcsolve.Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    plan.save_html(path)
    return path


def test_one_file_that_fetches_nothing(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)""", text)
    assert "http" not in text.replace("http-equiv", "")
    assert "default-src 'none'" in text


def test_the_data_is_the_plans(plan: gcsolve.Plan, page: Path) -> None:
    found = re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    assert sum(data["runs"][data["peak"]][4]) == plan.peak_bytes
    assert max(b for _, b in data["base"]) == plan.baseline_peak_bytes
    assert [d[0] for d in data["decisions"]] == [d.action for d in plan.decisions]
    assert data["budget"] == plan.budget_bytes


def test_a_name_cannot_end_the_script(plan: gcsolve.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(plan), "summary", lambda _self: "</script><b>")
    plan.save_html(tmp_path / "x.html")
    assert (tmp_path / "x.html").read_text().count("</script>") == 2


def test_in_a_notebook(plan: gcsolve.Plan) -> None:
    html = plan._repr_html_()
    for expected in (
        size_text(plan.peak_bytes),
        size_text(plan.budget_bytes),
        f"{plan.overhead:.2%}",
        "<svg",
        "store-all",
    ):
        assert expected in html
    assert len(html) < 60_000


@pytest.fixture(scope="module")
def tab(page: Path) -> Iterator[Any]:
    """The page open in a headless Chromium; `tab.problems` lists console errors, exceptions and requests."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright (extra dev)")
    if CHROMIUM is None:
        pytest.skip("needs a Chromium on the PATH")
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        opened = browser.new_page(viewport={"width": 1200, "height": 900})
        problems: list[str] = []
        opened.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
        opened.on("pageerror", lambda error: problems.append(str(error)))
        opened.on("request", lambda r: problems.append(r.url) if not r.url.startswith(("file:", "data:")) else None)
        opened.goto(page.as_uri())
        yield opened
        assert problems == []
        browser.close()


def test_what_is_alive_at_the_peak_and_why_in_two_clicks(plan: gcsolve.Plan, tab: Any) -> None:
    tab.click("#to-peak")
    title = tab.inner_text("#alive-title")
    assert title.startswith("Alive at the peak")
    assert size_text(plan.peak_bytes) in title
    assert plan.peak_at in title
    rows = tab.locator("#alive tbody tr")
    shown = [float(rows.nth(i).locator("td").first.get_attribute("data-v")) for i in range(rows.count())]
    assert sum(shown) == plan.peak_bytes
    first = sum(1 for _, size in plan.problem.graph.external if size)
    assert shown[:first] == sorted(shown[:first], reverse=True)
    rows.nth(first).click()
    text = tab.inner_text("tr.why")
    assert "Why: " in text
    assert tab.evaluate("(t => t.scrollWidth <= t.parentElement.clientWidth)(document.querySelector('#alive'))")
    assert "Read at: " in text


def _bytes(text: str) -> float:
    """ "parameters 1.5 MB" -> 1.5e6."""
    number, unit = text.split()[-2:]
    return float(number) * {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


def test_hover_says_op_module_source_and_bytes(tab: Any) -> None:
    tab.hover("#memory", position={"x": 500, "y": 100})
    text = tab.inner_text("#tip")
    assert re.match(r"(re)?run: ", text)
    assert "alive: " in text
    sizes = [_bytes(part) for part in text.splitlines()[-1].split(", ")]
    assert len(sizes) > 1
    assert sizes == sorted(sizes, reverse=True)
    tab.hover("#lanes", position={"x": 500, "y": 40})
    text = tab.inner_text("#tip")
    assert "held since the forward" in text or "made again" in text
    assert "aten." in text


def test_search_sort_and_keys(plan: gcsolve.Plan, tab: Any) -> None:
    tab.fill("#search", "blocks.1")
    wanted = [d for d in plan.decisions if "blocks.1" in d.module]
    assert tab.inner_text("#hits") == f"{len(wanted)} of {len(plan.decisions)} decisions"
    assert tab.locator("#decisions tbody tr").count() == len(wanted)
    tab.click("#decisions thead th:nth-child(3)")
    sizes = [
        float(v)
        for v in tab.locator("#decisions tbody tr td:nth-child(3)").evaluate_all("a => a.map(e => e.dataset.v)")
    ]
    assert sizes == sorted(sizes, reverse=True)
    tab.fill("#search", "")
    before = tab.inner_text("#alive-title")
    tab.locator("#memory").press("ArrowLeft")
    assert tab.inner_text("#alive-title") != before
