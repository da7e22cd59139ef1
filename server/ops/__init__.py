"""For operators: metrics, logs, the benchmark. Never prompt text."""
