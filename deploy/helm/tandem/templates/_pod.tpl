{{/* The arguments of a role's process. dict root, component */}}
{{- define "tandem.args" -}}
{{- $root := .root }}{{- $v := .root.Values }}{{- $component := .component }}
{{- $c := get $v $component }}
{{- $isWorker := has $component (list "prefill" "decode") }}
{{- $isEntry := has $component (list "frontend" "epp") }}
{{- $modelFrom := include "tandem.modelFrom" . }}
{{- $byEtcd := eq $v.discovery "etcd" }}
- {{ include "tandem.role" $component }}
- --listen=0.0.0.0:{{ include "tandem.port" $component }}
- --admin-listen=0.0.0.0:{{ include "tandem.adminPort" $component }}
- --grace-period={{ $v.gracePeriodSeconds }}
{{- if or $isWorker $byEtcd }}
- --advertise={{ include "tandem.advertise" . }}
{{- end }}
{{- if $isWorker }}
- --worker-id=$(POD_NAME)
{{- end }}
{{- if include "tandem.hasCertificates" $root }}
- --cluster-cert=/run/secrets/cluster-tls/tls.crt
- --cluster-cert-key=/run/secrets/cluster-tls/tls.key
- --cluster-ca=/run/secrets/cluster-tls/ca.crt
{{- end }}
{{- if $byEtcd }}
{{- include "tandem.connection" (dict "root" $root "component" "etcd" "servers" $v.etcd.endpoints "settings" $v.etcd) }}
{{- else if eq $component "router" }}
- --workers-file=/etc/tandem/workers
- --peers={{ include "tandem.addresses" (dict "root" $root "component" "router" "count" $v.router.replicas) | trim | replace "\n" "," }}
{{- else if $isEntry }}
- --router={{ include "tandem.addresses" (dict "root" $root "component" "router" "count" $v.router.replicas) | trim | replace "\n" "," }}
{{- end }}
{{- if and (eq $component "frontend") $c.apiKeysSecret.name }}
- --api-keys-file=/run/secrets/api-keys/{{ $c.apiKeysSecret.key }}
{{- end }}
{{- if include "tandem.tlsSecret" . }}
- --tls-cert=/run/secrets/tls/tls.crt
- --tls-key=/run/secrets/tls/tls.key
{{- else if and (eq $component "epp") (eq $v.epp.tls.source "self-signed") }}
- --tls-self-signed
{{- end }}
{{- if and $v.nats.enabled (not $isEntry) }}
{{- include "tandem.connection" (dict "root" $root "component" "nats" "servers" $v.nats.servers "settings" $v.nats) }}
{{- end }}
{{- if ne $component "router" }}
- --engine={{ $v.engine }}
{{- if eq (include "tandem.hasServer" .) "yes" }}
{{- $s := get $v $v.engine }}
- --engine-url=http://{{ ternary "$(POD_IP)" "127.0.0.1" (and (eq $v.engine "sglang") (ne $s.kvConnector "none")) }}:8000
- --engine-events=ipc:///run/{{ $v.engine }}/events
- --engine-events-replay=ipc:///run/{{ $v.engine }}/replay
{{- if eq $v.engine "vllm" }}
- --engine-kv-connector={{ $s.kvConnector }}
{{- end }}
{{- if $v.epp.enabled }}
- --observe=$(POD_IP):8000
{{- end }}
- --batch-max={{ $s.maxNumSeqs }}
{{- else }}
{{- if has $v.engine (list "vllm" "sglang") }}
- --model={{ ternary (include "tandem.serverPath" $root) $v.model.source (eq $modelFrom "claim") }}
- --served-model-name={{ include "tandem.serverName" $root }}
{{- else }}
{{- with $v.model.source }}
- {{ printf "--model=%s" . | quote }}
{{- end }}
{{- with $v.model.servedName }}
- --served-model-name={{ . }}
{{- end }}
{{- end }}
{{- if has $modelFrom (list "claim" "init") }}
- --offline
{{- else if and (eq $modelFrom "self") $v.model.hfToken.secretName }}
- --hf-token-file=/run/secrets/hf-token/{{ $v.model.hfToken.key }}
{{- end }}
{{- end }}
{{- end }}
{{- include "tandem.flags" (mergeOverwrite (deepCopy $v.flags) $c.flags) }}
{{- end }}

{{/* The volumes of a role's pod, and where its process has them. dict root, component */}}
{{- define "tandem.mounts" -}}
{{- $v := .root.Values }}
{{- $modelFrom := include "tandem.modelFrom" . }}
- { name: tmp, mountPath: /tmp }
- { name: cluster-key, mountPath: /run/secrets/tandem, readOnly: true }
{{- if include "tandem.hasCertificates" .root }}
- { name: cluster-tls, mountPath: /run/secrets/cluster-tls, readOnly: true }
{{- if eq .component "router" }}
- { name: tool-tls, mountPath: /run/secrets/tool-tls, readOnly: true }
{{- end }}
{{- end }}
{{- range $server := tuple "etcd" "nats" }}
{{- $settings := get $v $server }}
{{- if eq (include "tandem.uses" (dict "root" $.root "component" $.component "server" $server)) "yes" }}
{{- if $settings.user }}
- { name: {{ $server }}-password, mountPath: /run/secrets/{{ $server }}-password, readOnly: true }
{{- end }}
{{- if $settings.tls.secretName }}
- { name: {{ $server }}-tls, mountPath: /run/secrets/{{ $server }}-tls, readOnly: true }
{{- end }}
{{- end }}
{{- end }}
{{- if and (eq .component "router") (eq $v.discovery "static") }}
- { name: workers, mountPath: /etc/tandem, readOnly: true }
{{- end }}
{{- if and (eq .component "frontend") $v.frontend.apiKeysSecret.name }}
- { name: api-keys, mountPath: /run/secrets/api-keys, readOnly: true }
{{- end }}
{{- if include "tandem.tlsSecret" . }}
- { name: tls, mountPath: /run/secrets/tls, readOnly: true }
{{- end }}
{{- if eq (include "tandem.hasServer" .) "yes" }}
- { name: {{ $v.engine }}, mountPath: /run/{{ $v.engine }} }
{{- else if $modelFrom }}
- { name: models, mountPath: {{ include "tandem.modelsFolder" .root }}, readOnly: {{ ne $modelFrom "self" }} }
{{- if and (eq $modelFrom "self") $v.model.hfToken.secretName }}
- { name: hf-token, mountPath: /run/secrets/hf-token, readOnly: true }
{{- end }}
{{- end }}
{{- if eq (include "tandem.hasGpu" .) "cuda" }}
- { name: shm, mountPath: /dev/shm }
{{- end }}
{{- end }}

{{- define "tandem.volumes" -}}
{{- $v := .root.Values }}
{{- $modelFrom := include "tandem.modelFrom" . }}
- { name: tmp, emptyDir: {} }
- name: cluster-key
  secret:
    secretName: {{ default (printf "%s-cluster-key" (include "tandem.fullname" .root)) $v.clusterKey.existingSecret }}
    defaultMode: 0440
    items: [{ key: {{ $v.clusterKey.key }}, path: cluster_key }]
{{- if include "tandem.hasCertificates" .root }}
- { name: cluster-tls, secret: { secretName: {{ include "tandem.certificateSecret" . }}, defaultMode: 0440 } }
{{- if eq .component "router" }}
# For `tandem top` in this pod.
- { name: tool-tls, secret: { secretName: {{ include "tandem.certificateSecret" (dict "root" .root "component" "tool") }}, defaultMode: 0440 } }
{{- end }}
{{- end }}
{{- range $server := tuple "etcd" "nats" }}
{{- $settings := get $v $server }}
{{- if eq (include "tandem.uses" (dict "root" $.root "component" $.component "server" $server)) "yes" }}
{{- if $settings.user }}
- { name: {{ $server }}-password, secret: { secretName: {{ required (printf "%s.user needs %s.passwordSecret.name" $server $server) $settings.passwordSecret.name }}, defaultMode: 0440 } }
{{- end }}
{{- with $settings.tls.secretName }}
- { name: {{ $server }}-tls, secret: { secretName: {{ . }}, defaultMode: 0440 } }
{{- end }}
{{- end }}
{{- end }}
{{- if and (eq .component "router") (eq $v.discovery "static") }}
- { name: workers, configMap: { name: {{ include "tandem.fullname" .root }}-workers } }
{{- end }}
{{- if and (eq .component "frontend") $v.frontend.apiKeysSecret.name }}
- { name: api-keys, secret: { secretName: {{ $v.frontend.apiKeysSecret.name }}, defaultMode: 0440 } }
{{- end }}
{{- with include "tandem.tlsSecret" . }}
- { name: tls, secret: { secretName: {{ . }}, defaultMode: 0440 } }
{{- end }}
{{- if eq $modelFrom "claim" }}
- { name: models, persistentVolumeClaim: { claimName: {{ $v.model.claim.name }}, readOnly: true } }
{{- else if $modelFrom }}
{{- if ne (include "tandem.hasServer" .) "yes" }}
- { name: models, emptyDir: { sizeLimit: {{ $v.model.podVolumeSize }} } }
{{- end }}
{{- with $v.model.hfToken.secretName }}
- { name: hf-token, secret: { secretName: {{ . }}, defaultMode: 0440 } }
{{- end }}
{{- end }}
{{- if eq (include "tandem.hasServer" .) "yes" }}
# The sockets of KV events.
- { name: {{ $v.engine }}, emptyDir: { medium: Memory, sizeLimit: 1Mi } }
- { name: cache, emptyDir: { sizeLimit: {{ (get $v $v.engine).cacheSize }} } }
{{- end }}
{{- if include "tandem.hasGpu" . }}
- { name: shm, emptyDir: { medium: Memory, sizeLimit: {{ $v.sharedMemorySize }} } }
{{- end }}
{{- end }}

{{/* Whether the component uses etcd or NATS. dict root, component, server */}}
{{- define "tandem.uses" -}}
{{- if eq .server "etcd" -}}{{- ternary "yes" "no" (eq .root.Values.discovery "etcd") -}}
{{- else -}}{{- ternary "yes" "no" (and .root.Values.nats.enabled (not (has .component (list "frontend" "epp")))) -}}
{{- end -}}
{{- end }}

{{/* Whether a vLLM or SGLang server runs in the component's pods. */}}
{{- define "tandem.hasServer" -}}
{{- ternary "yes" "no" (and (has .root.Values.engine (list "vllm" "sglang")) (has .component (list "prefill" "decode"))) -}}
{{- end }}
{{/* The engine, if the component's pods have GPUs. */}}
{{- define "tandem.hasGpu" -}}
{{- if and (has .root.Values.engine (list "cuda" "vllm" "sglang")) (has .component (list "prefill" "decode")) -}}{{- .root.Values.engine -}}{{- end -}}
{{- end }}

{{/* The containers that run before or with a role's process. dict root, component */}}
{{- define "tandem.initContainers" -}}
{{- $v := .root.Values }}
{{- $modelFrom := include "tandem.modelFrom" . }}
{{- $folder := include "tandem.modelsFolder" .root }}
{{- if eq $modelFrom "init" }}
- name: model
  image: {{ $v.images.fetch }}
  imagePullPolicy: {{ $v.imagePullPolicy }}
  args:
    - model
    - fetch
    {{- with $v.model.source }}
    - {{ . | quote }}
    {{- end }}
    {{- if $v.model.hfToken.secretName }}
    - --hf-token-file=/run/secrets/hf-token/{{ $v.model.hfToken.key }}
    {{- end }}
  env: [{ name: HOME, value: /tmp }]
  securityContext: {{- include "tandem.containerSecurity" . | nindent 4 }}
  resources: { requests: { cpu: 100m, memory: 256Mi }, limits: { memory: 4Gi } }
  volumeMounts:
    - { name: tmp, mountPath: /tmp }
    - { name: models, mountPath: {{ $folder }} }
    {{- if $v.model.hfToken.secretName }}
    - { name: hf-token, mountPath: /run/secrets/hf-token, readOnly: true }
    {{- end }}
{{- else if and (eq $modelFrom "claim") $v.model.claim.create }}
- name: model
  image: {{ $v.images.cpu }}
  imagePullPolicy: {{ $v.imagePullPolicy }}
  command: [sh, -c, 'until [ -e {{ include "tandem.modelMarker" .root }} ]; do echo "waiting until the Job has downloaded the model"; sleep 5; done']
  securityContext: {{- include "tandem.containerSecurity" . | nindent 4 }}
  resources: { requests: { cpu: 10m, memory: 16Mi }, limits: { memory: 64Mi } }
  volumeMounts:
    - { name: models, mountPath: {{ $folder }}, readOnly: true }
{{- end }}
{{- if eq (include "tandem.hasServer" .) "yes" }}
{{- $s := get $v $v.engine }}
{{- $isVllm := eq $v.engine "vllm" }}
{{- $exchanges := ne $s.kvConnector "none" }}
{{- /* Decode servers of SGLang meet the prefill servers at their pods' addresses. A gateway sends requests to the pods' addresses. */}}
{{- $host := ternary "127.0.0.1" "$(POD_IP)" (or $isVllm (not $exchanges)) }}
{{- if $v.epp.enabled }}{{ $host = "0.0.0.0" }}{{ end }}
{{- $weights := ternary (include "tandem.serverPath" .root) (include "tandem.repository" .root) (eq $modelFrom "claim") }}
{{- $events := printf "\"publisher\":\"zmq\",\"endpoint\":\"ipc:///run/%s/events\",\"replay_endpoint\":\"ipc:///run/%s/replay\"" $v.engine $v.engine }}
# A sidecar, so that the server ends after the worker has drained.
- name: {{ $v.engine }}
  restartPolicy: Always
  image: {{ get $v.images $v.engine }}
  imagePullPolicy: {{ $v.imagePullPolicy }}
  {{- if $isVllm }}
  command: [vllm, serve]
  args:
    - {{ $weights }}
  {{- else }}
  command: [python3, -m, sglang.launch_server]
  args:
    - --model-path={{ $weights }}
  {{- end }}
    {{- if and (eq $modelFrom "self") (include "tandem.revision" .root) }}
    - --revision={{ include "tandem.revision" .root }}
    {{- end }}
    - --served-model-name={{ include "tandem.serverName" .root }}
    {{- if eq $host "127.0.0.1" }}
    # No other pod reaches the server.
    {{- end }}
    - --host={{ $host }}
    - --port=8000
    {{- if $isVllm }}
    - --max-num-seqs={{ $s.maxNumSeqs }}
    - --enable-scale-out
    - --enable-prompt-tokens-details
    - --kv-events-config={"enable_kv_cache_events":true,{{ $events }}}
    {{- if $exchanges }}
    - --kv-transfer-config={"kv_connector":"NixlConnector","kv_role":"kv_both","kv_load_failure_policy":"fail"}
    {{- end }}
    {{- else }}
    - --max-running-requests={{ $s.maxNumSeqs }}
    - --page-size=16
    - --incremental-streaming-output
    {{- if $exchanges }}
    - --disaggregation-mode={{ .component }}
    - --disaggregation-transfer-backend={{ $s.kvConnector }}
    {{- end }}
    {{- if not (and $exchanges (eq .component "decode")) }}
    - --kv-events-config={ {{- $events -}} }
    {{- end }}
    {{- end }}
    {{- range $s.args }}
    - {{ . | quote }}
    {{- end }}
  env:
    - { name: HOME, value: /home/{{ $v.engine }} }
    {{- if $isVllm }}
    - { name: VLLM_NO_USAGE_STATS, value: "1" }
    {{- end }}
    {{- if eq $modelFrom "claim" }}
    - { name: HF_HUB_OFFLINE, value: "1" }
    {{- else if $v.model.hfToken.secretName }}
    - name: HF_TOKEN
      valueFrom: { secretKeyRef: { name: {{ $v.model.hfToken.secretName }}, key: {{ $v.model.hfToken.key }} } }
    {{- end }}
    {{- if $exchanges }}
    - name: {{ ternary "VLLM_NIXL_SIDE_CHANNEL_HOST" "POD_IP" $isVllm }}
      valueFrom: { fieldRef: { fieldPath: status.podIP } }
    {{- if $isVllm }}
    - { name: VLLM_NIXL_SIDE_CHANNEL_PORT, value: "5600" }
    {{- end }}
    {{- end }}
    {{- with $s.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- if $exchanges }}
  ports: [{ name: {{ ternary "nixl" "rooms" $isVllm }}, containerPort: {{ ternary 5600 8998 $isVllm }} }]
  {{- end }}
  {{- if $v.epp.enabled }}
  ports: [{ name: http, containerPort: 8000 }]
  # The gateway's requests do not pass the worker, which therefore ends at once; the server gives them as much time as other processes.
  lifecycle:
    preStop: { exec: { command: [sleep, {{ $v.gracePeriodSeconds | quote }}] } }
  {{- end }}
  startupProbe:
    exec: &health
      command: [python3, -c, "import os, urllib.request; urllib.request.urlopen('http://' + os.environ.get('POD_IP', '127.0.0.1') + ':8000/health', timeout=10)"]
    periodSeconds: 10
    timeoutSeconds: 15
    failureThreshold: {{ div $s.startupSeconds 10 }}
  livenessProbe:
    exec: *health
    periodSeconds: 30
    timeoutSeconds: 15
    failureThreshold: 4
  securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities:
      drop: [ALL]
      {{- with $s.capabilities }}
      add: {{- toYaml . | nindent 8 }}
      {{- end }}
  resources: {{- toYaml $s.resources | nindent 4 }}
  volumeMounts:
    - { name: tmp, mountPath: /tmp }
    - { name: {{ $v.engine }}, mountPath: /run/{{ $v.engine }} }
    - { name: cache, mountPath: /home/{{ $v.engine }} }
    - { name: shm, mountPath: /dev/shm }
    {{- if eq $modelFrom "claim" }}
    - { name: models, mountPath: {{ $folder }}, readOnly: true }
    {{- end }}
{{- end }}
{{- end }}

{{/* The template of a role's pods. dict root, component */}}
{{- define "tandem.pod" -}}
{{- $v := .root.Values }}
{{- $c := get $v .component }}
{{- $preStop := default 0 $c.preStopSeconds }}
{{- $image := ternary $v.images.cuda $v.images.cpu (eq (include "tandem.hasGpu" .) "cuda") }}
metadata:
  labels:
    {{- include "tandem.selectorLabels" . | nindent 4 }}
    {{- with $c.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $c.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  automountServiceAccountToken: false
  # The variables of service links begin with the names of Services, which may be those of settings.
  enableServiceLinks: false
  {{- with $v.serviceAccountName }}
  serviceAccountName: {{ . }}
  {{- end }}
  {{- with $v.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- $security := deepCopy $v.podSecurityContext }}
  {{- if eq (include "tandem.hasServer" .) "yes" }}
  {{- $s := get $v $v.engine }}
  {{- $security = mergeOverwrite $security (dict "runAsUser" $s.runAsUser "runAsGroup" $s.runAsGroup) }}
  {{- end }}
  securityContext: {{- toYaml $security | nindent 4 }}
  # Longer than --grace-period: a process that is killed before it has drained loses its requests.
  terminationGracePeriodSeconds: {{ add $v.gracePeriodSeconds $preStop 15 }}
  {{- with $c.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $c.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $c.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $c.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  topologySpreadConstraints:
    {{- if $c.topologySpreadConstraints }}
    {{- toYaml $c.topologySpreadConstraints | nindent 4 }}
    {{- else }}
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector: { matchLabels: {{ include "tandem.selectorLabels" . | fromYaml | toJson }} }
    {{- end }}
  {{- with include "tandem.initContainers" . | trim }}
  initContainers:
    {{- . | nindent 4 }}
  {{- end }}
  containers:
    - name: tandem
      image: {{ $image }}
      imagePullPolicy: {{ $v.imagePullPolicy }}
      args:
        {{- include "tandem.args" . | trim | nindent 8 }}
      env:
        # The commands of `kubectl exec`, such as `tandem top`, use these as well.
        - { name: TANDEM_CLUSTER, value: {{ include "tandem.fullname" .root }} }
        - { name: TANDEM_CLUSTER_KEY_FILE, value: /run/secrets/tandem/cluster_key }
        {{- if ne .component "router" }}
        - { name: TANDEM_MODELS_DIR, value: {{ include "tandem.modelsFolder" .root }} }
        {{- end }}
        - name: POD_NAME
          valueFrom: { fieldRef: { fieldPath: metadata.name } }
        - name: POD_IP
          valueFrom: { fieldRef: { fieldPath: status.podIP } }
        {{- with $c.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - { name: {{ ternary "http" "grpc" (eq .component "frontend") }}, containerPort: {{ include "tandem.port" .component }} }
        - { name: admin, containerPort: {{ include "tandem.adminPort" .component }} }
      startupProbe:
        httpGet: { path: /live, port: admin }
        periodSeconds: 5
        timeoutSeconds: 3
        failureThreshold: {{ max 1 (div $c.startupSeconds 5) }}
      livenessProbe:
        httpGet: { path: /live, port: admin }
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        httpGet: { path: /ready, port: admin }
        periodSeconds: 5
        timeoutSeconds: 3
        failureThreshold: 3
      {{- if $preStop }}
      lifecycle:
        preStop: { exec: { command: [sleep, {{ $preStop | quote }}] } }
      {{- end }}
      securityContext: {{- include "tandem.containerSecurity" . | nindent 8 }}
      resources: {{- toYaml $c.resources | nindent 8 }}
      volumeMounts:
        {{- include "tandem.mounts" . | trim | nindent 8 }}
        {{- with $c.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    {{- include "tandem.volumes" . | trim | nindent 4 }}
    {{- with $c.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
