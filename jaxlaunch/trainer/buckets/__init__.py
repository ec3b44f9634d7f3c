"""Access to object stores such as gs:// and s3://."""
