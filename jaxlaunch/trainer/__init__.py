"""The trainer: what each process of a job runs."""
