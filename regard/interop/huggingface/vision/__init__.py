"""Image models of transformers and timm."""
