"""Files for deployment, as far as they can be checked without a container engine and systemd as init."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import yaml

from runtime.metrics.table import Metrics
from runtime.options.parse import from_argv
from tests.shape.source import ROOT

PAGE = (ROOT / "docs" / "deploy.md").read_text("utf-8")
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_are_made_of_what_exists(path: Path) -> None:
    """Extras are the package's, and what is copied is in the repository and not ignored."""
    text = path.read_text("utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    (wanted,) = re.findall(r"/src\[([\w,-]+)\]", text)
    assert set(wanted.split(",")) <= extras.keys()
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for name in line.split()}
    assert copied == allowed and all((ROOT / name).exists() for name in copied)


def test_the_unit_is_one_for_systemd(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "runtime.service"
    text = (ROOT / "deploy" / "runtime.service").read_text("utf-8")
    unit.write_text(text.replace("/opt/runtime/bin/runtime", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    about_it = [line for line in done.stderr.splitlines() if "runtime.service" in line]
    assert not about_it


def test_the_manifests_of_kubernetes_fit_the_server_and_the_image() -> None:
    """What one part of the file says of another, and of the image's entry point and user."""
    text = (ROOT / "deploy" / "kubernetes.yaml").read_text("utf-8")
    manifests = {one["kind"]: one for one in yaml.safe_load_all(text)}
    template = manifests["Deployment"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    image = (ROOT / "docker" / "cpu.Dockerfile").read_text("utf-8")
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)$", image, re.MULTILINE)[0])
    options = from_argv(
        [*entry[2:], *(word for one in container["args"] for word in one.split("=", 1))]
    ).options
    (port,) = container["ports"]
    assert (
        options.http.port
        == port["containerPort"]
        == int(template["metadata"]["annotations"]["prometheus.io/port"])
    )
    assert options.http.host == "0.0.0.0"
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    assert {probe["port"] for probe in probes} == {port["name"]}
    assert manifests["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    labels = template["metadata"]["labels"]
    assert manifests["Service"]["spec"]["selector"] == labels
    assert manifests["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    wait = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert template["spec"]["terminationGracePeriodSeconds"] == wait + options.http.shutdown_timeout + 10
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    assert mounts.keys() == volumes.keys()
    key_file = str(options.api.api_key_file)
    assert key_file.startswith(mounts["keys"]) and Path(key_file).name in manifests["Secret"]["stringData"]
    assert volumes["keys"]["secret"]["secretName"] == manifests["Secret"]["metadata"]["name"]
    assert f"--uid {template['spec']['securityContext']['runAsUser']} " in image


def metric_names() -> set[str]:
    """Names of all samples that a server can have, with the suffixes of histograms."""
    kinds = re.findall(r"^# TYPE (\S+) (\S+)$", Metrics().render().decode(), re.MULTILINE)
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    return {name + suffix for name, kind in kinds for suffix in suffixes.get(kind, ("",))}


def test_the_dashboard_and_the_alerts_ask_for_metrics_that_exist() -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text("utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    scrape, rules = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
    alerts: list[dict[str, Any]] = rules["groups"][0]["rules"]
    expressions += [alert["expr"] for alert in alerts]
    named = {name for one in expressions for name in re.findall(r"\bruntime_\w+", one)}
    assert len(named) > 20 and named <= metric_names()
    assert all(one.count("(") == one.count(")") for one in expressions)
    assert scrape["scrape_configs"][0]["job_name"] == "runtime"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_the_dashboard_is_what_its_script_writes() -> None:
    spec = spec_from_file_location("draw_dashboard", ROOT / "docs" / "draw_dashboard.py")
    assert spec is not None and spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    text = script.DASHBOARD.read_text("utf-8")
    assert text == script.dashboard(), "run python docs/draw_dashboard.py"
    assert len(text.encode()) < 60_000
