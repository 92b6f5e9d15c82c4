"""Model output on a terminal: what it says, not what it does to the screen."""

_CONTROLS = {
    code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"
}


def printable(text: str) -> str:
    """The text with control characters replaced, so that no answer can move the cursor or retitle the window."""
    return text.translate(_CONTROLS)
