"""The server on a Ray cluster: Ray Serve runs the same application with replicas and autoscaling.

python -m regard.serve.ray_application model --replicas 2            # or: --max-replicas 8
"""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regard.errors import RegardError, require_package
from regard.serve.authentication import check_exposure, read_tokens


def make_deployment(
    models: Sequence[str | Path],
    *,
    replicas: int = 1,
    max_replicas: int | None = None,
    latency_target: float = 0.5,
    tokens: Sequence[str] = (),
    cpus: float = 1,
    gpus: float = 0,
) -> Any:
    """An application of Ray Serve whose replicas each load the models; run it with `ray.serve.run`.

    With `max_replicas`, Ray starts and stops replicas between `replicas` and this number with the load. Every machine
    of the cluster must have the model folders.

    >>> serve.run(make_deployment(["model"], replicas=2))  # doctest: +SKIP
    """
    serve = require_package("ray.serve", "ray")
    folders = [str(model) for model in models]

    def make_app() -> Any:
        from regard.serve.application import make_application
        from regard.serve.registry import ModelRegistry

        registry = ModelRegistry(folders, latency_target=latency_target, workers=max(1, int(cpus)))
        return make_application(registry, tokens=tokens)

    scaling: dict[str, Any] = {"num_replicas": replicas}
    if max_replicas is not None:
        scaling = {"autoscaling_config": {"min_replicas": replicas, "max_replicas": max_replicas}}

    class RegardDeployment:
        """A replica."""

    actor = {"num_cpus": cpus, "num_gpus": gpus}
    deployment = serve.deployment(name="regard", ray_actor_options=actor, max_ongoing_requests=1000, **scaling)
    return deployment(serve.ingress(make_app)(RegardDeployment)).bind()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="model folder, or NAME=FOLDER")
    parser.add_argument("--replicas", type=int, default=1, help="number of replicas, or the smallest number")
    parser.add_argument("--max-replicas", type=int, help="largest number of replicas: Ray adapts it to the load")
    parser.add_argument("--latency-target", type=float, default=0.5, help="seconds; see regard serve")
    parser.add_argument("--cpus", type=float, default=1, help="CPU cores per replica")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs per replica")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--tokens", type=Path, help="file with one bearer token per line")
    parser.add_argument("--no-authentication", action="store_true")
    options = parser.parse_args(argv)
    tokens = read_tokens(options.tokens)
    check_exposure(options.host, tokens, options.no_authentication)
    serve = require_package("ray.serve", "ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    serve.start(http_options={"host": options.host, "port": options.port})
    deployment = make_deployment(
        options.models,
        replicas=options.replicas,
        max_replicas=options.max_replicas,
        latency_target=options.latency_target,
        tokens=tokens,
        cpus=options.cpus,
        gpus=options.gpus,
    )
    serve.run(deployment, name="regard")
    print(f"listening on http://{options.host}:{options.port}", flush=True)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    serve.shutdown()
    require_package("ray", "ray").shutdown()


if __name__ == "__main__":
    try:
        main()
    except RegardError as error:
        print(f"regard: {error}", file=sys.stderr)
        sys.exit(2)
