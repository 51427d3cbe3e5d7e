"""The first page is the README; its links to docs/ are links to here, and to files that are not here plain text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri != "index.md":
        return markdown
    text = (Path(__file__).parent.parent / "README.md").read_text().replace("](docs/", "](")
    return re.sub(r"(?<!!)\[([^]]*)\]\(((?:notebooks|benchmarks)/[^)]*)\)", r"\1 (`\2`)", text)
