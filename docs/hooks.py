"""Files outside docs/ that the site shows: the notebooks and two figures, where links from the repository's root lead to.

Pages of docs/ link to them with `../`, as GitHub wants it; on the site they lie beside the pages.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
SHOWN = ("notebooks/*.ipynb", "benchmarks/results/peers.png", "docs/figures/frontier.png")


@event_priority(100)  # before the plugin that renders notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    for pattern in SHOWN:
        for path in sorted(ROOT.glob(pattern)):
            uri = path.relative_to(ROOT).as_posix()
            files.append(File(uri, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"\]\(\.\./(?=notebooks/|benchmarks/|docs/)", "](", markdown)
