"""Find a service, and talk to it from any other job.

    import asyncio

    from hpc_serve import connect, connect_async, endpoint, errors, services

    client = connect("405b", wait=600)               # an openai.OpenAI, ready to use
    hello = [{"role": "user", "content": "Hello"}]
    print(client.chat.completions.create(model=client.model, messages=hello).choices[0].message.content)

    async def ask() -> None:
        async with await connect_async("405b") as client:     # an openai.AsyncOpenAI
            await client.chat.completions.create(model=client.model, messages=hello)

    asyncio.run(ask())

    found = endpoint("405b")                         # for other tools: one replica, as it is now
    print(found.base_url, list(found.variables))     # OPENAI_BASE_URL, OPENAI_API_KEY, certificates

    for status in services():
        print(status.service, [replica.state for replica in status.replicas])

    try:
        connect("no-such-service")
    except errors.ServiceNotFoundError as error:
        print(error)                                 # names the services that there are

The OpenAI SDK is imported when the first client is made, not here.
"""

from hpc_serve.client.access import (
    Endpoint,
    ReplicaAnswer,
    connect,
    connect_async,
    endpoint,
    pick_service,
    services,
    tell_all,
)
from hpc_serve.client.replicas.pool import Replica
from hpc_serve.client.replicas.status import ReplicaStatus, ServiceStatus

__all__ = [
    "Endpoint",
    "Replica",
    "ReplicaAnswer",
    "ReplicaStatus",
    "ServiceStatus",
    "connect",
    "connect_async",
    "endpoint",
    "pick_service",
    "services",
    "tell_all",
]
