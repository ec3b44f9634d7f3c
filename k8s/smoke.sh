#!/usr/bin/env bash
# One job from submit to delete, on whatever cluster the kubeconfig names.
#   NAMESPACE=team-a k8s/smoke.sh image=registry.example/train:1
# It needs `launcher` and kubectl, JobSet on the cluster, a claim `checkpoints` in the namespace, and an image built
# from the Dockerfile. Arguments are overrides of the job.
set -euo pipefail

job=$(dirname "$0")/examples/kind-digits.yaml
namespace=${NAMESPACE:-$(kubectl config view --minify --output 'jsonpath={..namespace}')}
within=(--namespace "${namespace:-default}")
said=$(mktemp)
trap 'rm -f "$said"' EXIT

step() {
  echo "+ $*" >&2
  "$@"
}

step launcher submit "$job" "$@" "${within[@]}" --wait --follow | tee "$said"
grep --quiet 'eval .*accuracy' "$said" || { echo 'smoke: no accuracy was printed' >&2; exit 1; }
step kubectl wait jobset/digits "${within[@]}" --for='jsonpath={.status.terminalState}=Completed' --timeout=30s
step launcher list "${within[@]}"
step launcher status digits "${within[@]}"
step launcher logs digits "${within[@]}" --tail 3
step launcher delete digits "${within[@]}"
echo 'smoke: passed' >&2
