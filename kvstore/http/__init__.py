"""Metrics, health and readiness of a daemon over HTTP. Knows nothing of the daemon but what ``source`` says."""
