"""Submit, wait, stop and delete; the status and the logs of a job."""
