"""What users and contributors rely on: public names, layers, quick imports, help and documentation in step."""

import ast
import re
import subprocess
import sys

import click
import generate
import pytest

import deltawire
from deltawire.cli import main
from support import ROOT

PACKAGE = ROOT / "src" / "deltawire"

# Lowest first: a module imports only from the layers before its own, or from its own.
LAYERS = [
    ["errors"],
    ["dtypes", "boxes", "workers", "disk", "names", "redact", "hosts"],
    ["kernels"],
    ["codec"],
    ["weights"],
    ["state"],
    ["container"],
    ["wire"],
    ["parts", "checkpoint", "patches"],
    ["delta"],
    ["inspection", "replay", "history", "chain", "store", "plain"],
    ["keys"],
    ["files", "manifest", "sources"],
    ["device_part", "signing", "upload"],
    ["device"],
    ["snapshots", "recheck"],
    ["runs"],
    ["target", "fetch", "heartbeat", "lease", "routing"],
    ["comparison"],
    ["mirror", "upkeep", "gc", "commits", "publication"],
    ["publisher", "replica", "ranks"],
    ["compact", "audit", "exchange"],
    ["holder"],
    ["leader"],
    ["sharded"],
    ["interop", "metrics", "engines"],
    ["agent", "testing"],
    ["trainers"],
    ["demo", "hello"],
    ["pages"],
    ["cli"],
]


def commands(group=main, path=()):
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def fresh(program):
    """Run a program in an interpreter that has loaded nothing yet."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def test_public_names():
    assert sorted(deltawire.__all__) == [
        "Box",
        "Checkpoint",
        "Delta",
        "DeltawireError",
        "Digest",
        "Patch",
        "Publication",
        "Publisher",
        "Pull",
        "Replica",
        "ShardedPublisher",
        "__version__",
        "apply",
        "diff",
        "digest",
        "open_store",
        "save_anchor",
    ]
    assert all(hasattr(deltawire, name) for name in deltawire.__all__)
    assert dir(deltawire) == deltawire.__all__
    with pytest.raises(AttributeError):
        _ = deltawire.nothing


def imports(file):
    """The modules that a file imports, and the names from them, which may be modules, too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_layers(file):
    layer_of = {name: level for level, names in enumerate(LAYERS) for name in names}
    own = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own == "__init__":
        return
    assert own in layer_of, f"{own} is in no layer"
    for module in imports(file):
        target = module.split(".")[1:2]
        if module.startswith("deltawire.") and target[0] in layer_of and target[0] != own:
            assert layer_of[target[0]] < layer_of[own], f"{own} imports {module}"


def test_tests_import_no_benchmark_and_nobody_a_test():
    benchmarks = {file.stem for file in (ROOT / "benchmarks").glob("*.py")}
    for file in (ROOT / "tests").rglob("*.py"):
        assert not benchmarks & {module.split(".")[0] for module in imports(file)}, file
    for folder in ("tests", "benchmarks", "tools", "examples"):
        for file in (ROOT / folder).rglob("*.py"):
            assert not any(module.startswith(("test_", "conftest")) for module in imports(file)), file


@pytest.mark.process
def test_import_is_light():
    loaded = fresh(
        "import sys, deltawire; print([name for name in ('torch', 'numba', 'numpy') if name in sys.modules])"
    )
    assert loaded.strip() == "[]"


@pytest.mark.timing
@pytest.mark.process
def test_import_is_quick():
    program = "import time; t = time.perf_counter(); import deltawire; print(time.perf_counter() - t)"
    assert min(float(fresh(program)) for _ in range(3)) < 0.150


@pytest.mark.process
def test_help_needs_no_kernels():
    loaded = fresh(
        "import sys\nfrom click.testing import CliRunner\nfrom deltawire.cli import main\n"
        "CliRunner().invoke(main, ['diff', '--help'])\nprint('numba' in sys.modules, 'torch' in sys.modules)"
    )
    assert loaded.strip() == "False False"


@pytest.mark.parametrize(
    ("path", "command"), list(commands()), ids=lambda value: "-".join(value) if isinstance(value, tuple) else ""
)
def test_every_command_has_help_and_json(path, command):
    assert command.help
    options = {option for parameter in command.params for option in parameter.opts}
    assert {"--format", "--quiet"} <= options
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name


def test_generated_documentation_is_in_step():
    for path, text in generate.pages().items():
        assert path.read_text() == text, f"{path.name} is behind the program: run make docs"


def test_every_relative_link_leads_somewhere():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith(("http:", "https:")):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
        for target in re.findall(r'(?:src|srcset)="([^"]+)"', page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} shows {target}"


def test_every_exception_is_in_the_tree():
    from deltawire import errors

    names = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)]
    tree = errors.__doc__
    assert len(names) > 15
    assert all(name in tree for name in names)


@pytest.mark.process
def test_compiled_kernels_are_cached_on_disk(tmp_path):
    program = (
        "import numpy as np, deltawire\nold = {'w': np.zeros(100, np.uint16)}\n"
        "deltawire.diff(old, {'w': old['w'] + 1}, threads=1)"
    )
    environment = {"NUMBA_CACHE_DIR": str(tmp_path), "PATH": ""}

    def kept():
        subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True)
        return {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nb[ic]")}

    first = kept()
    assert first
    assert kept() == first, "the second process compiled, too"


def test_files_stay_short():
    for file in [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        assert len(file.read_text().splitlines()) <= 500, file
