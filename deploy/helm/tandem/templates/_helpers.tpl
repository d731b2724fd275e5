{{/* Names leave 23 of a label's 63 characters for suffixes, because a StatefulSet adds a hash and an ordinal number. */}}
{{- define "tandem.fullname" -}}
{{- $name := ternary .Release.Name (printf "%s-tandem" .Release.Name) (contains "tandem" .Release.Name) -}}
{{- default $name .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* dict root, component */}}
{{- define "tandem.selectorLabels" -}}
app.kubernetes.io/name: tandem
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* dict root, component */}}
{{- define "tandem.metadata" -}}
name: {{ include "tandem.fullname" .root }}-{{ .component }}
labels:
  {{- include "tandem.labels" . | nindent 2 }}
{{- end }}

{{- define "tandem.labels" -}}
{{ include "tandem.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{/* The component that places requests: endpoint pickers, or frontends. */}}
{{- define "tandem.entry" -}}
{{- ternary "epp" "frontend" .Values.epp.enabled -}}
{{- end }}

{{/* The gRPC port of each role (the API's port for frontends), and its admin port. */}}
{{- define "tandem.port" -}}
{{- get (dict "frontend" "8000" "epp" "9002" "router" "7000" "prefill" "7100" "decode" "7200" "etcd" "2379" "nats" "4222") . -}}
{{- end }}
{{- define "tandem.adminPort" -}}
{{- get (dict "frontend" "9300" "epp" "9300" "router" "9000" "prefill" "9100" "decode" "9200") . -}}
{{- end }}

{{/* The Secret with the TLS certificate of the port for clients, or for gateways. dict root, component */}}
{{- define "tandem.tlsSecret" -}}
{{- get (dict "frontend" .root.Values.frontend.tlsSecret "epp" .root.Values.epp.tls.secretName) .component -}}
{{- end }}

{{/* The name that a role has in `tandem ROLE`, and in its certificate. */}}
{{- define "tandem.role" -}}
{{- get (dict "prefill" "prefill-worker" "decode" "decode-worker") . | default . -}}
{{- end }}

{{/* Whether the processes have certificates. */}}
{{- define "tandem.hasCertificates" -}}
{{- if ne .Values.clusterTls.source "none" -}}yes{{- end -}}
{{- end }}

{{/* The Secret with a certificate. To routers, an endpoint picker is a frontend. dict root, component */}}
{{- define "tandem.certificateSecret" -}}
{{- $component := ternary "frontend" .component (eq .component "epp") -}}
{{- printf "%s-%s" (default (printf "%s-cert" (include "tandem.fullname" .root)) .root.Values.clusterTls.secretName) $component -}}
{{- end }}

{{- define "tandem.modelsFolder" -}}/var/lib/tandem/models{{- end }}

{{/* ORG/NAME of hf:ORG/NAME@REVISION; the last part of a path. */}}
{{- define "tandem.serverName" -}}
{{- if hasPrefix "/" .Values.model.source -}}
{{- default (base .Values.model.source) .Values.model.servedName -}}
{{- else -}}
{{- default (include "tandem.repository" .) .Values.model.servedName -}}
{{- end -}}
{{- end }}
{{- define "tandem.repository" -}}
{{- regexReplaceAll "^hf:([^@]+).*$" .Values.model.source "${1}" -}}
{{- end }}
{{- define "tandem.revision" -}}
{{- if contains "@" .Values.model.source -}}{{- regexReplaceAll "^[^@]*@" .Values.model.source "" -}}{{- end -}}
{{- end }}

{{/* The model's path in the claim, for vLLM and SGLang. */}}
{{- define "tandem.serverPath" -}}
{{- if hasPrefix "/" .Values.model.source -}}
{{- .Values.model.source -}}
{{- else -}}
{{- printf "%s/%s" (include "tandem.modelsFolder" .) (include "tandem.repository" .) -}}
{{- end -}}
{{- end }}

{{/* How the pods of a component get the model: claim, init (a container downloads it), self (the process downloads it), or nothing. dict root, component */}}
{{- define "tandem.modelFrom" -}}
{{- $v := .root.Values -}}
{{- if or (eq .component "router") (and (eq $v.engine "sim") (not $v.model.source)) -}}
{{- else if $v.model.claim.name -}}claim
{{- else if has $v.engine (list "vllm" "sglang") -}}self
{{- else -}}init
{{- end -}}
{{- end }}

{{/* The file in the claim that the Job creates when it has downloaded the model. */}}
{{- define "tandem.modelMarker" -}}
{{- printf "%s/.complete-%s" (include "tandem.modelsFolder" .) (sha256sum (printf "%s %s" .Values.engine .Values.model.source) | trunc 8) -}}
{{- end }}

{{/* The most workers that a role may have. dict root, component */}}
{{- define "tandem.replicasMax" -}}
{{- $c := get .root.Values .component -}}
{{- ternary $c.autoscaling.maxReplicas $c.replicas $c.autoscaling.enabled -}}
{{- end }}

{{/* The address at which other processes reach this one. dict root, component */}}
{{- define "tandem.advertise" -}}
{{- if eq .root.Values.discovery "etcd" -}}
$(POD_IP):{{ include "tandem.port" .component }}
{{- else -}}
$(POD_NAME).{{ include "tandem.fullname" .root }}-{{ .component }}:{{ include "tandem.port" .component }}
{{- end -}}
{{- end }}

{{/* The DNS names and ports of a StatefulSet's pods, one a line. dict root, component, count */}}
{{- define "tandem.addresses" -}}
{{- $name := printf "%s-%s" (include "tandem.fullname" .root) .component -}}
{{- $port := include "tandem.port" .component -}}
{{- range until (int .count) }}
{{ printf "%s-%d.%s:%s" $name . $name $port }}
{{- end }}
{{- end }}

{{/* host:port of etcd or NATS, separated by commas. dict root, component, listed */}}
{{- define "tandem.servers" -}}
{{- if .listed -}}{{- join "," .listed -}}
{{- else -}}{{- printf "%s-%s:%s" (include "tandem.fullname" .root) .component (include "tandem.port" .component) -}}
{{- end -}}
{{- end }}

{{/* The flags of the connection to etcd or NATS. dict root, component, servers, settings */}}
{{- define "tandem.connection" -}}
{{- $folder := printf "/run/secrets/%s" .component }}
- --{{ .component }}={{ include "tandem.servers" (dict "root" .root "component" .component "listed" .servers) }}
{{- if .settings.user }}
- --{{ .component }}-user={{ .settings.user }}
- --{{ .component }}-password-file={{ $folder }}-password/{{ .settings.passwordSecret.key }}
{{- end }}
{{- if .settings.tls.secretName }}
- --{{ .component }}-ca={{ $folder }}-tls/ca.crt
{{- if .settings.tls.clientCertificate }}
- --{{ .component }}-cert={{ $folder }}-tls/tls.crt
- --{{ .component }}-key={{ $folder }}-tls/tls.key
{{- end }}
{{- end }}
{{- end }}

{{/* A map of flags as arguments, in the order of their names. YAML's numbers are floats in templates. */}}
{{- define "tandem.flags" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
{{- if $value }}
- --{{ $name }}
{{- end }}
{{- else if kindIs "slice" $value }}
- {{ printf "--%s=%s" $name (join "," $value) | quote }}
{{- else if and (kindIs "float64" $value) (eq (floor $value) $value) }}
- --{{ $name }}={{ int64 $value }}
{{- else if not (kindIs "invalid" $value) }}
- {{ printf "--%s=%v" $name $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tandem.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}

{{/* Refuses values that do not fit each other. */}}
{{- define "tandem.check" -}}
{{- $v := .Values -}}
{{- if has $v.engine (list "vllm" "sglang") -}}
{{- if not (or (hasPrefix "hf:" $v.model.source) (hasPrefix "/" $v.model.source)) -}}
{{- fail (printf "engine %s needs model.source: hf:ORG/NAME, or a path in model.claim" $v.engine) -}}
{{- end -}}
{{- $prefills := or (gt (int $v.prefill.replicas) 0) $v.prefill.autoscaling.enabled -}}
{{- if and (eq (get $v $v.engine).kvConnector "none") $prefills -}}
{{- fail (printf "prefill workers with engine %s need %s.kvConnector; without it set prefill.replicas to 0: decode workers then prefill their own prompts" $v.engine $v.engine) -}}
{{- end -}}
{{- if and (eq $v.engine "sglang") (ne $v.sglang.kvConnector "none") (not $prefills) -}}
{{- fail "with sglang.kvConnector other than none, decode servers compute no prompts: set prefill.replicas to 1 or more, or sglang.kvConnector to none" -}}
{{- end -}}
{{- end -}}
{{- if $v.epp.enabled -}}
{{- if ne $v.engine "vllm" -}}
{{- fail (printf "epp.enabled needs engine vllm: an endpoint picker cannot observe workers with engine %s" $v.engine) -}}
{{- end -}}
{{- if ne $v.vllm.kvConnector "none" -}}
{{- fail "epp.enabled needs vllm.kvConnector none and prefill.replicas 0: a gateway sends each request to one server, which prefills it itself" -}}
{{- end -}}
{{- range $v.vllm.args -}}
{{- if regexMatch "^(--data[-_]parallel|-dp)" . -}}
{{- fail (printf "epp.enabled cannot be used with %s in vllm.args: a gateway cannot choose among data-parallel ranks; raise decode.replicas instead" .) -}}
{{- end -}}
{{- end -}}
{{- if or $v.frontend.apiKeysSecret.name $v.frontend.tlsSecret $v.frontend.autoscaling.enabled -}}
{{- fail "frontend.apiKeysSecret, frontend.tlsSecret and frontend.autoscaling have no effect with epp.enabled: the gateway has the keys of clients, epp.tls the certificate of pickers, and epp.autoscaling adds pickers" -}}
{{- end -}}
{{- if ne (eq $v.epp.tls.source "secret") (ne $v.epp.tls.secretName "") -}}
{{- fail "epp.tls.source secret needs epp.tls.secretName, the name of a Secret of the type kubernetes.io/tls; other sources have none" -}}
{{- end -}}
{{- if and $v.epp.httpRoute.enabled (not $v.epp.httpRoute.parentRefs) -}}
{{- fail "epp.httpRoute.enabled needs epp.httpRoute.parentRefs, such as [{name: GATEWAY, namespace: NAMESPACE}]" -}}
{{- end -}}
{{- if and $v.networkPolicy.enabled (not $v.networkPolicy.api) -}}
{{- fail "epp.enabled needs networkPolicy.api, the sources that may reach pickers and servers, which authenticate no caller: the gateway's pods, such as [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: NAMESPACE}}}]" -}}
{{- end -}}
{{- end -}}
{{- if and $v.clusterTls.issuer.name (ne $v.clusterTls.source "cert-manager") -}}
{{- fail "clusterTls.issuer needs clusterTls.source cert-manager" -}}
{{- end -}}
{{- if and (hasPrefix "/" $v.model.source) (not $v.model.claim.name) -}}
{{- fail "a path in model.source needs model.claim.name, the claim that holds it" -}}
{{- end -}}
{{- if and $v.model.claim.create (or (not $v.model.claim.name) (hasPrefix "/" $v.model.source) (and (eq $v.engine "sim") (not $v.model.source))) -}}
{{- fail "model.claim.create needs model.claim.name, and a model.source to download into it" -}}
{{- end -}}
{{- range $role := list "prefill" "decode" "frontend" "epp" -}}
{{- $a := (get $v $role).autoscaling -}}
{{- if and $a.enabled (lt (int $a.maxReplicas) (int $a.minReplicas)) -}}
{{- fail (printf "%s.autoscaling.maxReplicas is less than minReplicas" $role) -}}
{{- end -}}
{{- if and $a.enabled (default false $a.wanted) (not (or (hasKey $v.router.flags "slo-ttft") (hasKey $v.router.flags "slo-itl"))) -}}
{{- fail (printf "%s.autoscaling.wanted needs slo-ttft or slo-itl in router.flags, in milliseconds" $role) -}}
{{- end -}}
{{- end -}}
{{- range $role := list "frontend" "epp" "router" "prefill" "decode" -}}
{{- range $flag := list "cluster" "cluster-key-file" "listen" "admin-listen" "advertise" "grace-period" "engine" "engine-url" "observe" "model" "served-model-name" "offline" "cluster-cert" "cluster-cert-key" "cluster-ca" "workers" "workers-file" "router" "peers" "etcd" "nats" "worker-id" "api-keys-file" "tls-cert" "tls-key" "tls-self-signed" -}}
{{- if or (hasKey (get $v $role).flags $flag) (hasKey $v.flags $flag) -}}
{{- fail (printf "the chart itself sets --%s; remove it from flags and use the chart's values" $flag) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}
