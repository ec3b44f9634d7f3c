"""Labels, annotations and names of jaxlaunch's Kubernetes objects, by who writes them."""

REPLICATED_JOB = "w"
MAIN_CONTAINER = "main"

# A job file must not set labels and annotations of these domains.
RESERVED_DOMAINS = ("jobset.sigs.k8s.io", "batch.kubernetes.io", "kueue.x-k8s.io", "jaxlaunch.io")

# The JobSet controller sets these labels on pods. They are a pod's position in the gang.
NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"
REPLICATED_LABEL = "jobset.sigs.k8s.io/replicatedjob-name"
GENERATION_LABEL = "jobset.sigs.k8s.io/restart-attempt"
SLICE_LABEL = "jobset.sigs.k8s.io/job-index"
UID_LABEL = "jobset.sigs.k8s.io/jobset-uid"
# A finalizer that the Job controller removes once it has counted the pod.
JOB_TRACKING = "batch.kubernetes.io/job-tracking"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"

# On every object that the launcher creates.
MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_LABELS = {MANAGED_BY: "jaxlaunch"}

# jaxlaunch's own label, on every object of a job.
JOB_LABEL = "jaxlaunch.io/job"
SPEC_HASH = "jaxlaunch.io/spec-sha256"
# The words after `launcher submit`, as JSON: the job file and what changes it.
SUBMITTED_WORDS = "jaxlaunch.io/submitted"
# On the JobSet that reads the run folder of the job of that name. It is not part of the job.
READER_LABEL = "jaxlaunch.io/reader-of"

# Kueue reads these.
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
MAX_EXEC_TIME = "kueue.x-k8s.io/max-exec-time-seconds"
PREFERRED_TOPOLOGY = "kueue.x-k8s.io/podset-preferred-topology"
REQUIRED_TOPOLOGY = "kueue.x-k8s.io/podset-required-topology"
# Applies to each group of SLICE_SIZE pods.
SLICE_TOPOLOGY = "kueue.x-k8s.io/podset-slice-required-topology"
SLICE_SIZE = "kueue.x-k8s.io/podset-slice-size"
MAX_RUN_DURATION = "provreq.kueue.x-k8s.io/maxRunDurationSeconds"
# Kueue writes this label on the Workload of a job.
JOB_UID = "kueue.x-k8s.io/job-uid"

# The value of a JobSet's managedBy that means JobSet's own controller.
JOBSET_CONTROLLER = "jobset.sigs.k8s.io/jobset-controller"

# JobSet reads this annotation: no other pod shares the nodes of a slice.
EXCLUSIVE_TOPOLOGY = "alpha.jobset.sigs.k8s.io/exclusive-topology"
