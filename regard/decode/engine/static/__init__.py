"""Models with static key and value caches, for every device."""
