"""Asks hf-mem: `hf_mem.run(model_id, experimental=True, max_model_len=…)`, with the hub's answers given here.

It sums a checkpoint's files and the cache of one request. It knows no GPU: its sums are divided by the number of GPUs
here.
"""

import importlib
import importlib.metadata
import json
import sys
import warnings

GIB = 1024**3


def main():
    run = importlib.import_module("hf_mem.run")
    asked = json.load(sys.stdin)
    answers = {question["id"]: answer(run, question) for question in asked}
    print(json.dumps({"version": importlib.metadata.version("hf-mem"), "answers": answers}))


def answer(run, question):
    if "max_model_len" not in question:
        return {"not_asked": "it says nothing of speed"}
    if question["tensors"] is None:
        return {"not_asked": "it reads the checkpoint's files, and their format is not known here"}
    if question["loaded_otherwise"]:
        return {"not_asked": f"it has no option for weights loaded as {question['loaded_otherwise']}"}
    if question["pp"] > 1:
        return {"not_asked": "it knows no pipeline stages"}
    header = {name: {"dtype": kind, "shape": shape} for name, kind, shape in question["tensors"]}

    async def get_json_file(client, url, headers):
        if "/tree/" in url:
            return [{"path": name, "type": "file"} for name in ("config.json", "model.safetensors")]
        return json.loads(json.dumps(question["config"]))

    async def fetch_safetensors_metadata(client, url, headers):
        return header

    run.get_json_file, run.fetch_safetensors_metadata = get_json_file, fetch_safetensors_metadata
    dtype = question["kv_cache_dtype"]
    if dtype == "auto" and "quantization_config" in question["config"]:
        dtype = "bfloat16"  # its own "auto" refuses most quantized checkpoints, and says to name the type
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = run.run(
                "owner/name", experimental=True, max_model_len=question["max_model_len"], kv_cache_dtype=dtype
            )
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"[:300]}
    figures = {"weights": found.memory / question["tp"] / GIB}
    if found.kv_cache:
        figures["token"] = found.kv_cache / question["max_model_len"] / question["tp"]
    return figures


if __name__ == "__main__":
    main()
