"""One job with many values."""
