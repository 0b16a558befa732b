"""How training uses the machine: precision, memory, compilation, CUDA graphs, worker processes."""
