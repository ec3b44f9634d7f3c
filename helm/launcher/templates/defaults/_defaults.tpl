{{/* The cluster defaults as the commands read them: the objects of this release, overridden by .Values.defaults. */}}
{{- define "launcher.defaults" -}}
{{- $defaults := dict -}}
{{- if .Values.kueue.enabled -}}
{{- $_ := set $defaults "queue" (include "launcher.queue" .) -}}
{{- end -}}
{{- if .Values.serviceAccount.create -}}
{{- $_ := set $defaults "service_account" (include "launcher.serviceAccount" .) -}}
{{- end -}}
{{- with .Values.storage.checkpoints -}}{{- if .enabled -}}
{{- $_ := set $defaults "checkpoint" (dict "claim" (include "launcher.checkpoints" $) "path" .path) -}}
{{- end -}}{{- end -}}
{{- with .Values.storage.compileCache -}}{{- if .enabled -}}
{{- $_ := set $defaults "compile_cache" (dict "claim" (include "launcher.compileCache" $) "path" .path) -}}
{{- end -}}{{- end -}}
{{- range $key, $value := omit .Values.defaults "enabled" -}}{{- if $value -}}
{{- $_ := set $defaults $key $value -}}
{{- end -}}{{- end -}}
{{- toYaml $defaults -}}
{{- end -}}
