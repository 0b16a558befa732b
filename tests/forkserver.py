"""The server from which tests fork their processes.

A test process has only one such server, and its first start decides what it has imported. So this list is for all tests
that use it, and includes what regard imports late: otherwise every forked process would spend seconds on it.
"""

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "regard.training.run",
        "tests.pipelines.test_model_files",
        "tests.training.helpers",
        "torch._dynamo",  # of optimizers
        "matplotlib.figure",  # of the loss curves
        "matplotlib.backends.backend_agg",
    ]
)
