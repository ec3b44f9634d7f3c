{{/* Refuses the values by the name that version 0.1 gave them. */}}
{{- define "launcher.renamed" -}}
{{- with .Values.profile -}}
{{- $key := "" -}}
{{- if kindIs "map" . -}}{{- $key = printf ".%s" (keys . | sortAlpha | first) -}}{{- end -}}
{{- fail (printf "profile%s is now defaults%s: write defaults in place of profile in the values." $key $key) -}}
{{- end -}}
{{- end -}}
