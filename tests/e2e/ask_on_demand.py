"""A user's clients that ask a gateway for models by chance: BASE_URL SECONDS CLIENTS MODEL... Prints how it went."""

import json
import random
import sys
import threading
import time

import openai

base_url, seconds, clients, *models = sys.argv[1:]
until_s = time.monotonic() + float(seconds)
answered: list[tuple[str, float]] = []
errors: list[str] = []


def keep_asking(number: int) -> None:
    chance = random.Random(number)
    client = openai.OpenAI(base_url=base_url, max_retries=0, timeout=600)
    while time.monotonic() < until_s:
        model, began_s = chance.choice(models), time.monotonic()
        try:
            client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hello"}])
            answered.append((model, time.monotonic() - began_s))
        except Exception as error:
            errors.append(f"{model}: {type(error).__name__}: {error}")
        time.sleep(chance.random() * 2)


threads = [threading.Thread(target=keep_asking, args=(number,)) for number in range(int(clients))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
waited = sorted(seconds for _, seconds in answered)
counts = {model: sum(asked == model for asked, _ in answered) for model in models}
print(json.dumps({"answered": counts, "errors": errors, "longest_s": waited[-1] if waited else None}), flush=True)
