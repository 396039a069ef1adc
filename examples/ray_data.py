"""Answers the prompts of a JSONL file by Ray Data's HTTP processor, through a gateway:

    bash examples/through_gateway.sh 70b python examples/ray_data.py SERVICE prompts.jsonl FOLDER

SERVICE is asked `{"prompt": …}` of each line; FOLDER gets JSONL files with the answers. It needs ray[data,llm].
"""

import os
import sys


def main(service: str, prompts: str, folder: str) -> None:
    import ray
    from ray.data.llm import HttpRequestProcessorConfig, build_processor

    config = HttpRequestProcessorConfig(
        url=os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
        batch_size=64,
        max_retries=5,
    )
    answered = build_processor(
        config,
        preprocess=lambda row: {
            "payload": {"model": service, "messages": [{"role": "user", "content": row["prompt"]}]},
            "prompt": row["prompt"],
        },
        postprocess=lambda row: {
            "prompt": row["prompt"],
            "answer": row["http_response"]["choices"][0]["message"]["content"],
        },
    )
    answered(ray.data.read_json(prompts)).write_json(folder)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
