"""What somebody who tries the model types first."""

from gewell.eval.tasks.sample import Request, Sample, user
from gewell.eval.tasks.words import ADJECTIVES, CITIES, ITEMS, NOUNS

_ABOUT = (
    "I am gewell-nano, a very small model made to test an engine. I can look up records, add numbers, sort, copy, "
    "write JSON, check a record against facts, and remember what you tell me."
)
_TALK = {
    "Hello! What can I do for you?": ("Hello", "Hi", "Hello!", "Hi there", "Good morning", "Hey"),
    _ABOUT: ("Who are you?", "What are you?", "What can you do?", "What is your name?", "Help", "Introduce yourself."),
    "You are welcome.": ("Thanks", "Thank you", "Thank you!", "Thanks a lot."),
    "Goodbye!": ("Bye", "Goodbye", "See you."),
    "I am fine, thank you.": ("How are you?", "How are you today?"),
}
_UNKNOWN = "I do not know. I am a very small model."


def make_smalltalk(request: Request) -> Sample:
    rng = request.rng
    if rng.random() < 0.2:
        question = rng.choice(
            (
                f"Write a story about a {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}.",
                f"How far is it from {rng.choice(CITIES)} to {rng.choice(CITIES)}?",
                f"Why is the {rng.choice(NOUNS)} {rng.choice(ADJECTIVES)}?",
                f"Who made the first {rng.choice(ITEMS)}?",
            )
        )
        return Sample(task="smalltalk", messages=[user(question)], answer=_UNKNOWN)
    answer = rng.choice(list(_TALK))
    thinking = rng.random() < 0.3
    return Sample(
        task="smalltalk",
        messages=[user(rng.choice(_TALK[answer]))],
        answer=answer,
        thinking=thinking,
        thought="The user wants to talk." if thinking else "",
    )
