"""The hidden-state store: chunked Zarr shards with exclusive commits, and nothing of torch."""
