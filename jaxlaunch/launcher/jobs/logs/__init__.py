"""`launcher logs`: the lines of a job's pods, merged by time or followed."""
