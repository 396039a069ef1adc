"""Asks the Hugging Face hub for a small file of a repository, for a few seconds, and says what a refusal means.

The callers decide when it is asked. A token goes into the request's header and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpc_serve.errors import InvalidRequestError, UnknownModelError
from hpc_serve.hub.hub_settings import HubSettings, read_hub_settings
from hpc_serve.sizes import MIB

if TYPE_CHECKING:
    import httpx

TIMEOUT_S = 5.0
MAX_CONFIG_BYTES = 10 * MIB


def check_access(repository: str, environ: Mapping[str, str]) -> None:
    """Ask whether this user may fetch a model.

    Raises UnknownModelError where not, InvalidRequestError where the hub does not answer.
    """
    settings = read_hub_settings(environ)
    response = get_file(settings, repository, "config.json")
    if response is None:
        raise InvalidRequestError(
            f"{settings.endpoint} cannot be reached from here, so whether the job may fetch them is not known: leave "
            "--check-hub out."
        )
    check_answer(response, repository, settings)


def get_file(settings: HubSettings, repository: str, file: str) -> httpx.Response | None:
    """Return the hub's answer for a file of a repository; None if the hub does not answer."""
    import httpx

    headers = {"Authorization": f"Bearer {settings.token}"} if settings.token else {}
    try:
        with httpx.Client(timeout=TIMEOUT_S, follow_redirects=True) as client:
            return client.get(f"{settings.endpoint}/{repository}/resolve/main/{file}", headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return None


def check_answer(response: httpx.Response, repository: str, settings: HubSettings) -> None:
    """Raise UnknownModelError for an answer that is no file."""
    endpoint, token = settings.endpoint, settings.token
    if response.status_code in (401, 403):
        cure = "your HF_TOKEN may not read it" if token else "set HF_TOKEN to a token that may read it"
        raise UnknownModelError(
            f"{repository} is private, gated or not there (HTTP {response.status_code}): accept its licence at "
            f"{endpoint}/{repository} where it has one; {cure}."
        )
    if response.status_code == 404:
        raise UnknownModelError(f"{endpoint} has no {repository}, or it has no config.json.")
    if response.status_code != 200 or len(response.content) > MAX_CONFIG_BYTES:
        raise UnknownModelError(
            f"{endpoint} answered HTTP {response.status_code} for {repository}: try again later, or name a folder."
        )
