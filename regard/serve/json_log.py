"""Structured logs: one JSON object per line, without the texts of requests."""

import json
import logging
import sys
import time
from typing import Any, TextIO


class JsonFormatter(logging.Formatter):
    """Formats a record as JSON: time, level, event, and the fields of the record.

    >>> record = logging.LogRecord("regard.serve", logging.INFO, "", 0, "request", None, None)
    >>> record.fields = {"status": 200}
    >>> json.loads(JsonFormatter().format(record))["status"]
    200
    """

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def set_up_json_log(stream: TextIO | None = None, level: int = logging.INFO) -> None:
    """Write the logs of Regard and of uvicorn as JSON, to stderr by default."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name in ("regard", "uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], False
        logger.setLevel(level)
    logging.getLogger("regard").addHandler(handler)
    logging.getLogger("uvicorn").addHandler(handler)
    logging.getLogger("uvicorn.error").propagate = True
