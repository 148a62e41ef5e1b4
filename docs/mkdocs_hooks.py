"""What mkdocs does not know of this repository: files outside docs/ that pages link to, the notebook, the drawn page.

Pages are written so that their links work in the repository. Here a link out of docs/ leads to a copy in the site under
source/: Markdown as a page, programs as a page with the text, everything else as it is.
"""

import base64
import json
import logging
import os
import re
from importlib import import_module
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
ROOT = DOCS.parent
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
ALWAYS = ["ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]
# Pages that may not be there yet.
OPTIONAL = ["guides/dashboard.md"]
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".conf": "nginx", ".ini": "ini"}
LOG = logging.getLogger("mkdocs.plugins.deltawire")

FENCE = re.compile(r"^( *)(`{3,}).*?^\1\2$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)#\s]+?)((?:#[^)]*)?\))")
PICTURE = re.compile(r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">\s*'
                     r'<img src="([^"]+)" alt="([^"]+)">\s*</picture>')  # fmt: skip
FRAME = """
[Open them alone](explain/figures.html)

<iframe class="figures" src="figures.html" title="Figures that explain deltawire"></iframe>
"""
COMMENT = re.compile(r"^<!-- .*? -->\n", re.MULTILINE)
MISSING = """<!doctype html><html lang="en"><meta charset="utf-8"><title>deltawire</title>
<p>This build has no drawn page: <code>deltawire.pages.explain</code> is not there. <a href="./">Back</a></p></html>
"""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = _present(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    wanted, seen = [ROOT / name for name in ALWAYS], set()
    wanted += [target for page in DOCS.rglob("*.md") for target in _outside(page)]
    while wanted:
        path = wanted.pop()
        if path in seen:
            continue
        seen.add(path)
        files.append(_copy(path, config))
        if path.suffix == ".md":
            wanted += _outside(path)
    for file in _notebook(config):
        files.append(file)
    files.append(_generated(config, "explain/figures.html", content=_explain()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    if uri == "quickstart.md":
        return markdown
    if uri == "explain.md":
        return markdown + FRAME
    home = ROOT / uri.removeprefix("source/") if uri.startswith("source/") else DOCS / uri
    return _outside_of_fences(markdown, lambda text: _rewrite(text, home, uri))


def _rewrite(text: str, home: Path, uri: str) -> str:
    text = PICTURE.sub(r"![\3](\2#only-light){ .chart } ![\3](\1#only-dark){ .chart }", COMMENT.sub("", text))
    return LINK.sub(lambda found: found[1] + _address(found[2], home, uri) + found[3], text)


def _address(target: str, home: Path, uri: str) -> str:
    """Where a link of a page leads in the site; relative, as mkdocs wants it."""
    if re.match(r"[a-z]+:", target):
        return target
    path = _landing(home.parent / target)
    return os.path.relpath(_uri_of(path), os.path.dirname(uri))


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
    return f"source/{name}.md" if _is_program(path) else f"source/{name}"


def _is_program(path: Path) -> bool:
    return path.suffix in LANGUAGES or path.name == "Dockerfile"


def _outside(page: Path) -> list[Path]:
    """The files outside docs/ that a page links to or shows."""
    text = FENCE.sub("", page.read_text())
    targets = [found[2] for found in LINK.finditer(text)] + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    paths = [_landing(page.parent / target) for target in targets if not re.match(r"[a-z]+:", target)]
    return [path for path in paths if not path.is_relative_to(DOCS) and path != NOTEBOOK]


def _copy(path: Path, config: MkDocsConfig) -> File:
    name = path.relative_to(ROOT).as_posix()
    if _is_program(path):
        language = LANGUAGES.get(path.suffix, "docker")
        text = f"# {path.name}\n\n`{name}`\n\n````{language}\n{path.read_text()}````\n"
        return _generated(config, f"source/{name}.md", content=text)
    if path.suffix == ".md":
        # The front matter of a Space is not for readers.
        return _generated(
            config, f"source/{name}", content=re.sub(r"\A---\n.*?^---\n", "", path.read_text(), flags=re.S | re.M)
        )
    return _generated(config, f"source/{name}", abs_src_path=str(path))


def _notebook(config: MkDocsConfig) -> list[File]:
    """The notebook as a page, with the outputs that it was committed with."""
    text, files = "", []
    for number, cell in enumerate(json.loads(NOTEBOOK.read_text())["cells"]):
        source = "".join(cell["source"])
        text += f"{source}\n\n" if cell["cell_type"] == "markdown" else f"```python\n{source}\n```\n\n"
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"quickstart/cell-{number}.png"
                files.append(_generated(config, name, content=base64.b64decode(data["image/png"])))
                text += f"![what the cell above draws]({name}){{ .plot }}\n\n"
            else:
                shown = "".join(output.get("text", data.get("text/plain", "")))
                text += f"```text\n{shown.rstrip()}\n```\n\n"
    text += "The notebook itself is `examples/quickstart.ipynb` in the repository.\n"
    return [_generated(config, "quickstart.md", content=text), *files]


def _explain() -> str:
    try:
        module = import_module("deltawire.pages.explain")
    except ImportError as error:
        LOG.info("no drawn page: %s", error)
        return MISSING
    page: str = module.single_file()
    return page


def _generated(config: MkDocsConfig, uri: str, **content: str | bytes) -> File:
    return File.generated(config, uri, inclusion=InclusionLevel.NOT_IN_NAV, **content)


def _present(nav: list) -> list:
    """The navigation without pages that may be missing and are."""
    kept = []
    for item in nav:
        if isinstance(item, dict):
            item = {name: _present(value) if isinstance(value, list) else value for name, value in item.items()}
        elif item in OPTIONAL and not (DOCS / item).exists():
            LOG.info("left out of the navigation, since it is not there: %s", item)
            continue
        kept.append(item)
    return kept


def _outside_of_fences(text: str, change) -> str:
    parts, at = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, change(text[at:])])
