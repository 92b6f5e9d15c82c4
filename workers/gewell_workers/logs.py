"""Log lines go to standard error: one a line, time first. Jobs are reported as JSON, never with their text."""

import logging
import sys
import time


def set_up_logging(level: int = logging.INFO) -> None:
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname).1s %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    logging.basicConfig(level=level, handlers=[handler], force=True)
