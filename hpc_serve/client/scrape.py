"""What Prometheus needs to read the metrics of replicas: its list of targets (file_sd), and how it asks them. Pure.

A service's key goes to its own replicas alone, over TLS, to whoever shows a certificate of the home's authority.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hpc_serve.client.replicas.status import ReplicaStatus

SERVICE_LABEL = "service"
_SCRAPED = ("ready", "draining", "unresponsive")
_ADDRESS = re.compile(r"[\w.-]+:[0-9]+|\[[0-9a-fA-F:.]+\]:[0-9]+")


def target_groups(statuses: Iterable[ReplicaStatus]) -> tuple[list[dict[str, Any]], list[str]]:
    """The replicas as file_sd has them, in a fixed order; and why others that serve are left out."""
    groups, problems = [], []
    for status in sorted(statuses, key=lambda one: (one.service, one.job_id, one.replica)):
        if status.state not in _SCRAPED or status.record is None or status.host is None:
            continue
        address = _address(status.host, status.record.port)
        if not _ADDRESS.fullmatch(address):
            problems.append(f"{status.service} (job {status.name}) is left out: {address} is no address.")
        else:
            groups.append({"targets": [address], "labels": _labels(status)})
    return groups, problems


def scrape_config(services: Iterable[tuple[str, Path]], *, targets_file: Path, authority_file: Path) -> str:
    """The part of prometheus.yml for services, each with the file of its key.

    A job of Prometheus has one key, so there is one for each service, which keeps that service's targets alone.
    """
    import yaml  # it takes a while, and the list of targets needs none

    jobs = [
        {
            "job_name": f"hpc-serve-{service}",
            "scheme": "https",
            "follow_redirects": False,
            "authorization": {"credentials_file": str(key_file)},
            "tls_config": {"ca_file": str(authority_file)},
            "file_sd_configs": [{"files": [str(targets_file)]}],
            "relabel_configs": [{"source_labels": [SERVICE_LABEL], "regex": re.escape(service), "action": "keep"}],
        }
        for service, key_file in services
    ]
    return yaml.safe_dump({"scrape_configs": jobs}, sort_keys=False, width=10_000)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _labels(status: ReplicaStatus) -> dict[str, str]:
    labels = {
        SERVICE_LABEL: status.service,
        "slurm_job": status.job_id,
        "replica": status.name,
        "node": status.record.nodes[0].name if status.record and status.record.nodes else "",
        "model": status.job.model,
    }
    return {name: value for name, value in labels.items() if value}
