"""The decoding engine: continuous batching with static caches, in several processes, and its choice of steppers."""
