"""Adds LoRA adapters to a service, and removes them: they are part of what is wanted, and each launcher sees to it.

All ready replicas load an adapter that is added, or it is taken back. A replica that comes later loads it before it is
ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.errors import HpcServeError, InvalidRequestError, ServiceNotFoundError, WaitTimeoutError
from hpc_serve.hub.hub import find_adapter, find_spec
from hpc_serve.plan.engine import EngineConfig
from hpc_serve.plan.model.checkpoint import ON_CPUS, AdapterFiles, check_room, check_shapes, least_rank
from hpc_serve.rendezvous.claims import change_wanted, read_wanted
from hpc_serve.rendezvous.fields import replica_name
from hpc_serve.rendezvous.record import Adapter, EndpointRecord, check_adapter_name
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.rendezvous.wanted import Wanted
from hpc_serve.submit.status.status_reader import find_report, replicas_here

_POLL_S = 0.5
_KEPT = 64
"""Adapters that an engine keeps in the node's memory. It reads others again for each request, and ends if it cannot."""
_LONGEST_LOAD_S = 660.0  # a launcher gives its engine ten minutes
_NONE = Adapter(path="", added_at=0.0)  # in the place of an adapter that is not there


@dataclass(frozen=True, kw_only=True)
class Told:
    """The ready replicas that did as they were told, and the names of those that will before they are ready.

    `note` is what a person should see to.
    """

    done: tuple[str, ...] = ()
    coming: tuple[str, ...] = ()
    note: str = ""


def add_adapter(store: ServiceStore, service: str, name: str, named: str) -> Told:
    """Have every replica of a service load an adapter as the model `name`, in place of an earlier one of that name.

    `named` is a folder, or a repository in the cache. Raises InvalidRequestError if a ready replica does not load it;
    then all is as before.
    """
    check_adapter_name(name)
    live = _live(store, service)
    if any(name in (service, *one.record.served_model_names) for one in live if one.record is not None):
        raise InvalidRequestError(f"{name} is a name of {service} itself: give the adapter another one.")
    files = find_adapter(named)
    note = _check(store, service, live, files)
    before = wanted_adapters(store, service).get(name)
    if before is not None and before.path == files.path:
        told, faults = _wait(store, service, live, name, before)
        if not faults:
            again = (
                "It was there already. Changed files need another folder: engines know what they computed by its name."
            )
            return replace(told, note=" ".join(filter(None, (again, note))))
    adapter = Adapter(path=files.path, added_at=time.time())

    def as_before(found: Mapping[str, Adapter]) -> dict[str, Adapter]:
        again = {name: replace(before, added_at=time.time())} if before is not None else {}
        return {**_without(found, name), **again} if found.get(name) == adapter else dict(found)

    _change(store, service, lambda found: {**found, name: adapter}, replicas=len(live))
    try:
        told, faults = _wait(store, service, live, name, adapter)
        if faults:
            kept = f"{before.path} is loaded again" if before is not None else "it is unloaded where it was loaded"
            raise InvalidRequestError(f"{service} did not take the adapter {name}, and {kept}. {_words(faults)}.")
    except BaseException:  # Ctrl-C, too
        _change(store, service, as_before)
        raise
    return replace(told, note=note)


def remove_adapter(store: ServiceStore, service: str, name: str) -> Told:
    """Have every replica unload an adapter. Raises InvalidRequestError, and WaitTimeoutError if one did not."""
    live = _live(store, service)
    there = wanted_adapters(store, service)
    if name not in there:
        raise InvalidRequestError(f"{service} has no adapter {name}; it has {', '.join(there) or 'none'}.")
    _change(store, service, lambda found: _without(found, name), replicas=len(live))
    told, faults = _wait(store, service, live, name, _NONE)
    if faults:
        raise WaitTimeoutError(f"{name} is not wanted of {service} any more. {_words(faults)}.")
    return told


def wanted_adapters(store: ServiceStore, service: str) -> Mapping[str, Adapter]:
    """Return the adapters that a service is to have. Raises StoreError."""
    wanted = read_wanted(store, service)
    return wanted.adapters if wanted is not None else {}


@dataclass(frozen=True, kw_only=True)
class ListedAdapter:
    """An adapter of a service, the replicas that have it, and why others have not."""

    name: str
    path: str
    added_at: float
    loaded: tuple[str, ...]
    faults: Mapping[str, str]


def list_adapters(store: ServiceStore, service: str) -> list[ListedAdapter]:
    """Return the adapters that a service is to have, with what its replicas say of them.

    Raises StoreError, and ServiceNotFoundError.
    """
    wanted = wanted_adapters(store, service)
    if not wanted:
        find_report(store, service)
    records = [one for one in store.read(service).records if not one.is_final]
    return [
        ListedAdapter(
            name=name,
            path=adapter.path,
            added_at=adapter.added_at,
            loaded=tuple(replica_of(one) for one in records if one.state != "starting" and name in one.adapter_names),
            faults={replica_of(one): fault for one in records if (fault := one.adapters.get(name, _NONE).fault)},
        )
        for name, adapter in wanted.items()
    ]


def want_adapters(store: ServiceStore, service: str, new: Mapping[str, Adapter], *, is_new: bool) -> None:
    """Write down the adapters of a job on this machine, beside those of a service that has others.

    Raises StoreError.
    """
    if new or wanted_adapters(store, service):
        _change(store, service, lambda found: {**({} if is_new else found), **new})


def read_adapters(words: Sequence[str]) -> dict[str, AdapterFiles]:
    """Read the adapters of `NAME=FOLDER` words. Raises InvalidRequestError."""
    found = {}
    for word in words:
        name, _, path = word.partition("=")
        if not path:
            raise InvalidRequestError(f"--lora {word}: write NAME=FOLDER, or NAME=REPOSITORY.")
        check_adapter_name(name)
        found[name] = find_adapter(path)
    return found


def room_for(files: Mapping[str, AdapterFiles]) -> tuple[str, ...]:
    """Return the options of an engine with room for these adapters. Raises InvalidRequestError."""
    if not files:
        return ()
    rank = least_rank(max(one.rank for one in files.values()))
    kept = ("--max-cpu-loras", str(max(_KEPT, len(files))))
    return ("--enable-lora", "--max-loras", str(len(files)), "--max-lora-rank", str(rank), *kept)


def _live(store: ServiceStore, service: str) -> list[ReplicaStatus]:
    """Raises ServiceNotFoundError for a service that is over: its adapters went with it."""
    live = [one for one in replicas_here(store, find_report(store, service)) if not one.is_over]
    if others := {one.service for one in live} - {service}:
        raise InvalidRequestError(f"{service} is no service: adapters are of all replicas of {others.pop()}.")
    wanted = read_wanted(store, service)
    if not live and (wanted is None or wanted.state != "asleep"):
        raise ServiceNotFoundError(
            f"{service} is not running: hpc-serve submit … --lora NAME=FOLDER starts it with one."
        )
    return live


def _check(store: ServiceStore, service: str, live: Sequence[ReplicaStatus], files: AdapterFiles) -> str:
    """Check an adapter by the options and the model of a service's jobs; returns what a person should see to.

    Raises InvalidRequestError.
    """
    ids = {one.job_id for one in live}
    submitted = store.read_submitted(service)
    jobs = [job for job in submitted if job.job_id in ids] or submitted[-1:]
    for job in jobs:
        if job.engine_args:
            check_room(files, job.engine_args, f"{service} (job {job.job_id}) was")
    on_cpus = [ON_CPUS] if any(job.gpu.startswith("cpu") for job in jobs) else []
    return " ".join(filter(None, (_check_base(files, (jobs[-1] if jobs else live[-1].job).model), *on_cpus)))


def _check_base(files: AdapterFiles, model: str) -> str:
    """Check that an adapter fits a model; returns what a person should see to. Raises InvalidRequestError."""
    try:
        _, spec, _ = find_spec(model, EngineConfig())
    except HpcServeError as error:
        return f"Its shapes were not compared with those of {model}: {error}"
    check_shapes(files, spec)
    base, served = (name.rstrip("/").rpartition("/")[2] for name in (files.base, spec.name))
    differs = base and base.lower() != served.lower()
    return f"It was trained on {files.base}, and the service has {spec.name}." if differs else ""


def _change(
    store: ServiceStore,
    service: str,
    change: Callable[[Mapping[str, Adapter]], dict[str, Adapter]],
    *,
    replicas: int = 1,
) -> None:
    """Change the adapters that are wanted. Raises StoreError."""

    def changed(found: Wanted | None) -> Wanted:
        wanted = found or Wanted(least=replicas, most=replicas, count=replicas)
        return replace(wanted, adapters=change(wanted.adapters))

    change_wanted(store, service, changed)


def _without(found: Mapping[str, Adapter], name: str) -> dict[str, Adapter]:
    return {one: adapter for one, adapter in found.items() if one != name}


def _wait(
    store: ServiceStore, service: str, live: Sequence[ReplicaStatus], name: str, wanted: Adapter
) -> tuple[Told, dict[str, str]]:
    """Wait until each ready replica says that it has what is `wanted` as `name`; returns the faults by replica.

    Their records say so: neither Slurm nor an engine is asked. Raises InvalidRequestError if somebody else wants
    another adapter of that name meanwhile, or none.
    """
    began_s = time.monotonic()
    while True:
        if wanted_adapters(store, service).get(name, _NONE) != wanted:
            raise InvalidRequestError(
                f"Somebody else has added or removed {name} meanwhile: hpc-serve adapter list {service}"
            )
        records = store.read(service).records if live else ()
        serving = [one for one in records if one.state in ("ready", "unresponsive") and not one.is_overdue(time.time())]
        here = {replica_of(one): one.adapters.get(name, _NONE) for one in serving}
        done = [replica for replica, adapter in here.items() if adapter.added_at == wanted.added_at]
        faults = {replica: here[replica].fault for replica in done if here[replica].fault}
        late = here.keys() - done
        if late and time.monotonic() - began_s > _LONGEST_LOAD_S:
            faults |= dict.fromkeys(late, "its launcher has said nothing of it in time")
        if faults or not late:
            coming = tuple(one.name for one in live if one.name not in here)
            return Told(done=tuple(done), coming=coming), faults
        time.sleep(_POLL_S)


def replica_of(record: EndpointRecord) -> str:
    """Return the name of a record's replica for people."""
    return replica_name(record.job_id, record.replica, record.replicas_per_job)


def _words(faults: Mapping[str, str]) -> str:
    return "; ".join(f"{replica}: {fault.rstrip('.')}" for replica, fault in faults.items())
