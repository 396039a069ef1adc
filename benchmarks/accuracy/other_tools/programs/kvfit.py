"""Asks kvfit: `kvfit MODEL --hardware custom:GIB --gpus N --tp N --context L --utilization U --json`.

The answers of the hub are given here. What it leaves for the cache is its budget of a GPU without its weights of a GPU.
"""

import contextlib
import importlib
import importlib.metadata
import io
import json
import sys

BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1, "I32": 4}
GIB = 1024**3


def main():
    cli, hub = importlib.import_module("kvfit.cli"), importlib.import_module("kvfit.hf")
    asked = json.load(sys.stdin)
    answers = {question["id"]: answer(cli, hub, question) for question in asked}
    print(json.dumps({"version": importlib.metadata.version("kvfit"), "answers": answers}))


def answer(cli, hub, question):
    if "max_model_len" not in question:
        return {"not_asked": "it says nothing of speed"}
    if question["tensors"] is None:
        return {"not_asked": "it reads the sizes of the checkpoint's files, and their format is not known here"}
    if question["loaded_otherwise"]:
        return {"not_asked": f"it has no option for weights loaded as {question['loaded_otherwise']}"}
    if question["pp"] > 1:
        return {"not_asked": "it knows no pipeline stages"}
    size = sum(BYTES[kind] * product(shape) for _, kind, shape in question["tensors"])
    count: dict[str, int] = {}
    for _, kind, shape in question["tensors"]:
        count[kind] = count.get(kind, 0) + product(shape)
    layers = question["config"].get("num_hidden_layers") or 0

    def fetch_json(url, **options):
        if url.endswith("/config.json"):
            return json.loads(json.dumps(question["config"]))
        if url.endswith("model.safetensors.index.json"):
            return {"weight_map": {f"model.layers.{layer}.x": "model.safetensors" for layer in range(layers)}}
        names = ("model.safetensors", "model.safetensors.index.json")
        files = [{"rfilename": name, "size": size if name == names[0] else 1} for name in names]
        return {"sha": "0" * 40, "siblings": files, "safetensors": {"parameters": count}}

    hub._fetch_json = fetch_json
    words = [
        *("owner/name", "--hardware", f"custom:{question['gpu_gib']}", "--gpus", str(question["tp"])),
        *("--tp", str(question["tp"]), "--context", str(question["max_model_len"])),
        *("--utilization", str(question["utilization"]), "--allow-context-overflow", "--json"),
    ]
    if question["kv_cache_dtype"] != "auto":
        words += ["--kv-dtype", question["kv_cache_dtype"].split("_")[0]]
    printed, complained = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complained):
            cli.main(words)
    except SystemExit:
        pass
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"[:300]}
    if not printed.getvalue().strip():
        return {"refused": complained.getvalue().strip()[-300:]}
    layout = json.loads(printed.getvalue())["layouts"][0]
    weights, each = layout["weights_per_rank_gib"], layout["kv_per_sequence_per_rank_gib"]
    figures = {"weights": weights, "fits": layout["verdict"] == "fits"}
    cache = layout["budget_per_rank_gib"] - weights - layout["fixed_cache_per_rank_gib"]
    if each is not None:
        figures["token"] = each * GIB / question["max_model_len"]
        figures["cache"] = max(cache, 0.0)
    return figures


def product(shape):
    found = 1
    for one in shape:
        found *= one
    return found


if __name__ == "__main__":
    main()
