"""What users and contributors rely on: public names, layers, quick imports, help and documentation in step."""

import itertools
import re
import subprocess
import sys
from collections import Counter

import click
import generate
import pytest
import rooms

import deltawire
from deltawire.cli import main
from support import ROOT

PACKAGE = ROOT / "src" / "deltawire"


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


@pytest.mark.parametrize("room", [room for line in rooms.ROOMS for room in line])
def test_a_room_imports_only_from_those_below_it(room):
    below = list(itertools.takewhile(lambda line: room not in line, rooms.ROOMS))
    assert rooms.imported_rooms(room) <= {each for line in below for each in line}


def test_every_module_is_in_a_room():
    known = {room for line in rooms.ROOMS for room in line}
    top = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert top - {"__init__"} == known - {"deltawire_demo"}
    assert len(list(PACKAGE.glob("*.py"))) <= 12
    names = Counter(file.name for file in (ROOT / "src").rglob("*.py") if not file.name.startswith("__"))
    assert [name for name, count in names.items() if count > 2] == []


def test_tests_import_no_benchmark_and_nobody_a_test():
    benchmarks = {file.stem for file in (ROOT / "benchmarks").glob("*.py")}
    for file in (ROOT / "tests").rglob("*.py"):
        assert not benchmarks & {module.split(".")[0] for module in rooms.imports(file)}, file
    for folder in ("tests", "benchmarks", "tools", "examples"):
        for file in (ROOT / folder).rglob("*.py"):
            assert not any(module.startswith(("test_", "conftest")) for module in rooms.imports(file)), file


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
