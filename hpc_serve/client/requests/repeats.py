"""Whether a request may be sent again after it failed, how often, and which error its user gets if not.

No work was begun after a refused connection. A request that was lost with a replica may be sent to another one if it
has no side effects, and to three in all: it may be what ends engines. Any other failure is the user's.
"""

from __future__ import annotations

from hpc_serve.client.connections.message import Message
from hpc_serve.client.replicas.sdk import http, openai

MOST_ENGINES = 3

# What an engine is asked for without leaving anything behind. All of vLLM's that generate, score or embed.
_WITHOUT_EFFECT = (
    *("/completions", "/embeddings", "/pooling", "/classify", "/score", "/rerank", "/tokenize", "/detokenize"),
    *("/audio/transcriptions", "/audio/translations"),
)


class Repeats:
    """One request, and with how many replicas it was lost."""

    def __init__(self, request: Message) -> None:
        self._request = request
        self.lost = 0

    @property
    def is_over(self) -> bool:
        """Whether it was lost with as many replicas as it may be."""
        return self.lost >= MOST_ENGINES

    @property
    def why_over(self) -> str:
        return f"{self.lost} replicas were lost with it"

    @property
    def is_without_effect(self) -> bool:
        return self._request.method in ("GET", "HEAD") or self._request.path.endswith(_WITHOUT_EFFECT)

    @property
    def is_replayable(self) -> bool:
        """Whether the body is held in memory. An upload that was streamed is gone."""
        return self._request.content is not None

    def count(self, failure: BaseException) -> None:
        """The request failed at a replica."""
        self.lost += was_lost(failure)

    def may_follow(self, failure: BaseException) -> bool:
        """Whether it may be sent once more after this failure, which was counted."""
        if never_arrived(failure):
            return True
        return was_lost(failure) and not self.is_over and self.is_without_effect and self.is_replayable

    def shown(self, failure: BaseException) -> BaseException:
        """The error for the SDK. After any but its own it would send the request again by itself."""
        if was_lost(failure):
            return self.as_lost(self.why_over if self.is_without_effect else "it may have had an effect")
        if isinstance(failure, http.ReadTimeout | http.WriteTimeout) and not self.is_without_effect:
            return openai.APITimeoutError(request=self._request.of_user)
        return failure

    def as_lost(self, reason: str) -> openai.APIConnectionError:
        """The error of a request that was lost; `reason` is why it is not sent again."""
        text = f"The request was lost with its replica and is not sent again: {reason}."
        return openai.APIConnectionError(message=text, request=self._request.of_user)


def never_arrived(error: BaseException) -> bool:
    """Whether no engine received anything of the request."""
    return isinstance(error, http.ConnectError | http.ConnectTimeout)


def was_lost(error: BaseException) -> bool:
    """Whether the connection broke before an answer came."""
    return isinstance(error, http.NetworkError | http.RemoteProtocolError) and not never_arrived(error)
