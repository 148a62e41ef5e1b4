"""Writes the pages as a folder of plain Markdown, from which the site is built: `python docs/prepare.py FOLDER`.

Pages are written so that their links work in the repository. There a link out of docs/ leads to a copy in the folder
under source/: Markdown as a page, programs as a page with the text, everything else as it is. The notebook becomes a
page, and the drawn page is in the folder, too. So the tool that builds the site needs to know nothing of this.
"""

import base64
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from deltawire.pages.explain import single_file

DOCS = Path(__file__).parent.absolute()
ROOT = DOCS.parent
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
ALWAYS = ["ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".conf": "nginx", ".ini": "ini"}

FENCE = re.compile(r"^( *)(`{3,}).*?^\1\2$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)#\s]+?)((?:#[^)]*)?\))")
PICTURE = re.compile(r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">\s*'
                     r'<img src="([^"]+)" alt="([^"]+)">\s*</picture>')  # fmt: skip
FRAME = """
[Open them alone](explain/figures.html)

<iframe class="figures" src="explain/figures.html" title="Figures that explain deltawire"></iframe>
"""
COMMENT = re.compile(r"^<!-- .*? -->\n", re.MULTILINE)


def prepare(folder: Path) -> None:
    """Everything that the site is made of, in a folder that is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in DOCS.rglob("*"):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            _copy(path, folder)
    wanted, seen = [ROOT / name for name in ALWAYS], set()
    wanted += [target for page in DOCS.rglob("*.md") for target in _outside(page)]
    while wanted:
        path = wanted.pop()
        if path not in seen:
            seen.add(path)
            _copy(path, folder)
            wanted += _outside(path) if path.suffix == ".md" else []
    _write_notebook(folder)
    _write(folder / "explain" / "figures.html", single_file())


def _copy(path: Path, folder: Path) -> None:
    uri, name = _uri_of(path), path.relative_to(ROOT).as_posix()
    if path.suffix == ".md":
        # The front matter of a Space is not for readers.
        text = re.sub(r"\A---\n.*?^---\n", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        text = _outside_of_fences(text, lambda part: _rewrite(part, path, uri))
        _write(folder / uri, text + FRAME if uri == "explain.md" else text)
    elif uri.endswith(".md"):
        language = LANGUAGES.get(path.suffix, "docker")
        _write(folder / uri, f"# {path.name}\n\n`{name}`\n\n````{language}\n{path.read_text()}````\n")
    else:
        _write(folder / uri, path.read_bytes())


def _write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def _rewrite(text: str, home: Path, uri: str) -> str:
    text = PICTURE.sub(r"![\3](\2#only-light){ .chart } ![\3](\1#only-dark){ .chart }", COMMENT.sub("", text))
    return LINK.sub(lambda found: found[1] + _address(found[2], home, uri) + found[3], text)


def _address(target: str, home: Path, uri: str) -> str:
    """Where a link of a page leads in the folder; relative, as Markdown wants it."""
    if re.match(r"[a-z]+:", target):
        return target
    return os.path.relpath(_uri_of(_landing(home.parent / target)), os.path.dirname(uri))


def _landing(path: Path) -> Path:
    path = Path(os.path.normpath(path))
    if not path.is_dir():
        return path
    return path / ("index.md" if path.is_relative_to(DOCS) else "README.md")


def _uri_of(path: Path) -> str:
    if path == NOTEBOOK:
        return "quickstart.md"
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    is_program = path.suffix in LANGUAGES or path.name == "Dockerfile"
    return f"source/{name}.md" if is_program else f"source/{name}"


def _outside(page: Path) -> list[Path]:
    """The files outside docs/ that a page links to or shows."""
    text = FENCE.sub("", page.read_text())
    targets = [found[2] for found in LINK.finditer(text)] + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    paths = [_landing(page.parent / target) for target in targets if not re.match(r"[a-z]+:", target)]
    return [path for path in paths if not path.is_relative_to(DOCS) and path != NOTEBOOK]


def _write_notebook(folder: Path) -> None:
    """The notebook as a page, with the outputs that it was committed with."""
    text = ""
    for number, cell in enumerate(json.loads(NOTEBOOK.read_text())["cells"]):
        source = "".join(cell["source"])
        text += f"{source}\n\n" if cell["cell_type"] == "markdown" else f"```python\n{source}\n```\n\n"
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"quickstart/cell-{number}.png"
                _write(folder / name, base64.b64decode(data["image/png"]))
                text += f"![what the cell above draws]({name}){{ .plot }}\n\n"
            else:
                shown = "".join(output.get("text", data.get("text/plain", "")))
                text += f"```text\n{shown.rstrip()}\n```\n\n"
    _write(folder / "quickstart.md", text + "The notebook itself is `examples/quickstart.ipynb` in the repository.\n")


def _outside_of_fences(text: str, change: Callable[[str], str]) -> str:
    parts, at = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, change(text[at:])])


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
