"""Stage 2: stream the store into independent drafter processes."""
