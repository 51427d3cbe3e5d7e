"""The first page is the README; its links to docs/ are links to here."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri != "index.md":
        return markdown
    return (Path(__file__).parent.parent / "README.md").read_text().replace("](docs/", "](")
