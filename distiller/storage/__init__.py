"""Files: weights, keyed stages, digests, durable writes, locks, the hub, YAML."""
