"""`regard serve`: serve models over HTTP."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from regard.cli.common import Quiet, parse
from regard.cli.options import Arg
from regard.errors import require_package
from regard.ranges import Natural, NonNegative, Port, Positive


@dataclass(frozen=True)
class Options:
    """Serve models over HTTP: regard serve MODEL …

    A model is a folder, or NAME=FOLDER. The server has the APIs of OpenAI (/v1) and LibreTranslate (/translate), native
    routes (/api), a page to try the models (/) and a description of all routes (/docs). It finishes accepted requests
    on SIGTERM and Ctrl-C, and reloads a model whose folder changes.
    """

    models: Annotated[tuple[str, ...], Arg("MODEL", is_positional=True)]
    """model folders, each as FOLDER or NAME=FOLDER"""
    host: str = "127.0.0.1"
    """address to listen on; others than the loopback address need tokens"""
    port: Port = 8000
    """port to listen on; 0: any free one"""
    tokens: Path | None = None
    """file with one bearer token per line; tokens may also be in REGARD_SERVE_TOKENS, separated by commas"""
    no_authentication: bool = False
    """allow other machines to send requests without a token"""
    allow_origin: Annotated[tuple[str, ...], Arg("ORIGIN", is_repeated=True)] = ()
    """web origin whose pages may send requests (CORS); may be repeated"""
    latency_target: Annotated[Positive, Arg("SECONDS")] = 0.5
    """requests that would take longer, at the measured throughput, are refused with 429"""
    timeout: Annotated[float, Arg("SECONDS")] = 30.0
    """time limit of a request"""
    max_characters: int = 20_000
    """maximum number of characters per request"""
    max_source_tokens: int = 4096
    """maximum number of tokens of a text, or of a sentence to translate"""
    max_beam: int = 16
    """maximum beam width and number of outputs"""
    max_body_bytes: int = 8 << 20
    """maximum size of a request in bytes"""
    reload_interval: Annotated[NonNegative, Arg("SECONDS")] = 2.0
    """how often model folders are checked for changes; 0: never"""
    workers: Annotated[Natural, Arg(default="one per CPU core, 1 on a GPU")] = 0
    """threads per model that run requests"""
    device: str = "auto"
    """device to run on: auto, cpu, cuda, cuda:N or mps"""
    quiet: Quiet = False


def run(argv: list[str]) -> int:
    options = parse(Options, "serve", argv)
    require_package("fastapi", "serve")
    require_package("uvicorn", "serve")
    from regard.serve.application import make_application
    from regard.serve.authentication import check_exposure, read_tokens
    from regard.serve.limits import ServeLimits
    from regard.serve.registry import ModelRegistry
    from regard.serve.server import run_server, set_up_json_log

    limits = ServeLimits(
        max_body_bytes=options.max_body_bytes,
        max_characters=options.max_characters,
        max_source_tokens=options.max_source_tokens,
        max_beam=options.max_beam,
        timeout=options.timeout,
    )
    tokens = read_tokens(options.tokens)
    check_exposure(options.host, tokens, options.no_authentication)
    set_up_json_log(level=logging.WARNING if options.quiet else logging.INFO)
    registry = ModelRegistry(
        options.models, device=options.device, latency_target=options.latency_target, workers=options.workers
    )
    if options.reload_interval:
        registry.watch(options.reload_interval)
    app = make_application(registry, limits=limits, tokens=tokens, allowed_origins=options.allow_origin)
    run_server(app, options.host, options.port)
    return 0
