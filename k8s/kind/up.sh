#!/usr/bin/env bash
# Creates a kind cluster with pinned versions of JobSet and Kueue, our image on its nodes, and a team's namespace.
# It needs docker, kind and kubectl. `kind delete cluster --name jaxlaunch` removes everything.
set -euo pipefail
cd "$(dirname "$0")/../.."

jobset=v0.12.0
kueue=v0.15.0
folder=/tmp/jaxlaunch-checkpoints

install() {
  kubectl apply --server-side -f "https://github.com/kubernetes-sigs/$1/releases/download/$2/manifests.yaml"
  kubectl rollout status "deployment/$1-controller-manager" --namespace "$1-system" --timeout 180s
}

mkdir -p "$folder"
chmod 1777 "$folder"
kind get clusters | grep --quiet --line-regexp jaxlaunch || kind create cluster --config k8s/kind/cluster.yaml
kubectl config use-context kind-jaxlaunch
docker build --tag jaxlaunch:dev .
kind load docker-image jaxlaunch:dev --name jaxlaunch
install jobset "$jobset"
install kueue "$kueue"
kubectl apply --server-side -f k8s/install.yaml -f k8s/kind/team.yaml
