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

{{/* CEL: the labels that the templates in `object` or `oldObject` give pods; of a Pod its own. */}}
{{- define "launcher.celPodLabels" -}}
request.kind.kind == "JobSet" ? dyn({{ . }}).spec.?replicatedJobs.orValue([])
  .map(j, dyn(j.template.spec.template.?metadata.?labels.orValue({})))
: request.kind.kind == "Job" ? [dyn(dyn({{ . }}).spec.template.?metadata.?labels.orValue({}))]
: request.kind.kind == "Pod" ? [dyn(dyn({{ . }}).metadata.?labels.orValue({}))]
: []
{{- end -}}

{{/* CEL list of the PriorityClasses that jobs may name: this release's, and those of admissionPolicy.priorityClasses. */}}
{{- define "launcher.celPriorityClasses" -}}
{{- $own := list -}}
{{- range .Values.priorityClasses -}}{{- $own = append $own (include "launcher.wideName" (dict "root" $ "part" .name)) -}}{{- end -}}
{{- concat $own .Values.admissionPolicy.priorityClasses | uniq | toJson -}}
{{- end -}}

{{/* CEL: whether the toleration `t` is of every taint, or of one by which Kubernetes or a cloud keeps pods off a node. To stay for a while on a node that is unreachable is each pod's right. */}}
{{- define "launcher.celTooTolerant" -}}
{{- $system := printf "^(node-role\\.kubernetes\\.io|node\\.kubernetes\\.io|node\\.cloudprovider\\.kubernetes\\.io|karpenter\\.sh)/|%s" "ByClusterAutoscaler$|OfClusterAutoscaler$" -}}
t.?key.orValue("") == "" || t.key.matches({{ $system | quote }}) && !(t.key in {{ toJson .Values.admissionPolicy.systemTaints }})
&& !(t.key in ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"] && t.?tolerationSeconds.orValue(86400) <= 3600
&& t.?effect.orValue("") == "NoExecute")
{{- end -}}

{{/* CEL list of the ServiceAccounts that pods may run as. */}}
{{- define "launcher.celServiceAccounts" -}}
{{- $own := list -}}
{{- if .Values.serviceAccount.create -}}{{- $own = append $own (include "launcher.serviceAccount" .) -}}{{- end -}}
{{- with .Values.defaults.service_account -}}{{- $own = append $own . -}}{{- end -}}
{{- concat $own .Values.admissionPolicy.serviceAccounts | uniq | toJson -}}
{{- end -}}

{{/* CEL list of the host paths that pods may mount: those of the networks of GKE are in launcher/manifests/network.py. */}}
{{- define "launcher.celHostPaths" -}}
{{- $own := list -}}
{{- if .Values.defaults.tcpxo -}}
{{- $own = list "/home/kubernetes/bin/nvidia" "/sys" "/proc/sys" "/dev/aperture_devices" -}}
{{- end -}}
{{- if or .Values.defaults.gib (has "gpudirect-rdma" (values .Values.defaults.network)) (has "gpudirect-rdma-dra" (values .Values.defaults.network)) -}}
{{- $own = concat $own (list "/home/kubernetes/bin/nvidia" "/home/kubernetes/bin/gib") -}}
{{- end -}}
{{- concat $own .Values.admissionPolicy.hostPaths | uniq | toJson -}}
{{- end -}}

{{/* JSON list of the resources whose pods may be one of `users`, by defaults.users, and of TPUs, whose pods are root unless it says another user; of "cpu", which has none, "". */}}
{{- define "launcher.resourcesOf" -}}
{{- $found := list -}}
{{- $tpu := has "root" .users -}}
{{- range $kind, $user := .root.Values.defaults.users -}}
{{- if regexMatch "^(v[0-9][a-z]?|7x|tpu.*)$" $kind -}}{{- $tpu = false -}}{{- end -}}
{{- end -}}
{{- if $tpu -}}{{- $found = append $found "google.com/tpu" -}}{{- end -}}
{{- range $kind, $user := .root.Values.defaults.users -}}
{{- if has $user $.users -}}
{{- if eq $kind "cpu" -}}{{- $found = append $found "" -}}
{{- else if regexMatch "^(v[0-9][a-z]?|7x|tpu.*)$" $kind -}}{{- $found = append $found "google.com/tpu" -}}
{{- else if regexMatch "^(mi[0-9]|amdgpu$)" $kind -}}{{- $found = append $found "amd.com/gpu" -}}
{{- else if ne $kind "plugin" -}}{{- $found = append $found "nvidia.com/gpu" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $found | uniq | sortAlpha | toJson -}}
{{- end -}}

{{/* CEL: whether the pod `p` requests more than none of one of these resources. */}}
{{- define "launcher.celRequests" -}}
p.spec.containers.exists(main, main.?resources.?limits.orValue({}).exists(name, name in {{ . }}
&& quantity(string(main.resources.limits[name])).isGreaterThan(quantity("0"))))
{{- end -}}

{{/* CEL list of the capabilities that containers may add: those of the baseline Pod Security level, and for root that pins memory. */}}
{{- define "launcher.celCapabilities" -}}
{{- $baseline := splitList " " "AUDIT_WRITE CHOWN DAC_OVERRIDE FOWNER FSETID KILL MKNOD NET_BIND_SERVICE SETFCAP SETGID SETPCAP SETUID SYS_CHROOT" -}}
{{- $pinning := ternary (list "IPC_LOCK") (list) (has "root" (values .Values.defaults.users)) -}}
{{- concat $baseline $pinning | toJson -}}
{{- end -}}

{{/* CEL: whether the init container `c` of the pod `p` is the receive daemon of gpudirect-tcpxo, as launcher/manifests/network.py writes it, and runs nothing else. */}}
{{- define "launcher.celIsDaemon" -}}
{{- $script := "/fts/entrypoint_rxdm_container.sh" -}}
{{- $run := printf "set -ex; chmod 755 %s; exec %s --num_hops=2" $script $script -}}
{{- $mounts := dict "/usr/local/nvidia" "/home/kubernetes/bin/nvidia" "/hostsysfs" "/sys" "/hostprocsysfs" "/proc/sys" -}}
{{- $keys := splitList " " "name image imagePullPolicy restartPolicy command args env securityContext volumeMounts resources terminationMessagePath terminationMessagePolicy" -}}
c.name == "tcpxo-daemon" && c.?image.orValue("") == {{ toJson .image }}
&& c.?command.orValue([]) == {{ list "/bin/sh" "-c" | toJson }} && c.?args.orValue([]) == {{ list $run | toJson }}
&& c.all(key, key in {{ toJson $keys }})
&& c.?env.orValue([]).all(e, e.name == "LD_LIBRARY_PATH" && e.?value.orValue("") == "/usr/local/nvidia/lib64")
&& c.?volumeMounts.orValue([]).all(m, p.spec.?volumes.orValue([]).exists(v, v.name == m.name
&& v.?hostPath.?path.orValue("") == {{ toJson $mounts }}[?m.mountPath].orValue("none")))
&& c.?securityContext.?capabilities.?add.orValue([]).all(name, name in ["NET_ADMIN", "NET_BIND_SERVICE"])
&& {{ include "launcher.celRequests" (list "nvidia.com/gpu" | toJson) }}
{{- end -}}

{{/* The Pod Security level that the pods of jobs meet by the cluster defaults: their users, and their networks' host paths, host network and IPC_LOCK. */}}
{{- define "launcher.podSecurity" -}}
{{- $networks := .Values.defaults.network -}}
{{- $privileged := or .Values.defaults.tcpxo .Values.defaults.gib (has "privileged" (values .Values.defaults.users)) -}}
{{- range list "hostnetwork" "gpudirect-tcpxo" "gpudirect-rdma" "gpudirect-rdma-dra" -}}
{{- if has . (values $networks) -}}{{- $privileged = true -}}{{- end -}}
{{- end -}}
{{- range $kind, $user := .Values.defaults.users -}}
{{- $network := get $networks $kind -}}
{{- if and (eq (toString $user) "root") (or (kindIs "map" $network) (has (toString $network) (list "efa" "efa-dra"))) -}}{{- $privileged = true -}}{{- end -}}
{{- end -}}
{{- if $privileged -}}privileged
{{- else if has "root" (values .Values.defaults.users) -}}baseline
{{- else -}}restricted
{{- end -}}
{{- end -}}

{{/* The fields of a pod that give it a namespace of its host, and that this release allows to nobody. */}}
{{- define "launcher.hostNamespaces" -}}
{{- $allowed := or .Values.admissionPolicy.hostNetwork (has "hostnetwork" (values .Values.defaults.network)) -}}
{{- concat (list "hostPID" "hostIPC") (ternary (list) (list "hostNetwork") $allowed) | toJson -}}
{{- end -}}
