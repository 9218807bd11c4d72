"""Prints the shape of the code: lines, functions (number, median, longest) and comment share.

    python scripts/shape.py [FOLDER]...

Exits 1 where a function is longer than 60 lines, its docstring included.
"""

from __future__ import annotations

import ast
import statistics
import sys
from pathlib import Path

LONGEST = 60


def function_lengths(tree: ast.AST) -> dict[str, int]:
    """Lines from `def` to the last one, by name and line; nested functions count too."""
    return {
        f"{node.name}:{node.lineno}": (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def comment_share(text: str) -> float:
    """Lines that hold only a comment, as a share of all."""
    lines = text.splitlines()
    return sum(line.lstrip().startswith("#") for line in lines) / max(1, len(lines))


def main(folders: list[str]) -> int:
    """Print a row a file, and what is too long."""
    too_long = []
    print(f"{'file':46} {'lines':>5} {'functions':>9} {'median':>6} {'longest':>7} {'comments':>8}")
    for path in sorted(p for folder in folders for p in Path(folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        lengths = function_lengths(ast.parse(text))
        median = statistics.median(lengths.values()) if lengths else 0
        longest = max(lengths.values(), default=0)
        print(
            f"{path.as_posix():46} {len(text.splitlines()):5} {len(lengths):9} {median:6.1f} "
            f"{longest:7} {comment_share(text):8.0%}"
        )
        too_long += [f"{path}:{name} {n}" for name, n in lengths.items() if n > LONGEST]
    for line in too_long:
        print(f"longer than {LONGEST} lines: {line}")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["ddpm_core"]))
