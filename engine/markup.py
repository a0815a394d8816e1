"""Kimi K3's markup: elements of text pieces and special tokens.

    element = O tag attributes S body C tag S            message = element(message role="...") E

O, C, S and E are special tokens; tags, attributes and bodies are text, each piece encoded by itself.

Source: kimi-k3.md, section 7.
"""

from collections.abc import Iterable, Mapping

Segment = tuple[str, bool]  # text, and whether it is a special token

OPEN, CLOSE, SEPARATOR, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"


def opening(tag: str, attributes: Mapping[str, str]) -> list[Segment]:
    """Begin of an element."""
    out = [(OPEN, True), (tag, False)]
    for key, value in attributes.items():
        escaped = value.replace("&", "&amp;").replace('"', "&quot;")
        out += [(f" {key}", False), ('="', False), (escaped, False), ('"', False)]
    return [*out, (SEPARATOR, True)]


def element(tag: str, attributes: Mapping[str, str], body: Iterable[Segment]) -> list[Segment]:
    """A whole element."""
    return [*opening(tag, attributes), *body, (CLOSE, True), (tag, False), (SEPARATOR, True)]


def message(attributes: Mapping[str, str], body: Iterable[Segment]) -> list[Segment]:
    """A message and its end."""
    return [*element("message", attributes, body), (END, True)]
