{{/* A PersistentVolumeClaim that `helm uninstall` keeps: `root`, `name` and its values `claim`. */}}
{{- define "launcher.claim" -}}
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  annotations: {helm.sh/resource-policy: keep}
  {{- include "launcher.metadata" . | nindent 2 }}
spec:
  accessModes:
    {{- toYaml .claim.accessModes | nindent 4 }}
  {{- if kindIs "string" .claim.storageClass }}
  storageClassName: {{ .claim.storageClass | quote }}
  {{- end }}
  resources:
    requests:
      storage: {{ .claim.size }}
{{- end -}}
