{{/* Subjects of a binding: users and groups get their API group, a ServiceAccount without a namespace gets this one. */}}
{{- define "launcher.subjects" -}}
{{- range .subjects }}
- kind: {{ .kind }}
  name: {{ .name | quote }}
  {{- if eq .kind "ServiceAccount" }}
  namespace: {{ .namespace | default $.root.Release.Namespace }}
  {{- else }}
  apiGroup: rbac.authorization.k8s.io
  {{- end }}
{{- end }}
{{- end -}}
