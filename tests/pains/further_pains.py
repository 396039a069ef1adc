"""Failures beside the 25: of a site's environment, of folders and ports that one node alone has, of a model's files."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tests.cluster.config import CHECKOUT, LOGIN
from tests.pains.pain import Seen, pain
from tests.pains.site import Job, Site, replaced

RAY: dict[str, Any] = {"backend": "ray"}
MP: dict[str, Any] = {"backend": "mp"}
ONE_NODE: dict[str, Any] = {"num_nodes": 1, "pipeline_parallel_size": 1}


@pain(0, "beside them: a model that one node does not see", r"on n2: .*no (such folder|config\.json)")
def model_on_one_node(site: Site) -> Seen:
    """On the second node an empty disk lies over the model's folder."""
    with site.small_disk("n2", str(site.model), "size=1m,mode=755"):
        return site.failed(site.submit("model-on-one-node", env={"HPC_SERVE_MODEL": str(site.model)}, **MP))


@pain(0, "beside them: an environment that one node does not see", r"n2.*(environment|python|no .*command)|python.*n2")
def environment_on_one_node(site: Site) -> Seen:
    """The Python environment is on a disk of the first node."""
    env = site.environment("on-one-node", path="/usr/bin:/bin", programs={})
    with site.small_disk("n2", env["HPC_SERVE_ENV"], "size=1m,mode=755"):
        return site.failed(site.submit("environment-on-one-node", env=env, **MP))


@pain(0, "beside them: a home that one node does not see", r"could not open its log: the folder of logs is not there")
def home_on_one_node(site: Site) -> Seen:
    """On the second node an empty disk lies over alice's home, as where /home is not mounted."""
    with site.small_disk("n2", str(site.alice.home), "size=1m,mode=755"):
        return site.failed(site.submit("home-on-one-node", env={"HPC_SERVE_JOIN_S": "30"}, **MP))


@pain(0, "beside them: modules of another Python", r"modules that were made for another Python")
def other_python(site: Site) -> Seen:
    """PYTHONPATH, as a site's modules set it, names packages of another Python, whose filelock cannot be imported."""
    folder = site.alice.home / "python2"
    site.alice.write("python2/filelock.py", "print 'Python 2'\n")
    path = ":".join(filter(None, (str(folder), site.alice.environ.get("PYTHONPATH"))))
    return site.failed(site.submit("other-python", env={"PYTHONPATH": path}, **ONE_NODE))


@pain(0, "beside them: a module sets CUDA_VISIBLE_DEVICES", r"CUDA_VISIBLE_DEVICES=0 names 1")
def visible_devices(site: Site) -> Seen:
    """The script sets CUDA_VISIBLE_DEVICES=0, for an engine of two GPUs."""
    edit = replaced("python -m hpc_serve.job --", "env CUDA_VISIBLE_DEVICES=0 python -m hpc_serve.job --")
    return site.failed(site.submit("visible-devices", edit=edit, **{**ONE_NODE, "tensor_parallel_size": 2}))


@pain(0, "beside them: /tmp of the second node is full", r"on n2: /tmp")
def second_tmp_full(site: Site) -> Seen:
    """The second node's /tmp is a disk of 64 KiB."""
    assert not CHECKOUT.is_relative_to("/tmp"), "a clone in /tmp, with its environment, would be hidden: use another"
    with site.small_disk("n2", "/tmp", "size=64k,mode=1777"):
        return site.failed(site.submit("second-tmp-full", **MP))


@pain(0, "beside them: proxies that catch the nodes' traffic", r"and answered")
def proxies(site: Site) -> Seen:
    """http_proxy and https_proxy, in capitals too, name a port where nobody listens, in the job and for the client."""
    dead = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    job = site.submit("proxies", env=dead, **RAY)
    site.ready(job)
    done = site.alice.hpc_serve("chat", "proxies", "hello", env=dead)
    said = "ready and answered" if done.returncode == 0 else f"ready, and chat says: {done.stderr.strip()[-300:]}"
    return Seen(said=said, by="-", is_before_weights=None, seconds=time.monotonic() - job.began_at)


@pain(
    0,
    "beside them: the login node does not reach the engine",
    r"ready by its record, but no answer from 10\.77\.0\.11:\d+ to this machine",
)
def login_cut_off(site: Site) -> Seen:
    """iptables of the first node drops what the login node sends to the engine's port."""
    job = site.submit("login-cut-off", options=("--nodelist=n1",), **ONE_NODE)
    port = str(site.ready(job)["port"])
    rule = ("INPUT", "-p", "tcp", "-s", site.cluster.address(LOGIN), "--dport", port, "-j", "DROP")
    with site.changed("n1", ("iptables", "-A", *rule), ("iptables", "-D", *rule)):
        return site.doctor(Job(job.service, job.job_id, time.monotonic()))


@pain(0, "beside them: no tokenizer", r"on n1: .*no-tokenizer holds no tokenizer")
def no_tokenizer(site: Site) -> Seen:
    """A copy of the model without its tokenizer's files."""
    folder = _copy(site, "no-tokenizer")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    options = ("--nodelist=n1",)
    return site.failed(site.submit("no-tokenizer", env={"HPC_SERVE_MODEL": str(folder)}, options=options, **ONE_NODE))


@pain(0, "beside them: no tokenizer, in vLLM's words", r"a file of the model is missing.*tokenizer", needs_engine=True)
def no_tokenizer_words(site: Site) -> Seen:
    """The same where nobody looks before."""
    folder = _copy(site, "no-tokenizer-words")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    env = {"HPC_SERVE_MODEL": str(folder), "HPC_SERVE_PREFLIGHT": "off"}
    return site.failed(site.submit_engine("no-tokenizer-words", env=env, **ONE_NODE))


@pain(0, "beside them: a config of an unknown architecture", r"architecture", needs_engine=True)
def unknown_architecture(site: Site) -> Seen:
    """A copy of the model whose config names an architecture that nobody has."""
    folder = _copy(site, "unknown-architecture")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["WhaleForCausalLM"], "model_type": "whale"}
    (folder / "config.json").write_text(json.dumps(config))
    return site.failed(site.submit_engine("unknown-architecture", env={"HPC_SERVE_MODEL": str(folder)}, **ONE_NODE))


def _copy(site: Site, name: str) -> Path:
    folder = site.alice.home / name
    site.alice.run("cp", "-r", str(site.model), str(folder))
    return folder
