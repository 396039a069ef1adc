"""The weights of the run's model as this node sees them, and whether the hub would give what is missing."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
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
    if Path(model).is_dir() or model.startswith("/"):
        return _of_folder(Path(model), load_format)
    if not _REPOSITORY.fullmatch(model) or environ.get("VLLM_USE_MODELSCOPE"):
        return None
    settings = read_hub_settings(environ)
    folder = cached_folder(model, environ)
    common: dict[str, Any] = {"is_offline": settings.is_offline, "has_token": settings.token is not None}
    try:
        missing = missing_weights(folder)
    except OSError as error:
        return WeightsFacts(source=model, is_of_hub=True, error=f"the cache cannot be read: {error}")
    if missing is not None and not settings.is_offline and ask_hub is not None:
        common["hub_status"], common["hub_error"] = ask_hub(settings, model)
    if folder is None:
        return WeightsFacts(source=model, is_of_hub=True, missing="none of its weights", **common)
    return WeightsFacts(source=model, is_of_hub=True, **_of_files(folder, load_format), **common)


def _of_folder(folder: Path, load_format: str) -> WeightsFacts | None:
    try:
        if not folder.exists():
            return WeightsFacts(source=str(folder), error="no such folder on this node")
        if not folder.is_dir():
            return None  # a file that some load format reads
        if not any((folder / name).is_file() for name in ("config.json", "params.json")):
            return WeightsFacts(source=str(folder), error="no config.json in it, as this node sees it")
        return WeightsFacts(source=str(folder), **_of_files(folder, load_format))
    except OSError as error:
        return WeightsFacts(source=str(folder), error=f"it cannot be read ({error.strerror})")


def _of_files(folder: Path, load_format: str) -> dict[str, Any]:
    of_tokenizer = {"lacks_tokenizer": lacks_tokenizer(folder)}
    if load_format == "dummy":
        return {"folder": str(folder), **of_tokenizer}
    missing = missing_weights(folder)
    files = weight_files(folder)
    return {
        "folder": str(folder),
        **of_tokenizer,
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
