#!/usr/bin/env bash
# Runs one job from submit to delete, on the cluster of the current kubeconfig context.
#   NAMESPACE=team-a k8s/smoke.sh image=registry.example/train:1
# It needs `launcher` and kubectl, JobSet on the cluster, a PersistentVolumeClaim `checkpoints` in the namespace, and an
# image built from the Dockerfile. Arguments override keys of the job.
set -euo pipefail

job=$(dirname "$0")/examples/kind-digits.yaml
namespace=${NAMESPACE:-$(kubectl config view --minify --output 'jsonpath={..namespace}')}
within=(--namespace "${namespace:-default}")
output=$(mktemp)
trap 'rm -f "$output"' EXIT

step() {
  echo "+ $*" >&2
  "$@"
}

step launcher submit "$job" "$@" "${within[@]}" --wait --follow | tee "$output"
grep --quiet 'eval .*accuracy' "$output" || { echo 'smoke: the job printed no accuracy' >&2; exit 1; }
step kubectl wait jobset/digits "${within[@]}" --for='jsonpath={.status.terminalState}=Completed' --timeout=30s
step launcher list "${within[@]}"
step launcher status digits "${within[@]}"
step launcher logs digits "${within[@]}" --tail 3
step launcher delete digits "${within[@]}"
echo 'smoke: passed' >&2
