{{- define "trivium.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 }}{{ end }}
{{- end }}

{{- define "trivium.selector" -}}
app.kubernetes.io/name: trivium
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "trivium.labels" -}}
{{ include "trivium.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- /* trivium.toml: the values, and what follows from others of them. */ -}}
{{- define "trivium.toml" -}}
{{- $config := deepCopy .Values.config }}
{{- if .Values.tls.secret }}
{{- $tls := dict "tls_cert" "/run/secrets/trivium/tls/tls.crt" "tls_key" "/run/secrets/trivium/tls/tls.key" }}
{{- $config = mergeOverwrite $config (dict "security" $tls) }}
{{- end }}
{{- toToml $config }}
{{- end }}

{{- define "trivium.managementScheme" -}}
{{ if or .Values.tls.secret (dig "security" "tls_cert" "" .Values.config) }}HTTPS{{ else }}HTTP{{ end }}
{{- end }}

{{- define "trivium.port" -}}
{{ regexFind "[0-9]+$" . }}
{{- end }}
