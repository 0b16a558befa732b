"""Static plots: heat maps, overlays on images, confusion matrices."""
