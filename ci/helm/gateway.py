"""Checks the rendered chart's objects for gateways of the Kubernetes Gateway API. check.py uses it."""

import json

import jsonschema


def record(required, **properties):
    return {"type": "object", "additionalProperties": False, "required": required.split(), "properties": properties}


def array(items, most=16):
    return {"type": "array", "minItems": 1, "maxItems": most, "items": items}


TEXT = {"type": "string", "minLength": 1, "maxLength": 253}
PORT = record("number", number={"type": "integer", "minimum": 1, "maximum": 65535})
GROUP = "inference.networking.k8s.io"
# What the chart uses of the specifications in the Gateway API and in its Inference Extension.
SCHEMAS = {
    (f"{GROUP}/v1", "InferencePool"): record(
        "selector targetPorts endpointPickerRef",
        selector=record("matchLabels", matchLabels={"type": "object", "minProperties": 1, "additionalProperties": TEXT}),
        targetPorts=array(PORT, 1),
        endpointPickerRef=record("name port", name=TEXT, port=PORT, failureMode={"enum": ["FailOpen", "FailClose"]}),
    ),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): record(
        "parentRefs rules",
        parentRefs=array(record("name", name=TEXT, namespace=TEXT, sectionName=TEXT)),
        hostnames=array(TEXT),
        rules=array(record(
            "backendRefs",
            backendRefs=array(record("group kind name", group={"const": GROUP}, kind={"const": "InferencePool"}, name=TEXT)),
            timeouts=record("request", request={"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}),
        )),
    ),
}


def invalid(item):
    """Returns what is wrong with an object, or None if its kind has no schema here."""
    schema = SCHEMAS.get((item["apiVersion"], item["kind"]))
    errors = jsonschema.Draft202012Validator(schema).iter_errors(item["spec"]) if schema else []
    return [f"{item['kind']}: {error.json_path}: {error.message}" for error in errors] if schema else None


def flags(container):
    """Returns the values of a container's arguments of the form --NAME=VALUE."""
    return dict(argument.split("=", 1) for argument in container["args"] if "=" in argument)


def problems_of(objects):
    """Returns why a gateway could not ask the endpoint pickers, or not reach the servers that they choose."""
    templates = [item["spec"]["template"] for item in objects if item["kind"] in ("Deployment", "StatefulSet")]
    roles = {template["metadata"]["labels"]["app.kubernetes.io/component"] for template in templates}
    pools = [item for item in objects if item["kind"] == "InferencePool"]
    if not pools and "epp" not in roles:
        return []
    problems = []

    def expect(what, found, wanted):
        if found != wanted:
            problems.append(f"{what}: {found} instead of {wanted}")

    def selected(selector):
        """Returns the labels and the containers of the only pods that a selector matches."""
        [template] = [template for template in templates if selector.items() <= template["metadata"]["labels"].items()]
        containers = template["spec"].get("initContainers", []) + template["spec"]["containers"]
        return template["metadata"]["labels"], {container["name"]: container for container in containers}

    expect("roles", roles - {"etcd", "nats"}, {"epp", "router", "decode"})
    [pool] = pools
    [target] = [port["number"] for port in pool["spec"]["targetPorts"]]
    worker_labels, containers = selected(pool["spec"]["selector"]["matchLabels"])
    worker, server = flags(containers["tandem"]), flags(containers["vllm"])
    expect("role in the pool's pods", containers["tandem"]["args"][0], "decode-worker")
    expect("--observe", worker.get("--observe"), f"$(POD_IP):{target}")
    expect("the server's address", (server["--host"], server["--port"]), ("0.0.0.0", str(target)))
    expect("the server's container ports", [port["containerPort"] for port in containers["vllm"]["ports"]], [target])
    expect("--enable-prompt-tokens-details", "--enable-prompt-tokens-details" in containers["vllm"]["args"], True)
    events = json.loads(server["--kv-events-config"])
    expect("KV events", (events["endpoint"], events["replay_endpoint"]), (worker["--engine-events"], worker["--engine-events-replay"]))

    picker = pool["spec"]["endpointPickerRef"]
    [service] = [item["spec"] for item in objects if item["kind"] == "Service" and item["metadata"]["name"] == picker["name"]]
    [port] = [port for port in service["ports"] if port["port"] == picker["port"]["number"]]
    picker_labels, containers = selected(service["selector"])
    container = containers["tandem"]
    listens, certificate = int(flags(container)["--listen"].rsplit(":", 1)[1]), flags(container).get("--tls-cert")
    expect("role in the picker's pods", container["args"][0], "epp")
    has_tls = certificate is not None or "--tls-self-signed" in container["args"]
    expect("the protocol of the picker's Service", port["appProtocol"], "http2" if has_tls else "kubernetes.io/h2c")
    if certificate is not None:
        folders = [mount["mountPath"] for mount in container["volumeMounts"]]
        expect("the folder of the picker's certificate is mounted", certificate.rsplit("/", 1)[0] in folders, True)
    # Probes of gRPC cannot use TLS.
    probes = [container[f"{name}Probe"]["httpGet"]["port"] for name in ("startup", "liveness", "readiness")]
    expect("the ports of the picker's probes", probes, ["admin"] * 3)
    expect("the picker's container port", [port["containerPort"] for port in container["ports"]][0], listens)
    expect("the target port of the picker's Service", port["targetPort"], container["ports"][0]["name"])

    for route in [item["spec"] for item in objects if item["kind"] == "HTTPRoute"]:
        expect("backends of the HTTPRoute", [ref["name"] for rule in route["rules"] for ref in rule["backendRefs"]], [pool["metadata"]["name"]])
    policies = [item["spec"] for item in objects if item["kind"] == "NetworkPolicy"]
    for labels, number in [(worker_labels, target), (picker_labels, listens)]:
        rules = [rule for policy in policies if policy["podSelector"]["matchLabels"].items() <= labels.items() for rule in policy["ingress"]]
        sources = [peer for rule in rules if {"port": number} in rule["ports"] for peer in rule["from"]]
        expect(f"a source may reach port {number}", bool(sources), True)
        expect(f"Tandem's pods that may reach port {number}", [peer for peer in sources if "podSelector" in peer], [])
    return problems
