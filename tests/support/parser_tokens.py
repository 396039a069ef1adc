"""Prints which tokens each parser of the installed vLLM needs in a tokenizer, as `parsers.json` holds them.

    python -m tests.support.parser_tokens

Each parser is made with a vocabulary that lacks one token at a time. A parser that is refused needs that token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

from tests.support.arguments import given_words

SUFFIXED = ("hy_v4",)
"""Parsers that read a suffix of their tokens from the vocabulary, so that the names of the tokens differ."""


class Vocabulary(dict[str, int]):
    """A vocabulary that holds every token but `lacks`, and notes which were asked for."""

    def __init__(self, lacks: Collection[str]) -> None:
        super().__init__()
        self.lacks = lacks
        self.asked: set[str] = set()

    def __contains__(self, token: object) -> bool:
        self.asked.add(str(token))
        return token not in self.lacks

    def get(self, token: str, default: Any = None) -> Any:
        return 1 if token in self else default

    def __missing__(self, token: str) -> int:
        if token not in self:
            raise KeyError(token)
        return 1


class Tokenizer:
    """As much of a tokenizer as parsers look at when they are made."""

    eos_token_id = bos_token_id = 1
    chat_template = None
    is_fast = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.init_kwargs: dict[str, Any] = {"response_template": {}}
        self.all_special_ids: list[int] = []
        self.all_special_tokens: list[str] = []
        self._vocabulary = vocabulary

    def get_vocab(self) -> Vocabulary:
        return self._vocabulary

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self._vocabulary.get(token)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) for letter in text]

    def tokenize(self, text: str) -> list[str]:
        return [text]


def needed(make: Callable[[Any], Any]) -> list[str]:
    """Return the tokens without each of which a parser is refused."""
    whole = Vocabulary(())
    if not is_made(make, whole):
        return []
    return sorted(token for token in whole.asked if not is_made(make, Vocabulary((token,))))


def is_made(make: Callable[[Any], Any], vocabulary: Vocabulary) -> bool:
    try:
        make(Tokenizer(vocabulary))
    except Exception:
        return False
    return True


def main() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    tools, reasoning = ToolParserManager.get_tool_parser, ReasoningParserManager.get_reasoning_parser
    found = {
        "tools": {name: needed(tools(name)) for name in ToolParserManager.lazy_parsers},
        "reasoning": {name: needed(reasoning(name)) for name in ReasoningParserManager.lazy_parsers},
    }
    for kind in found.values():
        kind.update({name: [] for name in SUFFIXED})
    print(json.dumps(found, ensure_ascii=False))


if __name__ == "__main__":
    given_words(__doc__, 0)
    main()
