"""Export to ONNX: the graphs of a model, its tokenizers and config.json."""

from pathlib import Path

from regard.errors import require_package
from regard.files import check_output_folder
from regard.pipelines import Pipeline, write_config, write_tokenizers

# Larger models store their weights outside of the protobuf file, which is limited to 2 GB.
MAX_FILE_BYTES = 2_000_000_000


def export_onnx(pipeline: Pipeline, folder: str | Path) -> None:
    """Write a model of any family as graphs for ONNX Runtime, in float32; `load_onnx` loads the folder.

    translators       encoder.onnx and decoder_step.onnx
    language models   prompt.onnx and decoder_step.onnx
    others            model.onnx

    `regard.graph.entries.batch_entries` lists their inputs and outputs.

    >>> export_onnx(regard.load("model"), "graphs")  # doctest: +SKIP
    """
    # torch.export and its dependencies take a second to import.
    from regard.graph import capture
    from regard.graph.entries import batch_entries
    from regard.interop.onnx_writer import onnx_model

    onnx, folder, model = require_package("onnx", "onnx"), Path(folder), pipeline.model
    check_output_folder(folder)
    graphs = {
        name: onnx_model(onnx, capture(model, entry.call, entry.inputs, entry.sizes), model, name, entry.outputs)
        for name, entry in batch_entries(model).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizers(folder, *pipeline.tokenizers)
    is_external = sum(4 * parameter.numel() for parameter in model.parameters()) > MAX_FILE_BYTES
    for name, graph in graphs.items():
        file = f"{name}.onnx"
        onnx.save_model(graph, folder / file, save_as_external_data=is_external, location=f"{file}.data")
    write_config(folder, pipeline)
