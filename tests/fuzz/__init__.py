"""Fuzz targets for every reader, and the replay of their corpus. See CONTRIBUTING.md, Hostile input."""
