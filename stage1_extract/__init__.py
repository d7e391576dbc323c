"""Stage 1: run the frozen target once and shard its hidden states into the store."""
