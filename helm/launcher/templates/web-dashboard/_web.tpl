{{- define "launcher.webName" -}}
{{- include "launcher.name" (dict "root" . "part" "web") -}}
{{- end -}}

{{/* Name of the Service, which begins with a letter and has no dot, as the name of a release may not. */}}
{{- define "launcher.webService" -}}
{{- $name := include "launcher.webName" . -}}
{{- if regexMatch "^[a-z][-a-z0-9]*$" $name -}}
{{- $name -}}
{{- else -}}
{{- printf "web-%s-%s" (.Release.Name | replace "." "-" | trunc 48) (.Release.Name | sha256sum | trunc 10) -}}
{{- end -}}
{{- end -}}

{{/* The label of its pods, by which the Service and kubectl find them: the admission policy lets no job have it. */}}
{{- define "launcher.webSelector" -}}
jaxlaunch.io/web-dashboard: {{ .Release.Name | quote }}
{{- end -}}

{{- define "launcher.webImage" -}}
{{- .Values.webDashboard.image | default .Values.defaults.image | required "webDashboard.enabled needs an image with the launcher: set webDashboard.image or defaults.image." -}}
{{- end -}}
