"""Files of any size as input and output of a pipeline: workers, resumption, Ray."""
