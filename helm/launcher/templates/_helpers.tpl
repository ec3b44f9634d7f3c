{{/* Names of this release's objects in its namespace: RELEASE-PART. Parts differ within 9 characters, so truncated names stay unique. */}}
{{- define "launcher.name" -}}
{{- printf "%s-%s" .root.Release.Name .part | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* Names of cluster-scoped objects: NAMESPACE.RELEASE. A namespace has no dot in its name, so names of two releases never collide. */}}
{{- define "launcher.wideName" -}}
{{- $name := printf "%s.%s" .root.Release.Namespace .root.Release.Name -}}
{{- with .part -}}{{- $name = printf "%s.%s" $name . -}}{{- end -}}
{{- if gt (len $name) 63 -}}{{- $name = printf "%s-%s" ($name | trunc 52 | trimAll "-.") ($name | sha256sum | trunc 10) -}}{{- end -}}
{{- $name -}}
{{- end -}}

{{- define "launcher.labels" -}}
{{- $own := dict
  "app.kubernetes.io/name" .Chart.Name
  "app.kubernetes.io/instance" .Release.Name
  "app.kubernetes.io/version" (.Chart.AppVersion | replace "+" "_")
  "app.kubernetes.io/part-of" "jaxlaunch"
  "app.kubernetes.io/managed-by" .Release.Service
  "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_") -}}
{{- toYaml (merge $own .Values.commonLabels) -}}
{{- end -}}

{{/* Name of the LocalQueue: the release's name, unless that has a dot, which the name of a queue may not have. */}}
{{- define "launcher.queue" -}}
{{- if contains "." .Release.Name -}}
{{- printf "%s-%s" (.Release.Name | replace "." "-" | trunc 52) (.Release.Name | sha256sum | trunc 10) -}}
{{- else -}}
{{- .Release.Name -}}
{{- end -}}
{{- end -}}

{{- define "launcher.serviceAccount" -}}
{{- include "launcher.name" (dict "root" . "part" "jobs") -}}
{{- end -}}

{{- define "launcher.checkpoints" -}}
{{- include "launcher.name" (dict "root" . "part" "checkpoints") -}}
{{- end -}}

{{- define "launcher.compileCache" -}}
{{- include "launcher.name" (dict "root" . "part" "compile-cache") -}}
{{- end -}}

{{/* metadata of an object: `root`, `name` and its additional `labels`. */}}
{{- define "launcher.metadata" -}}
name: {{ .name }}
{{- if not .wide }}
namespace: {{ .root.Release.Namespace }}
{{- end }}
labels:
  {{- $labels := include "launcher.labels" .root | fromYaml }}
  {{- toYaml (merge $labels (.labels | default dict)) | nindent 2 }}
{{- end -}}
