{{/* CEL lists of the names of subjects of a binding: `users`, `groups`. Groups that Kubernetes gives to its own controllers too are left out. */}}
{{- define "launcher.celUsers" -}}
{{- $users := list -}}
{{- range .subjects -}}
{{- if eq .kind "User" -}}{{- $users = append $users .name -}}{{- end -}}
{{- if eq .kind "ServiceAccount" -}}
{{- $users = append $users (printf "system:serviceaccount:%s:%s" (.namespace | default $.root.Release.Namespace) .name) -}}
{{- end -}}
{{- end -}}
{{- toJson $users -}}
{{- end -}}

{{- define "launcher.celGroups" -}}
{{- $groups := list -}}
{{- range .subjects -}}
{{- if and (eq .kind "Group") (not (has .name (list "system:authenticated" "system:serviceaccounts"))) -}}
{{- $groups = append $groups .name -}}
{{- end -}}
{{- end -}}
{{- toJson $groups -}}
{{- end -}}

{{/* CEL: whether the request is of one of these subjects. */}}
{{- define "launcher.celIsOneOf" -}}
request.userInfo.username in {{ include "launcher.celUsers" . }}
|| request.userInfo.?groups.orValue([]).exists(g, g in {{ include "launcher.celGroups" . }})
{{- end -}}

{{/* CEL: the pod templates in `object` or `oldObject`, each with the place where it is written. */}}
{{- define "launcher.celPods" -}}
request.kind.kind == "JobSet" ? dyn({{ . }}).spec.?replicatedJobs.orValue([])
  .map(j, {"place": dyn(", replicatedJob " + j.name), "spec": dyn(j.template.spec.template.spec)})
: request.kind.kind == "Job" ? [{"place": dyn(""), "spec": dyn({{ . }}).spec.template.spec}]
: request.kind.kind == "Pod" ? [{"place": dyn(""), "spec": dyn({{ . }}).spec}]
: []
{{- end -}}

{{/* CEL list of the ServiceAccounts that pods may run as. */}}
{{- define "launcher.celServiceAccounts" -}}
{{- $own := list -}}
{{- if .Values.serviceAccount.create -}}{{- $own = append $own (include "launcher.serviceAccount" .) -}}{{- end -}}
{{- with .Values.profile.service_account -}}{{- $own = append $own . -}}{{- end -}}
{{- concat $own .Values.admissionPolicy.serviceAccounts | uniq | toJson -}}
{{- end -}}

{{/* CEL list of the host paths that pods may mount: those of the networks of GKE are in launcher/manifests/network.py. */}}
{{- define "launcher.celHostPaths" -}}
{{- $own := list -}}
{{- if .Values.profile.tcpxo -}}
{{- $own = list "/home/kubernetes/bin/nvidia" "/sys" "/proc/sys" "/dev/aperture_devices" -}}
{{- end -}}
{{- if .Values.profile.gib -}}
{{- $own = concat $own (list "/home/kubernetes/bin/nvidia" "/home/kubernetes/bin/gib") -}}
{{- end -}}
{{- concat $own .Values.admissionPolicy.hostPaths | uniq | toJson -}}
{{- end -}}

{{/* The fields of a pod that give it a namespace of its host, and that this release allows to nobody. */}}
{{- define "launcher.hostNamespaces" -}}
{{- $allowed := or .Values.admissionPolicy.hostNetwork (has "hostnetwork" (values .Values.profile.network)) -}}
{{- concat (list "hostPID" "hostIPC") (ternary (list) (list "hostNetwork") $allowed) | toJson -}}
{{- end -}}
