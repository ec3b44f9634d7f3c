"""Labels, annotations and names of jaxlaunch's Kubernetes objects, by component."""

# The name of a JobSet's only replicated job. It is short because it is part of the names of pods.
REPLICATED_JOB = "w"
MAIN_CONTAINER = "main"

# A job file must not set labels and annotations of these domains.
RESERVED_DOMAINS = ("jobset.sigs.k8s.io", "batch.kubernetes.io", "kueue.x-k8s.io", "jaxlaunch.io")

# The JobSet controller sets these labels on pods. They define the position of a pod in its gang.
NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"
REPLICATED_LABEL = "jobset.sigs.k8s.io/replicatedjob-name"
GENERATION_LABEL = "jobset.sigs.k8s.io/restart-attempt"
SLICE_LABEL = "jobset.sigs.k8s.io/job-index"
UID_LABEL = "jobset.sigs.k8s.io/jobset-uid"
# The Job controller sets this label and this finalizer on pods. It removes the finalizer once it
# has counted the pod.
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
JOB_TRACKING = "batch.kubernetes.io/job-tracking"

# jaxlaunch sets this label on every object that it creates.
MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_LABELS = {MANAGED_BY: "jaxlaunch"}

# The name of the job, on each of its objects.
JOB_LABEL = "jaxlaunch.io/job"
# A digest of the JobSet, by which an equal one is recognized.
SPEC_HASH = "jaxlaunch.io/spec-sha256"
# The arguments of `launcher submit` as JSON: the job file and its overrides.
SUBMITTED_WORDS = "jaxlaunch.io/submitted"
# The label of the jobs of a sweep, whose value is the name of the sweep.
SWEEP_LABEL = "sweep"
# Marks a JobSet that reads the run folder of the named job. It is not part of that job.
READER_LABEL = "jaxlaunch.io/reader-of"

# Kueue reads these.
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
MAX_EXEC_TIME = "kueue.x-k8s.io/max-exec-time-seconds"
PREFERRED_TOPOLOGY = "kueue.x-k8s.io/podset-preferred-topology"
REQUIRED_TOPOLOGY = "kueue.x-k8s.io/podset-required-topology"
# The level of topology for each group of SLICE_SIZE pods.
SLICE_TOPOLOGY = "kueue.x-k8s.io/podset-slice-required-topology"
SLICE_SIZE = "kueue.x-k8s.io/podset-slice-size"
MAX_RUN_DURATION = "provreq.kueue.x-k8s.io/maxRunDurationSeconds"
# Kueue writes this label on the Workload of a job.
JOB_UID = "kueue.x-k8s.io/job-uid"

# The value of a JobSet's managedBy that means JobSet's own controller.
JOBSET_CONTROLLER = "jobset.sigs.k8s.io/jobset-controller"

# JobSet reads this annotation: no other pod shares the nodes of a slice.
EXCLUSIVE_TOPOLOGY = "alpha.jobset.sigs.k8s.io/exclusive-topology"
