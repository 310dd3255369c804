"""Write the tables of docs/OPERATIONS.md that are made from the code: run it after a setting or a metric has changed.

Not a pytest module. Tests compare the tables with the code.
"""

from __future__ import annotations

from pathlib import Path

from kvstore.config.example import reference_markdown
from kvstore.http.exports import metrics_markdown

DOCUMENT = Path(__file__).parents[2] / "docs" / "OPERATIONS.md"
TABLES = {"settings": reference_markdown, "metrics": metrics_markdown}


def main() -> None:
    text = DOCUMENT.read_text()
    for name, make in TABLES.items():
        begin, end = f"<!-- table: {name} -->\n", "<!-- end of table -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise SystemExit(f"{DOCUMENT} has no place for the table of {name}: put {begin.strip()} and {end} there")
        text = f"{before}{begin}{make()}\n{end}{after}"
    DOCUMENT.write_text(text)


if __name__ == "__main__":
    main()
