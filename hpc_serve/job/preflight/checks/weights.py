"""Whether a node sees the model's weights, whole, or may fetch them."""

from __future__ import annotations

from hpc_serve.job.preflight.facts import Needs, NodeFacts, WeightsFacts
from hpc_serve.job.preflight.verdict import Seen, found, not_checked, ok
from hpc_serve.sizes import GIB

# Load formats that read the files of a folder as this check does; other formats find weights elsewhere.
_FROM_FILES = ("auto", "hf", "safetensors", "fastsafetensors", "pt", "npcache", "mistral")
# The hub's own names of refusals. Others, such as a proxy, refuse too. A repository without a config.json may be whole
# (HTTP 404).
_REFUSED = ("GatedRepo", "RepoNotFound")


def weights(seen: WeightsFacts, facts: NodeFacts, needs: Needs) -> Seen:
    """Check that a node reads a tokenizer and all weights of the index, and that no file is cut short."""
    result = _weights(seen, needs)
    may_fetch = seen.is_of_hub and not seen.is_offline
    if result.level == "ok" and seen.lacks_tokenizer and not needs.has_own_tokenizer and not may_fetch:
        return found("no tokenizer", folder=seen.folder)
    return result


def _weights(seen: WeightsFacts, needs: Needs) -> Seen:
    if seen.error:
        return found("weights unreadable", source=seen.source, error=seen.error)
    if needs.load_format == "dummy":
        return ok(f"{seen.source} has a config; the weights are random (--load-format dummy)")
    if needs.load_format not in _FROM_FILES:
        return not_checked(f"--load-format {needs.load_format} reads them in its own way")
    if seen.damaged:
        more = len(seen.damaged) - 3
        damaged = "; ".join(seen.damaged[:3]) + (f"; and {more} more" if more > 0 else "")
        return found("weights damaged", folder=seen.folder, damaged=damaged)
    if seen.is_of_hub and (seen.missing or not seen.folder):
        return _to_fetch(seen)
    if seen.missing:
        return found("weights missing", folder=seen.folder, missing=seen.missing)
    files = f"{seen.num_files} file{'s' if seen.num_files != 1 else ''}"
    return ok(f"{files}, {seen.total_bytes / GIB:.1f} GiB in {seen.folder}")


def _to_fetch(seen: WeightsFacts) -> Seen:
    text = f"{seen.source}: the cache holds {seen.missing or 'none of its weights'}"
    if seen.is_offline:  # with a config, another revision or a local patch might do
        name = "weights missing, offline" if seen.folder else "no weights, offline"
        return found(name, text=text, source=seen.source)
    if seen.hub_error in _REFUSED:
        token = "your token may not read it" if seen.has_token else "there is no token"
        return found("hub refuses", text=text, status=seen.hub_status, error=seen.hub_error, token=token)
    return found("hub does not answer" if seen.hub_status == 0 else "weights to fetch", text=text, source=seen.source)
