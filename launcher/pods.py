"""The labels by which a pod's place in the gang is known."""

GENERATION_LABEL = "jobset.sigs.k8s.io/restart-attempt"
SLICE_LABEL = "jobset.sigs.k8s.io/job-index"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
