{{/* One rule of rules/*.yaml as this release has it: of its namespace, with its thresholds, severities and runbooks. */}}
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
{{- $said := get $values.rules $rule.alert | default dict -}}
{{- with $said.for -}}{{- $_ := set $rule "for" . -}}{{- end -}}
{{- with $said.severity -}}{{- $_ := set $rule.labels "severity" . -}}{{- end -}}
{{- $_ := set $rule.annotations "runbook_url" (printf "%s%s" $values.runbooks $rule.annotations.runbook_url) -}}
{{- end -}}
{{- toYaml $rule -}}
{{- end -}}
