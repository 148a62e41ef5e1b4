"""`deltawire explain`: its data, its server, and its command."""

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner
from generate import read

from deltawire.cli import main
from deltawire.errors import AddressUnavailable
from deltawire.pages.explain import PAGE, PageServer, content_policy, single_file
from support import ROOT
from support.pages import in_a_thread

FILE = ROOT / "src/deltawire/pages/static/explain/recorded.json"
RECORDED = json.loads(FILE.read_text())


@pytest.mark.process
def test_recorded_data_is_what_its_script_makes(tmp_path):
    made = tmp_path / "recorded.json"
    subprocess.run([sys.executable, ROOT / "benchmarks/explain_data.py", "--output", made], check=True)
    assert FILE.read_text() == made.read_text()
    assert FILE.stat().st_size < 250_000


def test_sizes_are_those_of_the_benchmark():
    """The codec's benchmark sums the same steps."""
    for row in read("codec_size.csv")[1]:
        if row["used_by"] == "deltawire":
            sizes = RECORDED["recordings"][row["recording"]]["sizes"]
            assert sum(size[row["encoding"]] for size in sizes) == int(row["bytes"])
            assert sum(size["changed"] for size in sizes) == int(row["changed"])


def test_bits_by_class_add_up_to_the_stream():
    for recording in RECORDED["recordings"].values():
        for about in recording["classes"]:
            assert sum(row["changed"] for row in about["rows"]) == about["changed"]
            assert sum(row["weights"] for row in about["rows"]) == about["weights"]
            assert sum(row["bits"] for row in about["rows"]) == about["context"]["positions"]
            # What is left has to hold the header, and a length for each change that is longer than one step.
            longer = about["changed"] - about["one_step"]
            assert about["context"]["header"] + longer < about["context"]["rest"]


def test_the_page_is_in_the_package():
    imports = json.loads(re.search(r'"importmap">(.*?)</script>', PAGE.read_text(), re.DOTALL)[1])["imports"]
    assert sorted(imports.values()) == sorted(f"./{path.name}" for path in PAGE.parent.glob("*.js"))
    assert all(len(path.read_text().splitlines()) <= 300 for path in PAGE.parent.iterdir() if path.suffix != ".json")


def test_server_serves_its_files_and_nothing_else():
    with in_a_thread(PageServer()) as server:
        check_server(server.url)
        with pytest.raises(AddressUnavailable, match="0 for a free port"):
            PageServer(urlsplit(server.url).port)


def check_server(url):
    root = url.removesuffix("explain/")
    with urllib.request.urlopen(root) as answer:
        policy = answer.headers["Content-Security-Policy"]
        assert answer.url == url
        assert answer.read() == PAGE.read_bytes()
    assert policy == content_policy(PAGE.read_text())
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for path, kind in (("base.css", "text/css"), ("explain/recorded.json", "application/json")):
        with urllib.request.urlopen(root + path) as answer:
            assert answer.headers["Content-Type"] == f"{kind}; charset=utf-8"
            assert answer.read() == (PAGE.parent.parent / path).read_bytes()
    for path in ("explain/../../explain.py", "explain/%2e%2e/%2e%2e/explain.py", "dashboard/", "explain/nothing.js"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(root + path)


def test_command_writes_the_file(tmp_path):
    path = tmp_path / "page.html"
    result = CliRunner().invoke(main, ["explain", "--output", str(path), "--format", "json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"file": str(path), "bytes": path.stat().st_size}
    assert path.read_text() == single_file()
    missing = CliRunner().invoke(main, ["explain", "--output", str(tmp_path / "no" / "page.html")])
    assert missing.exit_code == 1
    assert "No such file" in missing.stderr


@pytest.mark.process
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_command_serves_until_a_signal(ending):
    command = [sys.executable, "-m", "deltawire.cli", "explain", "--format", "json", "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        address = json.loads("".join(process.stdout.readline() for _ in range(3)))["url"]
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(address) as answer:
            assert b"<title>" in answer.read()
        process.send_signal(ending)
        assert process.wait(120) == 0
        assert process.stderr.read() == ""
