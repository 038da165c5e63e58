"""What deploy/ names exists: metrics, labels, commands, ports; Kubernetes accepts the manifests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from chairlift.metric_names import ALL, Kind, Spec
from chairlift_client.commands.probe import Kind as ProbeKind
from chairlift_client.settings import ServeSettings
from tests.unit.test_client_packaging import instructions

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
BY_NAME: dict[str, Spec] = {name: spec for spec in ALL for name in spec.exposed()}
# Triton's own that we read (its docs/user_guide/metrics.md).
TRITONS_OWN = {"nv_inference_pending_request_count", "nv_inference_request_failure"}
EVERYWHERE = {"model", "version", "instance", "pod", "namespace", "job"}


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


# ---------------------------------------------------------------- PromQL


def expressions() -> Iterator[tuple[str, str]]:
    """Every PromQL expression in deploy/, with where it stands."""
    for group in load(DEPLOY / "prometheus/alerts.yaml")["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    dashboard = json.loads((DEPLOY / "grafana/chairlift.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in dashboard["templating"]["list"]:
        yield variable["name"], variable["query"]
    for annotation in dashboard["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]
    for rule in load(DEPLOY / "prometheus/adapter.yaml")["rules"]["custom"]:
        yield rule["name"]["as"], rule["seriesQuery"]
        yield rule["name"]["as"], rule["metricsQuery"]


SELECTOR = re.compile(r"\b((?:vllm:|chairlift:|nv_)\w+)(?:\{(.*?)\})?")
CASES = list(expressions())
IDS = [f"{place}-{index}" for index, (place, _) in enumerate(CASES)]


def metrics_in(expression: str) -> list[tuple[str, set[str]]]:
    """The metrics that an expression selects, with the labels it matches."""
    return [
        (name, set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", inside)))
        for name, inside in SELECTOR.findall(expression)
    ]


@pytest.mark.parametrize(
    ("place", "expression"), CASES, ids=[f"{p}-{i}" for i, (p, _) in enumerate(CASES)]
)
def test_expressions_select_metrics_and_labels_that_exist(place: str, expression: str) -> None:
    found = metrics_in(expression)
    assert found or expression == "prometheus", place
    for name, labels in found:
        if name in TRITONS_OWN:
            assert labels <= EVERYWHERE | {"reason"}, (place, name, labels)
            continue
        spec = BY_NAME[name]
        own = {spec.label} if spec.label else set()
        assert labels <= EVERYWHERE | own | {"le"}, (place, name, labels)
        for value in re.findall(rf'{spec.label}=~?"([^"]*)"', expression) if spec.values else ():
            assert set(value.split("|")) <= set(spec.values), (place, value)


@pytest.mark.parametrize(
    ("place", "expression"), CASES, ids=[f"{p}-{i}" for i, (p, _) in enumerate(CASES)]
)
def test_expressions_use_counters_as_rates_and_gauges_as_they_are(
    place: str, expression: str
) -> None:
    for name, _ in metrics_in(expression):
        if name not in BY_NAME or "label_values" in expression:
            continue
        spec = BY_NAME[name]
        grows = spec.kind is not Kind.GAUGE
        ranged = re.search(rf"{re.escape(name)}(?:\{{[^}}]*\}})?\[", expression) is not None
        assert grows == ranged, f"{place}: {name} is a {spec.kind.value}"


def test_parentheses_of_expressions_match() -> None:
    for place, expression in CASES:
        for opening, closing in ("()", "[]", "{}"):
            assert expression.count(opening) == expression.count(closing), place


def test_the_dashboard_shows_every_latency_and_token_metric() -> None:
    shown = {name for _, expression in CASES for name, _ in metrics_in(expression)}
    families = {BY_NAME[name] for name in shown & BY_NAME.keys()}
    wanted = {
        spec
        for spec in ALL
        if re.search(r"chairlift:|latency|time_to_first|_time_seconds|tokens_total", spec.name)
    }
    hidden = {spec.name for spec in wanted - families}
    assert hidden <= {
        "vllm:request_inference_time_seconds",  # prefill and decode are shown apart
        "vllm:prompt_tokens_cached_total",  # the hit rate is shown
        "chairlift:last_step_rows",  # for `chairlift top`
        "chairlift:requests_open",
        "chairlift:tenant_prompt_tokens_total",
    }


def test_panels_lie_on_the_grid_without_overlap() -> None:
    panels = json.loads((DEPLOY / "grafana/chairlift.json").read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells


def test_every_alert_says_what_happened_and_what_to_do() -> None:
    rules = [r for g in load(DEPLOY / "prometheus/alerts.yaml")["groups"] for r in g["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 10
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "action"}


# ---------------------------------------------------------------- Kubernetes


CUSTOM = {"Kustomization", "ServiceMonitor"}


@pytest.mark.parametrize("version", ["1.28", "1.37"])
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_fit_the_schemas_of_kubernetes(path: Path, version: str) -> None:
    manifest = load(path)
    if manifest["kind"] not in CUSTOM:
        kubernetes_validate.validate(manifest, version, strict=True)


def manifest(kind: str) -> Any:
    (found,) = [m for m in map(load, MANIFESTS) if m["kind"] == kind]
    return found


def container() -> Any:
    (only,) = manifest("Deployment")["spec"]["template"]["spec"]["containers"]
    return only


def test_the_kustomization_names_every_manifest() -> None:
    named = set(manifest("Kustomization")["resources"])
    assert named == {path.name for path in MANIFESTS} - {"kustomization.yaml"}


def test_selectors_meet_labels() -> None:
    labels = manifest("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert manifest("Deployment")["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert manifest("Service")["spec"]["selector"].items() <= labels.items()
    monitored = manifest("ServiceMonitor")["spec"]["selector"]["matchLabels"]
    assert monitored.items() <= manifest("Service")["metadata"]["labels"].items()
    target = manifest("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert target["name"] == manifest("Deployment")["metadata"]["name"]


def test_ports_are_those_of_the_server() -> None:
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    settings = ServeSettings(repository=ROOT)
    assert ports == {
        "http": settings.http_port,
        "grpc": settings.grpc_port,
        "metrics": settings.metrics_port,
    }
    for port in manifest("Service")["spec"]["ports"]:
        assert port["port"] == ports[port["targetPort"]]
    assert {e["port"] for e in manifest("ServiceMonitor")["spec"]["endpoints"]} == {"metrics"}


def test_probes_are_commands_with_time_to_answer() -> None:
    for kind in ProbeKind:
        probe = container()[f"{kind.value}Probe"]
        assert probe["exec"]["command"] == ["chairlift", "probe", kind.value]
        assert probe["timeoutSeconds"] > 10, "the probe itself waits for ten seconds"


def test_the_grace_period_holds_a_whole_drain() -> None:
    pod = manifest("Deployment")["spec"]["template"]["spec"]
    args = container()["args"]
    drain = int(args[args.index("--drain-timeout") + 1])
    (_, before) = container()["lifecycle"]["preStop"]["exec"]["command"]
    assert pod["terminationGracePeriodSeconds"] >= drain + int(before) + 20


def test_the_control_folder_is_the_images() -> None:
    mounts = {mount["name"]: mount["mountPath"] for mount in container()["volumeMounts"]}
    (environment,) = instructions("ENV")
    assert f"CHAIRLIFT_CONTROL_DIR={mounts['control']}" in environment.split()
    assert mounts["shm"] == "/dev/shm"


def test_the_autoscaler_reads_what_the_adapter_makes() -> None:
    made = {r["name"]["as"] for r in load(DEPLOY / "prometheus/adapter.yaml")["rules"]["custom"]}
    metrics = manifest("HorizontalPodAutoscaler")["spec"]["metrics"]
    assert {metric["pods"]["metric"]["name"] for metric in metrics} == made
