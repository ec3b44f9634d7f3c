"""The labels, annotations and names by which our objects are known, and who writes each. Constants alone."""

REPLICATED_JOB = "w"
MAIN_CONTAINER = "main"

# Labels and annotations of these domains are not for a job file to set.
RESERVED_DOMAINS = ("jobset.sigs.k8s.io", "batch.kubernetes.io", "kueue.x-k8s.io", "jaxlaunch.io")

# The JobSet controller puts these on pods: a pod's place in the gang.
NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"
REPLICATED_LABEL = "jobset.sigs.k8s.io/replicatedjob-name"
GENERATION_LABEL = "jobset.sigs.k8s.io/restart-attempt"
SLICE_LABEL = "jobset.sigs.k8s.io/job-index"
UID_LABEL = "jobset.sigs.k8s.io/jobset-uid"
TRACKED = "batch.kubernetes.io/job-tracking"  # a finalizer; the Job controller removes it when it has counted the pod
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"

# On everything that the launcher makes.
MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED = {MANAGED_BY: "jaxlaunch"}

# Ours, on every object that a job is made of.
OWN_LABEL = "jaxlaunch.io/job"
SPEC_HASH = "jaxlaunch.io/spec-sha256"
READER_OF = "jaxlaunch.io/reader-of"  # on what reads the run folder of the job of that name; no part of the job

# Kueue reads these.
QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"
LONGEST = "kueue.x-k8s.io/max-exec-time-seconds"
PREFERRED_TOPOLOGY = "kueue.x-k8s.io/podset-preferred-topology"
REQUIRED_TOPOLOGY = "kueue.x-k8s.io/podset-required-topology"
SLICE_TOPOLOGY = "kueue.x-k8s.io/podset-slice-required-topology"  # of each group of SLICE_SIZE pods
SLICE_SIZE = "kueue.x-k8s.io/podset-slice-size"
PROVISIONING = "provreq.kueue.x-k8s.io/maxRunDurationSeconds"
JOB_UID = "kueue.x-k8s.io/job-uid"  # Kueue writes it, on the Workload of a job

# The value of a JobSet's managedBy that means JobSet's own controller.
JOBSET_CONTROLLER = "jobset.sigs.k8s.io/jobset-controller"

# JobSet reads it: a slice has its nodes to itself.
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
