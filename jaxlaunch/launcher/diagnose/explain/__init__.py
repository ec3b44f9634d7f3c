"""Name the situation of a job, with the evidence and what to do."""
