"""What is said of a service whose jobs decide how many they are. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.rendezvous.elastic import Elastic
from hpc_serve.submit.request.bounds import shown_time


def asleep_sentence(service: str, elastic: Elastic) -> str:
    """Since when, and why, a service is asleep, and how it is woken."""
    last = elastic.decided[-1] if elastic.decided else None
    since = f" since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(last.at))}: {last.text}" if last else ""
    return f"{service} is asleep{since}. Wake it: hpc-serve wake {service}"


def bounds_sentence(elastic: Elastic) -> str:
    """How many replicas there may be."""
    words = [f"{elastic.least} of them" if elastic.least == elastic.most else f"{elastic.least} to {elastic.most}"]
    if elastic.least != elastic.most:
        words.append("more while requests wait")
    if elastic.idle_stop_s is not None:
        words.append(f"none after {shown_time(elastic.idle_stop_s)} without a request")
    return ", ".join(words)


def elastic_sentence(service: str, elastic: Elastic, live: Sequence[ReplicaStatus], now: float) -> str:
    """One line for people; "" where there is nothing to say. `live` replicas are not over, of whichever service."""
    live = [status for status in live if status.service == service]
    last = elastic.decided[-1] if elastic.decided else None
    if elastic.state == "asleep":
        return asleep_sentence(service, elastic)
    if not live or elastic.state == "stopped":
        return ""
    bounds = f"{elastic.least}" if elastic.least == elastic.most else f"{elastic.least} to {elastic.most}"
    words = [f"{service}: {sum(one.state != 'draining' for one in live)} of {bounds} replicas"]
    if elastic.idle_stop_s is not None:
        words.append(f"none after {shown_time(elastic.idle_stop_s)} without a request")
    if elastic.submitting:
        words.append(f"{elastic.submitting} being submitted")
    if last is not None:
        words.append(f"{shown_time(max(0.0, now - last.at))} ago: {last.text}")
    if elastic.problem:
        again = time.strftime("%H:%M:%S", time.localtime(elastic.next_try_at))
        words.append(f"{elastic.problem}; trying again at {again}")
    return "; ".join(words)
