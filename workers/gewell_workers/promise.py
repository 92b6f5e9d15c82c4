"""What a server must be and what its settings promise. Apart, because doctor reads it where no extra is installed."""

MIN_REDIS = (6, 2)

PROMISES = {
    "always": "every accepted job survives a crash of the server",
    "everysec": "a power cut may lose the last second of accepted jobs",
    "none": "a restart of the server loses the queue: no append-only file",
    "unknown": "what a restart of the server loses is unknown: CONFIG is not allowed to us",
}
