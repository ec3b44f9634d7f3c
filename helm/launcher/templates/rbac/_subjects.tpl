{{/* Subjects as a binding has them: a user's and a group's API group is their kind's, a ServiceAccount is of this namespace. */}}
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
