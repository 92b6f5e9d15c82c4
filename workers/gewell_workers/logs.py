"""Log lines go to standard error: one a line, time first. Jobs are reported as JSON, never with their text."""

import logging
import sys
import time
import traceback
from pathlib import Path


def set_up_logging(level: int = logging.INFO) -> None:
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname).1s %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    logging.basicConfig(level=level, handlers=[handler], force=True)


def fault_of(error: BaseException) -> str:
    """What failed and where, for faults while a job's text is at hand: an exception's message may quote the prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
    if len(places) > 12:  # a recursion
        places = [*places[:4], "...", *places[-8:]]
    return f"{type(error).__name__} at {' > '.join(places)}"
