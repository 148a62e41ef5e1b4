"""The documentation: every block of code in it runs, it is in step with the program, and the site builds offline.

A comment before a block says what is special about it:

    <!-- file: NAME -->                   it is a file of that name, for the blocks after it
    <!-- prints -->                       it is what the Python before it prints
    <!-- runs in: FILE.py::TEST -->       that test takes it from the page and runs it
    <!-- not run: REASON -->              it cannot run here; it is checked as far as that goes

Everything else runs as it is, in the order of the page, in a folder that holds a checkpoint. A bucket is a folder here.
"""

import ast
import configparser
import contextlib
import doctest
import inspect
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from urllib.parse import urlsplit

import figures
import nbformat
import numpy as np
import pytest
import torch
import yaml
from nbclient import NotebookClient
from prometheus_client import generate_latest
from safetensors.numpy import save_file

import deltawire
from deltawire import errors
from deltawire.cli import main
from deltawire.engines.target import EngineTarget
from deltawire.engines.torch import TorchEngine
from deltawire.metrics import registry
from support import ROOT
from support.browser import THEMES, WIDTHS, axe_findings, fits
from support.pages import in_a_thread

DOCS, TESTS, RESULTS = ROOT / "docs", ROOT / "tests", ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(
    r"^(?:<!-- (?P<word>[a-z ]+)(?:: (?P<what>[^\n]*))? -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
MARKS = ("file", "prints", "runs in", "not run")
# Pages of which no command can run here; their blocks need no comment each.
OF_PAGES = {
    "demo.md": ("not run", "takes minutes; test_demo.py runs shorter ones"),
    "dashboard.md": ("not run", "serves until it is stopped; test_dashboard.py and test_dashboard_page.py do that"),
}
BIN = Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "NO_COLOR": "1", "COLUMNS": "100"}
SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass
class Block:
    page: Path
    line: int
    language: str
    code: str
    word: str | None
    what: str

    def __str__(self):
        return f"{self.page.name}:{self.line}"


def blocks(page):
    text = page.read_text()
    for found in BLOCK.finditer(text):
        word, what = found["word"], found["what"]
        if word is None and found["language"] in ("bash", "console", "python"):
            word, what = OF_PAGES.get(page.name, (None, None))
        line = text.count("\n", 0, found.start("code"))
        yield Block(page, line, found["language"], found["code"], word, what or "")


ALL = [block for page in PAGES for block in blocks(page)]


def test_every_block_is_found_and_known():
    for page in PAGES:
        fences = re.findall(r"^ *```", page.read_text(), re.MULTILINE)
        assert len(fences) == 2 * len(list(blocks(page))), f"{page.name} has a block that cannot be read"
    for block in ALL:
        assert block.word in (None, *MARKS), f"{block}: {block.word}"
        known = ("python", "bash", "console", "text", "yaml", "ini", "json")
        assert block.language in known or block.page.name in OF_PAGES, f"{block}: {block.language}"


class Reader:
    """Someone who does what a page says, from top to bottom, in a folder of their own."""

    def __init__(self, folder):
        self.folder = folder
        self.names = {"__name__": "__main__"}
        self.printed = ""

    def follow(self, block):
        code = block.code.replace("s3://bucket/", f"{self.folder}/bucket/")
        if block.word == "prints":
            self.compare(block, self.printed, code)
        elif block.word == "file":
            (self.folder / block.what).write_text(code)
        elif block.word is None:
            {"python": self.python, "bash": self.bash, "console": self.console}.get(block.language, check)(block, code)

    def python(self, block, code):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            # With the lines of the page, for a traceback.
            exec(compile("\n" * block.line + code, str(block.page), "exec"), self.names)
        self.printed = printed.getvalue()

    def bash(self, block, code):
        self.run(code, expected=0)

    def console(self, block, code):
        for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", code, re.MULTILINE):
            status = re.search(r"^\[exit (\d+)\]\n\Z", shown, re.MULTILINE)
            shown = shown[: status.start()] if status else shown
            self.compare(block, self.run(command, int(status[1]) if status else 0), shown)

    def run(self, commands, expected):
        done = subprocess.run(
            ["bash", "-euc", commands], cwd=self.folder, env=ENVIRONMENT, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == expected, f"{commands}\n{done.stdout}"
        return done.stdout

    def compare(self, block, printed, shown):
        # A column is as wide as what is in it, and some of that is a time.
        shown, printed = (re.sub(r"-{2,}", "--", text) for text in (shown, printed))
        assert doctest.OutputChecker().check_output(shown, printed, SAME), f"{block}: expected\n{shown}\ngot\n{printed}"


def check(block, code):
    """As much as can be said of a block without running it."""
    if block.language == "python":
        ast.parse(code)
    elif block.language in ("bash", "console"):
        commands = "".join(re.findall(r"^\$ (.*\n)", code, re.MULTILINE)) if block.language == "console" else code
        subprocess.run(["bash", "-n"], input=commands, text=True, check=True)
        for line in commands.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["deltawire"]:
                # Under the program, whose settings a command keeps from the first time that it is parsed.
                with main.make_context("deltawire", words[1:]) as program:
                    main.commands[words[1]].make_context(words[1], words[2:], parent=program)
    elif block.language == "yaml":
        assert yaml.safe_load(code)
    elif block.language == "json":
        json.loads(code)
    elif block.language == "ini":
        configparser.ConfigParser(interpolation=None).read_string(code)


RUNNING = [page for page in PAGES if any(b.word is None and b.language not in ("text", "") for b in blocks(page))]


@pytest.mark.process
@pytest.mark.parametrize("page", RUNNING, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("checkpoint", "next"):
        (tmp_path / name).mkdir()
        save_file({"layer.weight": np.full((8, 8), len(name), np.float16)}, tmp_path / name / "model.safetensors")
    reader = Reader(tmp_path)
    for block in blocks(page):
        reader.follow(block)


@pytest.mark.process
@pytest.mark.parametrize("block", [block for block in ALL if block.word == "not run"], ids=str)
def test_blocks_that_cannot_run_are_checked(block):
    assert len(block.what) > 10, "say why"
    check(block, block.code)


def test_few_blocks_cannot_run():
    assert sum(block.word == "not run" and block.page.name not in OF_PAGES for block in ALL) <= 17


@pytest.mark.parametrize("block", [block for block in ALL if block.word == "runs in"], ids=str)
def test_blocks_that_run_elsewhere_do(block):
    file, name = block.what.split("::")
    text = (TESTS / file).read_text()
    assert f"def {name}(" in text
    assert block.page.name in text, f"{file} does not read {block.page.name}"


@pytest.mark.process
def test_the_newcomers_path():
    """What getting-started.md shows is what the command prints, but for when replicas look."""
    page = DOCS / "getting-started.md"
    install, command = (block.code for block in blocks(page) if block.language == "bash")
    assert "pip install -e ." in install
    shown = next(block.code for block in blocks(page) if block.code.startswith("trainer "))
    # Through a pipe nothing has a colour, whether or not that is asked for.
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "NO_COLOR"}
    done = subprocess.run(
        ["bash", "-euc", command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    for words in ("killed with SIGKILL", "is back"):
        assert words in done.stderr

    def sizes(text):
        return set(
            re.findall(r"^(?:trainer +version +\d+ .*|equal weights .*|(?:per step|in total) .*)$", text, re.MULTILINE)
        )

    assert len(sizes(shown)) == 9
    assert sizes(shown) <= sizes(done.stderr + done.stdout)
    commands = [line for line in (install + command).splitlines() if line]
    assert len(commands) < 5


@pytest.mark.process
def test_the_notebook_runs_and_prints_what_is_in_it(tmp_path):
    path = ROOT / "examples" / "quickstart.ipynb"
    committed = nbformat.read(path, as_version=4)
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()

    def shape(cells):
        """What is printed, but for numbers: those depend on how the machine multiplies."""
        texts = ["".join(output.get("text", "") for output in cell.get("outputs", ())) for cell in cells]
        return [re.sub(r" *[0-9a-f]*\d[0-9a-f,.]*", " #", text) for text in texts]

    assert shape(notebook.cells) == shape(committed.cells), "run: jupyter execute --inplace examples/quickstart.ipynb"
    assert "every bit is the trainer's: True" in str(notebook.cells)
    assert sum("image/png" in str(cell.get("outputs")) for cell in committed.cells) == 1


def test_every_error_is_explained():
    text = (DOCS / "troubleshooting.md").read_text()
    kinds = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    for kind in kinds:
        is_branch = any(other.__base__ is kind for other in kinds)
        assert (f"`{kind.__name__}`" if is_branch else f"### {kind.__name__}\n") in text, kind.__name__
        if not is_branch:
            assert "**Do:**" in text.split(f"### {kind.__name__}\n")[1].split("\n#")[0], kind.__name__


def test_every_public_name_is_in_the_reference():
    text = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    shown = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    assert {f"deltawire.{name}" for name in deltawire.__all__ if name not in ("DeltawireError", "__version__")} <= shown
    assert {"deltawire.errors", "deltawire.testing", "deltawire.engines.engine.Engine"} <= shown


@pytest.mark.parametrize(
    ("page", "kind"),
    [("publishing", deltawire.Publisher), ("publishing", deltawire.ShardedPublisher), ("following", deltawire.Replica)],
)
def test_every_option_is_in_the_reference(page, kind):
    text = (DOCS / "api" / f"{page}.md").read_text()
    for name in list(inspect.signature(kind).parameters):
        assert f"| `{name}` |" in text, name


def test_every_metric_is_documented():
    model = torch.nn.Linear(8, 8).bfloat16()
    served = torch.nn.Linear(8, 8).bfloat16()
    with (
        deltawire.Publisher("memory:metrics-page", model) as publisher,
        deltawire.Replica("memory:metrics-page", EngineTarget(TorchEngine(served))) as replica,
    ):
        for _ in range(2):
            publisher.publish().wait()
            replica.pull()
            with torch.no_grad():
                model.weight += 1
        told = generate_latest(registry(publisher, replica)).decode()
    documented = set(re.findall(r"^\| `(deltawire_\w+)` \|", (DOCS / "metrics.md").read_text(), re.MULTILINE))
    assert documented == set(re.findall(r"^(deltawire_\w+)\{", told, re.MULTILINE))
    used = set(re.findall(r"deltawire_\w+", (DOCS.parent / "deploy/monitoring/rules.yaml").read_text()))
    assert used
    assert used <= documented


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """As `make docs` builds it, in another folder."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    for name in ("docs", "src"):
        (folder / name).symlink_to(ROOT / name)
    prepare = [sys.executable, DOCS / "prepare.py", folder / "build/docs"]
    for command in (prepare, [BIN / "zensical", "build", "--strict"]):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stdout + done.stderr
    return folder / "site"


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    assert {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} <= {*nav.split()}


class Assets(HTMLParser):
    """What a page makes a browser fetch."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed"):
            self.found += [given.get("src"), given.get("srcset"), given.get("data")]
        elif tag == "link":
            self.found.append(given.get("href"))


@pytest.mark.process
def test_the_site_is_whole_and_asks_no_other_machine(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        assets = Assets()
        assets.feed(page.read_text())
        for address in filter(None, assets.found):
            parts = urlsplit(address)
            assert not parts.netloc, f"{page.relative_to(site)} fetches {address}"
            if parts.path and page.name != "404.html" and parts.scheme == "":
                assert (page.parent / parts.path).exists(), f"{page.relative_to(site)} lacks {address}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", sheet.read_text()), sheet
    local = str(ROOT)
    assert not [page for page in pages if local in page.read_text()]


@pytest.mark.process
def test_the_site_has_the_drawn_page(site):
    explain = pytest.importorskip("deltawire.pages.explain")
    assert (site / "explain" / "figures.html").read_text() == explain.single_file()


class Files(SimpleHTTPRequestHandler):
    def log_message(self, *_): ...


@pytest.fixture(scope="module")
def address(site):
    with in_a_thread(ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=site))) as server:
        yield f"http://127.0.0.1:{server.server_port}/"


def test_the_site_in_a_browser(address, open_page):
    for theme, scheme in (("light", "default"), ("dark", "slate")):
        with open_page(address, theme=theme) as page:
            assert page.locator("body").get_attribute("data-md-color-scheme") == scheme
            shown = [image for image in page.locator("img.chart").all() if image.is_visible()]
            assert [theme in image.get_attribute("src") for image in shown] == [True]
    with open_page(address + "getting-started/") as page:
        page.locator(".md-search__button").click()
        page.get_by_placeholder("Search").press_sequentially("EngineBroken")
        page.locator("a:has-text('EngineBroken'):visible").first.wait_for()


@pytest.mark.parametrize(
    "some",
    [
        ["", "api/errors/", "guides/agent/", "guides/demo/"],
        pytest.param(None, id="all", marks=pytest.mark.slow),
    ],
)
def test_pages_of_the_site_fit_and_can_be_read_by_all(some, site, address, open_page):
    every = some or sorted(f"{page.parent.relative_to(site).as_posix()}/" for page in site.rglob("index.html"))
    for path, (width, theme) in product(every, zip(WIDTHS, THEMES, strict=True)):
        with open_page(address + path, width=width, theme=theme) as page:
            assert fits(page), path
            assert not axe_findings(page), path


# Sentences that may only be said with a figure from the results: shares of weights, sizes of deltas, times. That
# a benchmark changes 1 % is a condition.
CLAIM = re.compile(
    r"(?<![\d.])(?!1 %)[\d.]+ % of (?:the|all|its) weights|1/\d+ of (?:the |all )?weights"
    r"|\d\.\d+ bytes (?:per|for each|a) change"
    r"|pauses? (?:of|for) [\d.]+ m?s\b|[\d.]+ ms with a|[\d.]+ times faster"
)
# Generated as a whole; dated decisions; what others say of themselves, and what a store or a protocol allows.
FREE = ("performance.md", "cli.md", "CHANGELOG.md", "LOG.md", "soak.md", "soak_engines.md", "mutants.md")


@pytest.mark.parametrize("page", figures.pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_figures_are_those_of_the_results(page):
    text = page.read_text()
    assert figures.marked(text) == text, f"{page.name} says another number than benchmarks/results: run make docs"
    # In Markdown a line that begins with a comment is no part of a paragraph.
    assert page.suffix == ".html" or not re.search(r"^ *<!--=[\w.-]+-->[^\n]", text, re.MULTILINE)
    if page.name in FREE or page.parent.name == "decisions":
        return
    said = figures.MARKED.sub("", re.sub(r"^```.*?^```$|^\|[^\n]*$", "", text, flags=re.MULTILINE | re.DOTALL))
    assert CLAIM.findall(said) == [], "say it with a figure: docs/figures.py"


def test_every_figure_is_said_somewhere():
    said = {name for page in figures.pages() for name, _ in figures.MARKED.findall(page.read_text())}
    assert said == figures.figures().keys()


def test_explain_has_the_figures_of_the_pages():
    """Its data are made by another script."""
    measured = figures.recorded()["measured"]
    assert [row["all_to_single"] for row in measured["uploads"]] == [
        float(row["all_to_single"]) for row in figures.read("fleet_density.csv")[1]
    ]
    assert measured["vllm"]["pause"] == pytest.approx(float(figures.read("vllm.csv")[1][0]["pause_ms"]) / 1000)
    for each in measured["gpu"]["models"]:
        assert each["pause"] == pytest.approx(figures.on_gpu(each["model"], "pause_ms") / 1000)
        assert each["served"] == figures.on_gpu(each["model"], "served_s")
    assert [run["density"] for run in measured["runs"]] == [figures.settled(lr)["density"] for lr in (1e-6, 3e-6)]


def test_a_wrong_figure_is_noticed():
    said = "At lr 1e-6 <!--=density-1e-6-->1.6 %<!--/--> of the weights change."
    assert figures.marked(said) == said
    assert figures.marked(said.replace("1.6", "1.1")) == said
    assert CLAIM.search("that is 1.1 % of the weights, or 1/200 of all weights")


def test_readme_first_screen():
    """One sentence, one moving picture for both themes, the table of sizes; then how to try it; short as a whole."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 120
    first = text.split("\n## ")[0]
    assert first.count("<picture>") == 1
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', first)
    assert len(pictures) == 2
    for path in pictures:
        assert (ROOT / path).stat().st_size < 500_000
        assert "@keyframes" in (ROOT / path).read_text()
    assert {"measured", "computed"} <= set(re.findall(r"^\| [\d.]+ B, (\w+) \|", first, re.MULTILINE))
    assert re.search(r"^make demo .*\nmake test ", text, re.MULTILINE)
    for title in ("Try it in a minute", "What was tested on what", "When not to use it"):
        assert f"\n## {title}\n" in text


def test_everything_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == deltawire.__version__
    assert {"cff-version", "message", "title", "authors", "license"} <= cited.keys()
    assert re.search(r"^## (\S+),", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == deltawire.__version__
    chart = yaml.safe_load((ROOT / "deploy/helm/deltawire/Chart.yaml").read_text())
    values = yaml.safe_load((ROOT / "deploy/helm/deltawire/values.yaml").read_text())
    minor = deltawire.__version__.rpartition(".")[0]
    assert (chart["version"], chart["appVersion"], values["image"]["tag"]) == (deltawire.__version__, minor, minor)
    images = [path for path in (ROOT / "deploy").rglob("*.yaml") if "image: deltawire-" in path.read_text()]
    assert len(images) == 3
    for path in images:
        assert {*re.findall(r"image: deltawire-\w+:(\S+)", path.read_text())} == {minor}, path


@pytest.mark.process
def test_the_moving_picture_is_of_the_recorded_run(tmp_path):
    """`benchmarks/hello_picture.py` draws the same from the events again."""
    names = ("hello.jsonl", "hello-light.svg", "hello-dark.svg")
    before = [(RESULTS / name).read_bytes() for name in names]
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import hello_picture, pathlib\n"
        "for theme in hello_picture.THEMES: (pathlib.Path(sys.argv[2]) / f'hello-{theme}.svg').write_text("
        "hello_picture.draw(theme))"
    )
    subprocess.run([sys.executable, "-c", code, ROOT / "benchmarks", tmp_path], check=True)
    assert [(tmp_path / name).read_bytes() for name in names[1:]] == before[1:]
    events = [json.loads(line) for line in before[0].decode().splitlines()[1:]]
    assert len({event["sha256"] for event in events if "sha256" in event}) == 1
