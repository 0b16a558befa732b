"""Hugging Face and timm checkpoints: tables of tensor names and config keys for each architecture."""
