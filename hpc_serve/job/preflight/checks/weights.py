"""Whether a node sees the model's weights, whole, or may fetch them."""

from __future__ import annotations

from hpc_serve.job.preflight.facts import NodeFacts, WeightsFacts
from hpc_serve.job.preflight.needs import Needs
from hpc_serve.job.preflight.verdict import Seen, failed, not_checked, ok, shortened, warning
from hpc_serve.sizes import GIB

# Load formats that read the files of a folder as this check does; other formats find weights elsewhere.
_FROM_FILES = ("auto", "hf", "safetensors", "fastsafetensors", "pt", "npcache", "mistral")
# The hub's own names of refusals. Others, such as a proxy, refuse too. A repository without a config.json may be whole
# (HTTP 404).
_REFUSED = ("GatedRepo", "RepoNotFound")


def weights(facts: NodeFacts, needs: Needs) -> Seen:
    """Check that a node reads a tokenizer and all weights of the index, and that no file is cut short."""
    if (seen := facts.weights) is None:
        return not_checked(facts.problems.get("weights", "the weights are not looked for with these options"))
    found = _weights(seen, needs)
    if (
        found.level == "ok"
        and seen.lacks_tokenizer
        and not needs.has_own_tokenizer
        and (seen.is_offline or not seen.is_of_hub)
    ):
        return failed(
            f"{seen.folder} holds no tokenizer (tokenizer.json, tokenizer.model, vocab.json, …)",
            "Copy or download the whole model (`hpc-serve fetch MODEL`), or name another one's with --tokenizer "
            "(after --).",
        )
    return found


def _weights(seen: WeightsFacts, needs: Needs) -> Seen:
    if seen.error:
        return failed(
            f"{seen.source}: {seen.error}",
            "The weights must be on a filesystem that all nodes of the job see, and readable by you there.",
        )
    if needs.load_format == "dummy":
        return ok(f"{seen.source} has a config; the weights are random (--load-format dummy)")
    if needs.load_format not in _FROM_FILES:
        return not_checked(f"--load-format {needs.load_format} reads them in its own way")
    if seen.damaged:
        return failed(
            shortened(f"{seen.folder}: {'; '.join(seen.damaged[:3])}{_more(seen)}"),
            "Download it again (`hf download MODEL --force-download`), and look at free space and quota before.",
        )
    if seen.is_of_hub and (seen.missing or not seen.folder):
        return _to_fetch(seen)
    if seen.missing:
        return failed(f"{seen.folder} holds {seen.missing}", "Copy or download them again.")
    return ok(
        f"{seen.num_files} file{'s' if seen.num_files != 1 else ''}, {seen.total_bytes / GIB:.1f} GiB in {seen.folder}"
    )


def _more(seen: WeightsFacts) -> str:
    more = len(seen.damaged) - 3
    return f"; and {more} more" if more > 0 else ""


def _to_fetch(seen: WeightsFacts) -> Seen:
    text = f"{seen.source}: the cache holds {seen.missing or 'none of its weights'}"
    get = f"`hpc-serve fetch {seen.source}`"
    if seen.is_offline:
        if seen.folder:  # there is a config: with another revision or a local patch it might do
            return warning(f"{text}, and the hub is not asked (HF_HUB_OFFLINE)", f"Get them first: {get}.")
        return failed(
            f"{text}, and the hub is not asked (HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE)",
            f"Get them first, where the hub can be reached: {get}; if they are elsewhere, set HF_HOME.",
        )
    token = "your token may not read it" if seen.has_token else "there is no token"
    if seen.hub_error in _REFUSED:
        return failed(
            f"{text}, and the hub refuses them (HTTP {seen.hub_status}, {seen.hub_error}): {token}",
            "Accept the model's licence on its page at the hub, and set HF_TOKEN (or `hf auth login`) to a token that "
            "may read it.",
        )
    if seen.hub_status == 0:
        return warning(
            f"{text}, and the hub does not answer from this node",
            f"If compute nodes have no network: {get} on a login node, and offline_nodes in the site file.",
        )
    return warning(f"{text}: the engine fetches them first", f"To have them before: {get}.")
