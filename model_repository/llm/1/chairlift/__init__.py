"""The Chairlift engine: continuous batching over a paged KV cache; imports nothing of the server."""
