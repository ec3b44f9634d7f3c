{{- define "launcher.testImage" -}}
{{- .Values.test.image | default .Values.profile.image | default "" -}}
{{- end -}}

{{- define "launcher.testName" -}}
{{- include "launcher.name" (dict "root" . "part" "test") -}}
{{- end -}}

{{/* Annotations of what only the test has: made before it, `weight` by weight, and gone after it. */}}
{{- define "launcher.hook" -}}
helm.sh/hook: test
helm.sh/hook-weight: {{ .weight | quote }}
helm.sh/hook-delete-policy: {{ .delete }}
{{- end -}}
