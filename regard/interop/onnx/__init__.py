"""ONNX: export of programs as graphs, and running them in ONNX Runtime."""
