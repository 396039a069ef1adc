"""The weights of the run's model as this node sees them, and whether the hub would give what is missing."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_serve.hub.hub_settings import HubSettings, read_hub_settings
from hpc_serve.hub.local_weights import cached_folder, damaged_files, lacks_tokenizer, missing_weights, weight_files
from hpc_serve.job.preflight.facts import WeightsFacts

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_S = 3.0
_MOST_DAMAGED = 20
_LONGEST_ERROR = 40


def gather_weights(
    model: str,
    environ: Mapping[str, str],
    *,
    load_format: str,
    ask_hub: Callable[[HubSettings, str], tuple[int, str]] | None = None,
) -> WeightsFacts | None:
    """Return what this node sees of `model`, a folder or a repository; None if it is neither.

    If the cache lacks weights and the hub may be asked, `ask_hub` returns the hub's HTTP status and its name of an
    error.
    """
    is_of_hub = not (Path(model).is_dir() or model.startswith("/"))
    if is_of_hub and (not _REPOSITORY.fullmatch(model) or environ.get("VLLM_USE_MODELSCOPE")):
        return None
    settings = read_hub_settings(environ)
    facts = WeightsFacts(
        source=model, is_of_hub=is_of_hub, is_offline=settings.is_offline, has_token=settings.token is not None
    )
    folder = cached_folder(model, environ) if is_of_hub else Path(model)
    try:
        if folder is None:
            facts = replace(facts, missing="none of its weights")
        elif not folder.exists():
            return replace(facts, error="no such folder on this node")
        elif not folder.is_dir():
            return None  # a file that some load format reads
        elif not any((folder / name).is_file() for name in ("config.json", "params.json")):
            return replace(facts, error="no config.json in it, as this node sees it")
        else:
            facts = replace(facts, **_of_files(folder, load_format))
    except OSError as error:
        return replace(facts, error=f"{'the cache' if is_of_hub else 'it'} cannot be read ({error.strerror})")
    if is_of_hub and facts.missing and not settings.is_offline and ask_hub is not None:
        status, name = ask_hub(settings, model)
        facts = replace(facts, hub_status=status, hub_error=name)
    return facts


def _of_files(folder: Path, load_format: str) -> dict[str, Any]:
    found = {"folder": str(folder), "lacks_tokenizer": lacks_tokenizer(folder)}
    if load_format == "dummy":
        return found
    missing, files = missing_weights(folder), weight_files(folder)
    return {
        **found,
        "missing": missing.words if missing is not None else "",
        "damaged": damaged_files(files)[:_MOST_DAMAGED],
        "num_files": len(files),
        "total_bytes": sum(file.stat().st_size for file in files if file.is_file()),
    }


def ask_hub(settings: HubSettings, repository: str) -> tuple[int, str]:
    """Ask the hub for the model's config. Return the HTTP status, 0 if none comes in time, and its name of an error.

    A resolver has no limit of time, so this is done in a thread that may outlive the question.
    """
    answers: list[tuple[int, str]] = []
    thread = threading.Thread(target=lambda: answers.append(_ask(settings, repository)), daemon=True)
    thread.start()
    thread.join(_HUB_S)
    return next(iter(answers), (0, ""))


def _ask(settings: HubSettings, repository: str) -> tuple[int, str]:
    import http.client  # most starts ask nobody, and these take long to import
    import urllib.error
    import urllib.request

    class NoRedirect(urllib.request.HTTPRedirectHandler):
        """A redirect is an answer: to follow it would carry the token to another host."""

        def redirect_request(self, *_: Any, **__: Any) -> None:
            return None

    try:
        request = urllib.request.Request(f"{settings.endpoint}/{repository}/resolve/main/config.json", method="HEAD")
        if settings.token:
            request.add_header("Authorization", f"Bearer {settings.token}")
        with urllib.request.build_opener(NoRedirect).open(request, timeout=_HUB_S) as answer:
            return int(answer.status), ""
    except urllib.error.HTTPError as error:
        return error.code, str(error.headers.get("X-Error-Code", ""))[:_LONGEST_ERROR]
    except (OSError, ValueError, http.client.HTTPException):
        return 0, ""
