"""Print the shape of the code, file by file and folder by folder, and the words to replace.

    python scripts/shape.py [FOLDER]...

Files: lines, functions (number, median and longest in lines), share of comment lines.
Folders: the same in total, and the modules that a single other module imports.
Words: where messages, docstrings, comments and documents use a word that has a plainer substitute.

Exits with 1 if a function is longer than 60 lines, including its docstring.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("ddpm_core", "ddpm_kube", "components", "pipelines")
LONGEST = 60

# Each pattern, and what to write instead.
WORDS = {
    r"pictures?": "image",
    r"told|tells?|said|says|sentences?": "error, message; report, print",
    r"anew|made again": "again, rebuild",
    r"absent|lacks?|lacked|lacking": "missing",
    r"whole": "complete",
    r"of these settings|of other settings": "up to date; with different settings",
    r"(?<!there )(?:is|are) none|cannot be believed": "invalid, unsupported, corrupt",
    r"(?:is|are) needed|given;": "must be, requires",
    r"of (?:its|their|our) own|of ours|of theirs": "separate, its own",
    r"lies?|lay|lain|stands?|stood": "is in, is stored in",
    r"what to do": "settings",
    r"another's|others'|theirs": "different, does not match",
    r"(?:is|are|was|goes|went) away|down and out|(?:did|does) not answer": "unavailable",
    r"somebody|nobody|whoever|anybody|everybody": "worker, process, pod, server",
}
_PATTERN = re.compile(rf"\b(?:{'|'.join(WORDS)})(?!\w)", re.IGNORECASE)


def function_lengths(tree: ast.AST) -> dict[str, int]:
    """Return the lines of each function by `name:line`; nested functions count as well."""
    return {
        f"{node.name}:{node.lineno}": (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def comments(text: str) -> int:
    """Return the number of lines that are only a comment."""
    return sum(line.lstrip().startswith("#") for line in text.splitlines())


def module_name(path: Path) -> str:
    """Return `ddpm_core.storage.s3` for ddpm_core/storage/s3.py."""
    return ".".join(path.resolve().relative_to(ROOT).with_suffix("").parts)


def imported_names(tree: ast.AST) -> set[str]:
    """Return the dotted names that a module imports, of modules and of their members."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def importers() -> Counter[str]:
    """Return how many of the program's modules import each name."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in sources(FOLDERS))
    return Counter(name for tree in trees for name in imported_names(tree))


def sources(folders: tuple[str, ...] | list[str]) -> list[Path]:
    """Return the Python files below folders, relative ones below the repository."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def prose(text: str) -> Iterator[str]:
    """Yield the docstrings, messages and comments of a source file.

    A literal without a space is a key, a name or a path, and is left out.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def words(texts: Iterator[str]) -> Counter[str]:
    """Return how often each word of the list is used."""
    return Counter(match[0].lower() for text in texts for match in _PATTERN.finditer(text))


def document_prose(path: Path) -> Iterator[str]:
    """Yield the lines of a Markdown file without its code blocks."""
    fenced = False
    for line in path.read_text(encoding="utf-8").splitlines():
        fenced ^= line.startswith("```")
        if not fenced and not line.startswith("    "):
            yield line


def print_files(paths: list[Path]) -> list[str]:
    """Print a row for each file; return the functions that are too long."""
    too_long = []
    print(f"{'file':46} {'lines':>6} {'functions':>9} {'median':>6} {'longest':>7} {'comments':>8}")
    for path in paths:
        text = path.read_text(encoding="utf-8")
        lengths = function_lengths(ast.parse(text))
        lines = len(text.splitlines())
        print(
            f"{path.relative_to(ROOT).as_posix():46} {lines:6} {len(lengths):9} "
            f"{statistics.median(lengths.values()) if lengths else 0:6.1f} "
            f"{max(lengths.values(), default=0):7} {comments(text) / max(1, lines):8.1%}"
        )
        too_long += [f"{path}:{name} {n}" for name, n in lengths.items() if n > LONGEST]
    return too_long


def print_folders(paths: list[Path]) -> None:
    """Print a row for each folder, and the total."""
    folders = defaultdict(list)
    for path in paths:
        folders[path.parent.relative_to(ROOT).as_posix()].append(path)
    counts = importers()
    print(
        f"\n{'folder':46} {'lines':>6} {'files':>5} {'single importer':>15} {'longest':>7} "
        f"{'comments':>8}"
    )
    for name, files in [*folders.items(), ("total", paths)]:
        texts = [path.read_text(encoding="utf-8") for path in files]
        lines = sum(len(text.splitlines()) for text in texts)
        lengths = [n for text in texts for n in function_lengths(ast.parse(text)).values()]
        single = [path for path in files if counts[module_name(path)] == 1]
        share = sum(map(comments, texts)) / max(1, lines)
        print(
            f"{name:46} {lines:6} {len(files):5} {len(single):15} {max(lengths, default=0):7} "
            f"{share:8.1%}"
        )


def print_words(paths: list[Path]) -> None:
    """Print the words to replace by file, and how often each is used in total."""
    total: Counter[str] = Counter()
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    print(f"\n{'words to replace':46} (see WORDS in scripts/shape.py for substitutes)")
    for path in [*paths, *documents]:
        texts = document_prose(path) if path.suffix == ".md" else prose(path.read_text("utf-8"))
        if found := words(texts):
            listed = ", ".join(f"{word} {number}" for word, number in found.most_common())
            print(f"{path.relative_to(ROOT).as_posix():46} {listed}")
            total += found
    print(f"{'total':46} {total.total()}: " + ", ".join(f"{w} {n}" for w, n in total.most_common()))


def main(folders: list[str]) -> int:
    """Print all three tables. Return 1 if a function is too long."""
    paths = sources(folders)
    too_long = print_files(paths)
    print_folders(paths)
    print_words(paths)
    for line in too_long:
        print(f"longer than {LONGEST} lines: {line}")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(FOLDERS)))
