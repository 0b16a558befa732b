"""Dynamic batching across requests: schedulers and their measured throughput."""
