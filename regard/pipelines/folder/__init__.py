"""Model folders: reading and writing, earlier formats, int8 weights, shortlists."""
