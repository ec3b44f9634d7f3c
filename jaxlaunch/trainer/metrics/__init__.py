"""Report metrics to Prometheus, metrics.jsonl and the screen."""
