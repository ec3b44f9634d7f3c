{{/* One rule of rules/*.yaml, limited to the namespace of this release, with its thresholds, severities and runbook URLs. */}}
{{- define "launcher.rule" -}}
{{- $rule := .rule -}}
{{- $values := .root.Values.alerts -}}
{{- $here := printf "namespace=%q" .root.Release.Namespace -}}
{{- $_ := set $rule "expr" ($rule.expr | replace "namespace=~\".*\"" $here) -}}
{{- $threshold := get $values.thresholds (trimPrefix "jaxlaunch:threshold:" (get $rule "record")) -}}
{{- if $threshold -}}
{{- $_ := set $rule "expr" (regexReplaceAll "^[0-9.]+" $rule.expr (toString $threshold)) -}}
{{- end -}}
{{- if hasKey $rule "alert" -}}
{{- $changes := get $values.rules $rule.alert | default dict -}}
{{- with $changes.for -}}{{- $_ := set $rule "for" . -}}{{- end -}}
{{- with $changes.severity -}}{{- $_ := set $rule.labels "severity" . -}}{{- end -}}
{{- $_ := set $rule.annotations "runbook_url" (printf "%s%s" $values.runbooks $rule.annotations.runbook_url) -}}
{{- end -}}
{{- toYaml $rule -}}
{{- end -}}
