"""Tables as plain text and as HTML."""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence


def text_table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Columns two spaces apart under a ruled head; the columns whose indices are in `right` are flush right."""
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        padded = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(padded).rstrip()

    return "\n".join([line(heads), "  ".join("─" * w for w in widths), *map(line, rows)])


def html_table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """The same as an HTML table, styled by nothing but the alignment of its columns."""

    def cells(tag: str, row: Sequence[str]) -> str:
        aligned = ((f' style="text-align:{"right" if i in right else "left"}"', c) for i, c in enumerate(row))
        return "<tr>" + "".join(f"<{tag}{a}>{html.escape(c)}</{tag}>" for a, c in aligned) + "</tr>"

    body = "".join(cells("td", row) for row in rows)
    return f"<table><thead>{cells('th', heads)}</thead><tbody>{body}</tbody></table>"
