"""The store: index, tier and claims as one thing. Synchronous, single-threaded, no sockets."""
