"""Token shards: a corpus encoded once by `regard prepare`, and memory-mapped during training."""
