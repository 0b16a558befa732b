"""Export a model to ONNX: graphs of its programs, with tokenizers and config.json beside them."""

from pathlib import Path

from regard.errors import RegardError
from regard.interop.optional_packages import need
from regard.pipelines import Bundle, write_config, write_tokenizers

# A protobuf file cannot be larger than this, unless the weights lie beside it.
LARGEST = 2_000_000_000


def export_onnx(bundle: Bundle, folder: str | Path) -> None:
    """Write a model of any family as graphs for ONNX Runtime, in float32; `open_onnx` opens the folder.

    translators       encoder.onnx and decoder_step.onnx
    language models   prompt.onnx and decoder_step.onnx
    others            model.onnx

    `regard.program.entries.batch_entries` lists their inputs and outputs.

    >>> export_onnx(regard.load("model"), "graphs")  # doctest: +SKIP
    """
    # torch.export and what it needs take a second to import.
    from regard.interop.onnx.onnx_writer import onnx_model
    from regard.program import capture, program_of
    from regard.program.entries import batch_entries

    onnx, folder, model = need("onnx", "onnx"), Path(folder), bundle.model
    if next(folder.glob("*.onnx"), None) or (folder / "config.json").exists():
        raise RegardError(f"{folder}: there is a model already.", "Name another folder.")
    graphs = {
        name: onnx_model(
            onnx, program_of(capture(model, entry.call, entry.inputs, entry.sizes)), model, name, entry.outputs
        )
        for name, entry in batch_entries(model).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizers(folder, *bundle.tokenizers)
    beside = sum(4 * parameter.numel() for parameter in model.parameters()) > LARGEST
    for name, graph in graphs.items():
        file = f"{name}.onnx"
        onnx.save_model(graph, folder / file, save_as_external_data=beside, location=f"{file}.data")
    write_config(folder, bundle)
