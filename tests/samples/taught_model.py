"""A tiny model that has learned one answer, so that a recording can be read.

The demo's model has random weights and answers gibberish. This one is trained for a minute on one question.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpc_serve.demo_model import make_demo_model

QUESTION = "Why is the sky blue?"
ANSWER = (
    "Sunlight holds all colours. The air scatters its blue part in all directions, far more than its red part. "
    "So blue light comes to your eyes from the whole sky."
)
STEPS = 1500
GOOD_LOSS = 0.001


def make_taught_model(folder: Path) -> Path:
    """Write a model like `8b` that knows the answer to QUESTION. Raise RuntimeError if it does not learn it."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    make_demo_model(folder, like="8b")
    torch.set_num_threads(1)  # two would wait for each other on a busy machine
    torch.manual_seed(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, tokenize=False
    )
    prompt = tokenizer(asked, add_special_tokens=False)["input_ids"]
    answer = tokenizer(f"{ANSWER}<|eot_id|>", add_special_tokens=False)["input_ids"]
    tokens = torch.tensor([prompt + answer])
    labels = tokens.clone()
    labels[:, : len(prompt)] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    loss = torch.tensor(float("inf"))
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=labels).loss
        if loss.item() < GOOD_LOSS:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    else:
        raise RuntimeError(f"the tiny model has not learned its answer in {STEPS} steps: loss {loss.item():.4f}")
    model.to(torch.bfloat16).save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)
    return folder
