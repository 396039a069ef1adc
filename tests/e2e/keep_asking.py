"""A user's program that asks a service all the time, from several threads: SERVICE THREADS [MODEL]. SIGTERM ends it.

It connects with `wake=True`. At the end it prints how many requests were answered, with which first words, and the
errors of the others.
SIGUSR1 has it print where its threads are.
"""

import faulthandler
import json
import signal
import sys
import threading

from hpc_serve.client import connect

faulthandler.register(signal.SIGUSR1)
service, count = sys.argv[1], int(sys.argv[2])
is_over = threading.Event()
# Waited for below: a handler that sets an Event can run while its own thread holds that Event's lock.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
client = connect(service, wait=300, wake=True, max_retries=0)
print("connected", flush=True)
model = sys.argv[3] if len(sys.argv) > 3 else ""
answered: list[str] = []
errors: list[str] = []


def keep_asking() -> None:
    while not (is_over.is_set() and answered):
        try:
            answer = client.chat.completions.create(
                model=model or client.model, messages=[{"role": "user", "content": "Hello"}]
            )
            answered.append((answer.choices[0].message.content or "").split(" ")[0])
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")


threads = [threading.Thread(target=keep_asking) for _ in range(count)]
for thread in threads:
    thread.start()
signal.sigwait({signal.SIGTERM})
is_over.set()
for thread in threads:
    thread.join()
print(json.dumps({"answered": len(answered), "first_words": sorted(set(answered)), "errors": errors}), flush=True)
