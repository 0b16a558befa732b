"""ONNX: export of the graphs of a model, and running them in ONNX Runtime."""
