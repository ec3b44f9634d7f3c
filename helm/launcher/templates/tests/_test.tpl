{{- define "launcher.testImage" -}}
{{- .Values.test.image | default .Values.defaults.image | default "" -}}
{{- end -}}

{{- define "launcher.testName" -}}
{{- include "launcher.name" (dict "root" . "part" "test") -}}
{{- end -}}

{{/* Annotations of objects that only `helm test` uses: created before it in order of `weight`, deleted after it. */}}
{{- define "launcher.hook" -}}
helm.sh/hook: test
helm.sh/hook-weight: {{ .weight | quote }}
helm.sh/hook-delete-policy: {{ .delete }}
{{- end -}}
