"""Tables and plots of a run: `python -m bench.report [RESULTS.json] [--readme README.md]`.

Writes RESULTS.md and RESULTS-*.png beside the results; with `--readme`, also replaces what stands between
`<!-- bench:begin -->` and `<!-- bench:end -->` there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .brief import brief
from .tables import TABLES, preamble

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
RESULTS = Path(__file__).resolve().parent / "results"


def render(record: dict[str, Any], pictures: list[str]) -> str:
    """The Markdown of a run, without title; `pictures` are links, each named `...-SECTION.png`."""
    parts = [preamble(record)]
    for name, (title, table) in TABLES.items():
        section = record["sections"].get(name)
        if section is None:
            continue
        parts.append(f"### {title}")
        if section["status"] == "not applicable":
            parts.append(f"Not applicable here: {section['reason']}.")
            continue
        parts.extend(f"Failed ({f['contender'] or name}): `{f['error']}`" for f in section["failures"])
        if section["data"]:
            parts.append(table(section["data"], record))
        parts.extend(f"![{title}]({picture})" for picture in pictures if picture.endswith(f"-{name}.png"))
    for name in set(record["sections"]) - set(TABLES):  # their figures stand in the tables of other sections
        parts.extend(f"Failed ({name}): `{f['error']}`" for f in record["sections"][name]["failures"])
    return "\n\n".join(parts) + "\n"


def plotter() -> Callable[[dict[str, Any], Path], list[Path]] | None:
    """What draws, or None without matplotlib."""
    try:
        from .plots import draw
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        return None
    return draw


def write(path: Path, readme: Path | None = None) -> list[Path]:
    """Write the tables and plots of the results at `path`; return the files written."""
    record = json.loads(path.read_text())
    draw = plotter()
    if draw is None:
        print("no plots: matplotlib is not installed (`pip install matplotlib`)", file=sys.stderr)
    pictures = draw(record, path) if draw else []
    page = path.with_suffix(".md")
    title = f"# Benchmark on {record['environment']['device']}\n\n"
    page.write_text(title + render(record, [picture.name for picture in pictures]))
    if readme is not None:
        folder = readme.resolve().parent
        links = [Path(os.path.relpath(file.resolve(), folder)).as_posix() for file in (page, *pictures)]
        shown = [link for link in links[1:] if link.endswith("-step.png")]
        replace_section(readme, brief(record, links[0], shown))
    print(f"report: {page}")
    return [page, *pictures]


def replace_section(readme: Path, text: str) -> None:
    """Put `text` between the markers of a file.  Raises ValueError where they are missing."""
    old = readme.read_text()
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"bench.report: `--readme` must hold {BEGIN} and {END}, got {readme} without them")
    readme.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")


def newest(folder: Path = RESULTS) -> Path:
    """The results of a GPU written last; profiles are none."""
    runs = [path for path in folder.glob("*.json") if not path.stem.endswith(("-ncu", "-cpu"))]
    found = sorted(runs, key=lambda path: path.stat().st_mtime)
    if not found:
        raise ValueError(f"bench.report: `results` must be a file of `python -m bench`, got none in {folder}")
    return found[-1]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("results", nargs="?", type=Path, help="a file of `python -m bench`; default: the newest")
    parser.add_argument("--readme", type=Path, help="file whose benchmark section is to be replaced")
    chosen = parser.parse_args(argv)
    try:
        write(chosen.results or newest(), chosen.readme)
    except KeyError as error:
        print(f"bench.report: `results` must be a file of `python -m bench`, got one without {error}", file=sys.stderr)
        return 2
    except (ValueError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
