"""Finding a service and talking to it from any other job.

    client = connect("405b", wait=600)          # an openai.OpenAI, ready to use
    client.chat.completions.create(model=client.model, messages=[{"role": "user", "content": "Hello"}])

The OpenAI SDK is imported when the first client is made, not here.
"""

from hpc_serve.client.access import Endpoint, connect, connect_async, endpoint, pick_service, services
from hpc_serve.client.replicas.replicas import Replica
from hpc_serve.client.replicas.status import ReplicaStatus, ServiceStatus

__all__ = [
    "Endpoint",
    "Replica",
    "ReplicaStatus",
    "ServiceStatus",
    "connect",
    "connect_async",
    "endpoint",
    "pick_service",
    "services",
]
