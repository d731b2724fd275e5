"""Lints the Helm chart, renders it with several values, and checks the manifests against the schemas of Kubernetes' API. ci/helm.sh runs it.

    check.py HELM FOLDER      HELM: the program; FOLDER: where the manifests are written, for tests/tests/deploy.rs
"""

import functools
import pathlib
import re
import subprocess
import sys

import kubernetes_validate
import kubernetes_validate.utils
import yaml

import gateway

ROOT = pathlib.Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/tandem"
# The oldest version that Chart.yaml permits, and the newest whose schemas are installed.
VERSIONS = ["1.29", kubernetes_validate.latest_version()]
# Kinds of the Prometheus operator and of cert-manager, whose schemas are not those of Kubernetes.
CUSTOM = {"ServiceMonitor", "PrometheusRule", "Issuer", "Certificate"}
# Endpoint pickers without anything that is refused.
EPP = "engine=vllm,model.source=hf:a/b,prefill.replicas=0,epp.enabled=true,networkPolicy.enabled=false"
# Settings that the chart must refuse, and a part of the error.
REFUSED = [
    ("enginee=cpu", "enginee"),
    ("engine=tgi", "engine"),
    ("router.autoscaling.enabled=true", "router.autoscaling"),
    ("prefill.autoscaling.cpuUtilization=70", "cpuUtilization"),
    ("decode.replicas=0", "decode.replicas"),
    ("router.tlsSecret=x", "router.tlsSecret"),
    ("frontend.flags.listen=x", "--listen"),
    ("flags.etcd=x", "--etcd"),
    ("router.flags.cluster-ca=x", "--cluster-ca"),
    ("clusterTls.source=yes", "clusterTls.source"),
    ("clusterTls.issuer.name=x", "clusterTls.source"),
    ("model.source=/tmp/x", "model.source"),
    ("model.source=/var/lib/tandem/models/x", "model.claim.name"),
    ("model.claim.create=true", "model.claim.name"),
    ("engine=vllm", "model.source"),
    ("engine=vllm,model.source=hf:a/b", "kvConnector"),
    ("engine=vllm,vllm.kvConnector=mooncake", "kvConnector"),
    ("engine=sglang,model.source=hf:a/b", "kvConnector"),
    ("engine=sglang,model.source=hf:a/b,sglang.kvConnector=nixl,prefill.replicas=0", "prefill.replicas"),
    ("decode.autoscaling.enabled=true,decode.autoscaling.minReplicas=9", "maxReplicas"),
    ("decode.autoscaling.enabled=true,decode.autoscaling.wanted=true", "slo-ttft"),
    ("frontend.autoscaling.wanted=true", "wanted"),
    ("discovery=etcd,etcd.user=tandem", "etcd.passwordSecret.name"),
    ("epp.enabled=true", "epp.enabled needs engine vllm"),
    (f"{EPP},engine=sglang", "epp.enabled needs engine vllm"),
    (f"{EPP},vllm.kvConnector=nixl", "epp.enabled needs vllm.kvConnector none"),
    (f"{EPP},vllm.kvConnector=nixl,prefill.replicas=1", "epp.enabled needs vllm.kvConnector none"),
    (f"{EPP},prefill.replicas=1", "set prefill.replicas to 0"),
    (f"{EPP},vllm.args={{--max-model-len=8192,--data-parallel-size=2}}", "--data-parallel-size=2 in vllm.args"),
    (f"{EPP},vllm.args={{-dp=2}}", "-dp=2 in vllm.args"),
    (f"{EPP},frontend.apiKeysSecret.name=x", "frontend.apiKeysSecret"),
    (f"{EPP},frontend.tlsSecret=x", "frontend.tlsSecret"),
    (f"{EPP},frontend.autoscaling.enabled=true", "epp.autoscaling"),
    (f"{EPP},networkPolicy.enabled=true", "networkPolicy.api"),
    (f"{EPP},epp.httpRoute.enabled=true", "epp.httpRoute.parentRefs"),
    (f"{EPP},epp.httpRoute.timeout=600", "epp.httpRoute.timeout"),
    (f"{EPP},epp.inferencePool.failureMode=Fail", "epp.inferencePool.failureMode"),
    (f"{EPP},epp.replicas=0", "epp.replicas"),
    (f"{EPP},epp.autoscaling.enabled=true,epp.autoscaling.minReplicas=9", "epp.autoscaling.maxReplicas"),
    (f"{EPP},epp.tlsSecret=x", "epp.tlsSecret"),
    (f"{EPP},epp.tls.source=secret", "epp.tls.secretName"),
    (f"{EPP},epp.tls.secretName=x", "epp.tls.source secret"),
    (f"{EPP},epp.tls.source=cert-manager", "epp.tls.source"),
    (f"{EPP},epp.flags.tls-self-signed=true", "--tls-self-signed"),
    ("frontend.tls.source=none", "frontend.tls"),
    (f"{EPP},epp.flags.engine-url=http://x:1", "--engine-url"),
    (f"{EPP},decode.flags.observe=10.1.2.3:1", "--observe"),
    ("frontend.httpRoute.enabled=true", "frontend.httpRoute"),
]

# The schemas of all definitions are one large file.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)


class Loader(yaml.SafeLoader):
    """Refuses a key that occurs twice in a map, as Kubernetes does."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"{twice} occurs twice", node.start_mark)
        return super().construct_mapping(node, deep)


def run(*command):
    result = subprocess.run(command, capture_output=True, text=True)
    # Helm reports the symbolic link to the alerts at each call.
    errors = "".join(line for line in result.stderr.splitlines(True) if "found symbolic link" not in line)
    return result.returncode, result.stdout, errors


def problems_of(name, manifests):
    """Returns what is wrong with the rendered manifests, and the number of objects."""
    try:
        objects = [item for item in yaml.load_all(manifests, Loader) if item]
    except yaml.YAMLError as error:
        return [f"{name}: {error}"], 0
    problems = []
    names = [(item["kind"], item["metadata"]["name"]) for item in objects]
    problems += [f"{name}: {item} is defined twice" for item in sorted(set(names)) if names.count(item) > 1]
    problems += [f"{name}: {problem}" for problem in gateway.problems_of(objects)]
    for item in objects:
        if item["kind"] in CUSTOM:
            continue
        found = gateway.invalid(item)
        if found is not None:
            problems += [f"{name}: {problem}" for problem in found]
            continue
        for version in VERSIONS:
            try:
                kubernetes_validate.validate(item, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                path = ".".join(str(part) for part in error.path)
                problems.append(f"{name}: {item['kind']} {item['metadata']['name']}, Kubernetes {version}: {path}: {error.message}")
            except kubernetes_validate.SchemaNotFoundError as error:
                problems.append(f"{name}: {error.message}")
    return problems, len(objects)


def main(helm, folder):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.yaml"):
        old.unlink()
    problems = []
    files = sorted([*(ROOT / "deploy/helm/examples").glob("*.yaml"), *(ROOT / "ci/helm").glob("*.yaml")])
    for file in [None, *files]:
        name = file.stem if file else "defaults"
        values = ["--values", str(file)] if file else []
        status, output, errors = run(helm, "lint", "--strict", str(CHART), *values)
        if status != 0:
            problems.append(f"{name}: helm lint: {output}{errors}")
            continue
        status, output, errors = run(helm, "template", "test", str(CHART), "--namespace", "serving", *values)
        if status != 0:
            problems.append(f"{name}: helm template: {errors}")
            continue
        (folder / f"{name}.yaml").write_text(output)
        found, count = problems_of(name, output)
        problems += found
        print(f"{name}: {count} objects")
    for settings, expected in REFUSED:
        status, output, errors = run(helm, "template", "test", str(CHART), "--set", settings)
        if status == 0 or expected not in errors:
            problems.append(f"--set {settings} is not refused with an error about {expected}: {errors}")
    readme = (CHART / "README.md").read_text()
    values = yaml.load((CHART / "values.yaml").read_text(), Loader)
    problems += [f"README.md of the chart does not explain `{key}`" for key in values if f"`{key}" not in readme]
    version = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.M)[1]
    chart = yaml.load((CHART / "Chart.yaml").read_text(), Loader)
    if chart["appVersion"] != version:
        problems.append(f"appVersion in Chart.yaml is {chart['appVersion']}, the version in Cargo.toml {version}")
    print(f"Kubernetes {' and '.join(VERSIONS)}: {len(problems)} problems; {len(REFUSED)} settings that must be refused")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
