"""Commands that run a model: translate, generate, classify, evaluate, look and others."""
