{{/* The cluster defaults as the commands read them: the objects of this release, overridden by .Values.profile. */}}
{{- define "launcher.profile" -}}
{{- $profile := dict -}}
{{- if .Values.kueue.enabled -}}
{{- $_ := set $profile "queue" (include "launcher.queue" .) -}}
{{- end -}}
{{- if .Values.serviceAccount.create -}}
{{- $_ := set $profile "service_account" (include "launcher.serviceAccount" .) -}}
{{- end -}}
{{- with .Values.storage.checkpoints -}}{{- if .enabled -}}
{{- $_ := set $profile "checkpoint" (dict "claim" (include "launcher.checkpoints" $) "path" .path) -}}
{{- end -}}{{- end -}}
{{- with .Values.storage.compileCache -}}{{- if .enabled -}}
{{- $_ := set $profile "compile_cache" (dict "claim" (include "launcher.compileCache" $) "path" .path) -}}
{{- end -}}{{- end -}}
{{- range $key, $value := omit .Values.profile "enabled" -}}{{- if $value -}}
{{- $_ := set $profile $key $value -}}
{{- end -}}{{- end -}}
{{- toYaml $profile -}}
{{- end -}}
