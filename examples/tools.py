"""Lets the model call a function: python examples/tools.py SERVICE "How much space is left in /tmp?"

The service must have been submitted with --tools.
"""

import json
import shutil
import sys

from hpc_serve.client import connect

TOOL = {
    "type": "function",
    "function": {
        "name": "free_space",
        "description": "How many GiB are free in a folder.",
        "parameters": {"type": "object", "properties": {"folder": {"type": "string"}}, "required": ["folder"]},
    },
}


def free_space(folder: str = "/tmp") -> str:
    return f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB"


def main(service: str, question: str) -> None:
    with connect(service) as client:
        messages: list = [{"role": "user", "content": question}]
        said = client.chat.completions.create(model=client.model, messages=messages, tools=[TOOL]).choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls or []:
            result = free_space(**json.loads(call.function.arguments))
            print(f"{call.function.name}({call.function.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if said.tool_calls:
            said = client.chat.completions.create(model=client.model, messages=messages).choices[0].message
        print(said.content)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
