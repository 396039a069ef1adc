"""What is gathered on a node: from files, from what the drivers' tools print, and from a stand-in of CUDA's library."""

from __future__ import annotations

import ctypes
import http.server
import json
import os
import shutil
import threading
from dataclasses import replace

import pytest

from hpc_serve.hub.local_weights import HubSettings
from hpc_serve.job.preflight import cuda_probe, gather_gpus, gather_node
from hpc_serve.job.preflight.facts import CudaDevice, CudaFacts
from tests.support.fake_hub import cached
from tests.support.nodes import write_program
from tests.unit.job.conftest import safetensors
from tests.unit.job.preflight.nodes import CUDA, DEVICE, NEEDS

# As drivers 535 and 570 print it.
LISTED = """\
0, GPU-6d1c1f3e-0000-0000-0000-000000000000, NVIDIA H100 80GB HBM3, 81559, 535.183.01, 0
1, GPU-7aa2b0c4-0000-0000-0000-000000000000, NVIDIA H100 80GB HBM3, 81559, 535.183.01, 2
"""


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, ["0", "1"]),
        ("1", ["1"]),
        ("GPU-7aa2b0c4", ["1"]),
        ("1,0", ["1", "0"]),
        ("", []),
        ("5", []),
        ("MIG-1", None),
    ],
)
def test_the_gpus_of_this_job_are_those_that_it_may_see(visible, found):
    chosen = gather_gpus.choose_visible(gather_gpus.parse_listing(LISTED), visible)
    assert (chosen if chosen is None else [gpu["index"] for gpu in chosen]) == found


def test_a_gpu_is_read_as_its_tool_lists_it():
    first, row = gather_gpus.parse_listing(LISTED)
    second = gather_gpus.read_gpu(row)
    assert (second.name, second.uncorrected_errors) == ("NVIDIA H100 80GB HBM3", 2)
    assert second.total_bytes == 81559 * 2**20
    assert gather_gpus.read_gpu({**first, "ecc.errors.uncorrected.volatile.total": "[N/A]"}).uncorrected_errors == 0
    assert gather_gpus.parse_listing("No devices were found\n") == []


def test_a_gpu_that_somebody_may_be_leaving_is_looked_at_again():
    assert not gather_gpus.is_in_use(CUDA, NEEDS)
    assert gather_gpus.is_in_use(replace(CUDA, devices=(replace(DEVICE, free_bytes=0),)), NEEDS)
    assert gather_gpus.is_in_use(
        replace(CUDA, devices=(replace(DEVICE, error="CUDA_ERROR_DEVICE_UNAVAILABLE"),)), NEEDS
    )
    assert not gather_gpus.is_in_use(CudaFacts(error="CUDA_ERROR_NO_DEVICE"), NEEDS)


def test_a_node_without_any_tool_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(gather_gpus, "torch_cuda", str)
    facts = gather_gpus.gather_gpus(NEEDS, {"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0"})
    assert (facts.tool, facts.visible, facts.cuda) == ("", "0", None)
    assert gather_gpus.gather_gpus(replace(NEEDS, gpus=0), {}) is None  # of an engine on CPUs


class FakeCuda:
    """CUDA's driver library, as far as the probe calls it. `errors` are codes by function."""

    def __init__(self, count: int = 2, *, forgets: bool = False, **errors: int) -> None:
        self._count, self._forgets, self._errors = count, forgets, errors
        self._memory: list[int] = []

    def __getattr__(self, function):
        def call(*arguments):
            if code := self._errors.get(function):
                return code
            known = getattr(type(self), f"_{function}", None)
            return (known(self, *arguments) if known is not None else 0) or 0

        return call

    def _cuDriverGetVersion(self, version):
        version._obj.value = 12080

    def _cuDeviceGetCount(self, count):
        count._obj.value = self._count

    def _cuDeviceGetName(self, name, size, device):
        name.value = b"NVIDIA H100"

    def _cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = {75: 9, 76: 0}[attribute]

    def _cuMemGetInfo_v2(self, free, total):
        free._obj.value, total._obj.value = 70, 80

    def _cuMemcpyDtoH_v2(self, words, memory, size):
        words[:] = [0 if self._forgets else cuda_probe._VALUE] * len(words)
        assert size.value == ctypes.sizeof(words)

    def _cuGetErrorName(self, code, name):
        name._obj.value = b"CUDA_ERROR_NO_DEVICE" if code == 100 else None


def test_the_probe_tries_each_gpu():
    device = CudaDevice(name="NVIDIA H100", capability="9.0", free_bytes=70, total_bytes=80)
    assert cuda_probe.probe(FakeCuda()) == CudaFacts(cuda_version=12080, devices=(device, device))


@pytest.mark.parametrize(
    ("cuda", "errors"),
    [
        (FakeCuda(cuInit=100), ["CUDA_ERROR_NO_DEVICE"]),
        (FakeCuda(1, cuDevicePrimaryCtxRetain=7), ["", "error 7"]),
        (FakeCuda(1, forgets=True), ["", "no error, but what was written is not what was read"]),
        (FakeCuda(0), [""]),
    ],
)
def test_the_probe_says_what_failed(cuda, errors):
    facts = cuda_probe.probe(cuda)
    assert [facts.error, *(one.error for one in facts.devices)] == errors


def test_this_machine_has_memory_and_limits():
    memory = gather_node.gather_memory()
    assert memory.total_bytes > 0
    assert memory.shm_is_writable
    assert set(gather_node.gather_limits()) == {"tasks", "memlock", "nofile", "nproc", "as"}


def test_the_tasks_of_a_user_are_counted(tmp_path):
    for name, threads in (("1", 1), ("12", 3), ("self", 9)):
        for thread in range(threads):
            (tmp_path / name / "task" / str(thread)).mkdir(parents=True)
    (tmp_path / "13").mkdir()  # it ends
    assert gather_node.count_tasks(os.geteuid(), tmp_path) == 4
    assert gather_node.count_tasks(os.geteuid() + 1, tmp_path) == 0
    assert gather_node.count_tasks(os.geteuid()) >= 1


def test_a_folder_that_is_not_there_yet_is_judged_by_the_one_above(tmp_path):
    folder, other = gather_node.gather_folders({"caches": str(tmp_path / "a" / "b"), "logs": str(tmp_path)})
    assert (folder.purpose, folder.is_writable, other.is_writable) == ("caches", True, True)
    assert folder.free_bytes > 0
    assert not list(tmp_path.iterdir())


def test_what_torch_was_built_for_is_read_from_its_file():
    cuda = "__version__ = '2.9.0'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
    rocm = "cuda: Optional[str] = None\nhip: Optional[str] = '6.3.4'\n"
    assert gather_node._BUILT_FOR.findall(cuda) == ["12.8"]
    assert gather_node._BUILT_FOR.findall(rocm) == []


def test_commands_that_are_missing_are_named(tmp_path):
    write_program(tmp_path / "ray", "#!/bin/sh\n")
    facts = gather_node.gather_software({"PATH": str(tmp_path)}, ["vllm", "ray"], "/tmp/hs")
    assert facts.missing_commands == ("vllm",)
    assert {"python", "hpc-serve"} <= set(facts.versions)


WEIGHTS = safetensors(bytes(16))


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "a.safetensors").write_bytes(WEIGHTS)
    (folder / "b.safetensors").write_bytes(WEIGHTS)
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def gathered(model, **options):
    return gather_node.gather_weights(str(model), {"HF_HOME": str(model.parent / "hf")}, load_format="auto", **options)


def test_whole_weights_are_counted_and_what_no_index_names_is_not_read(model):
    (model / "consolidated.safetensors").write_bytes(b"")
    facts = gathered(model)
    assert (facts.error, facts.missing, facts.damaged, facts.num_files) == ("", "", (), 2)
    assert facts.total_bytes == 2 * len(WEIGHTS)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (WEIGHTS[:-1], f"b.safetensors has {len(WEIGHTS) - 1} of its {len(WEIGHTS)} bytes"),
        (WEIGHTS[:20], "b.safetensors ends within its header, after 20 bytes"),
        (b"", "b.safetensors is empty"),
        (b"\x04" + bytes(7) + b"nope", "b.safetensors has a header that is not safetensors'"),
        (b"version https://git-lfs.github.com/spec/v1\n", "b.safetensors ends within its header, after 43 bytes"),
    ],
)
def test_a_file_that_is_cut_short_is_named(model, content, words):
    (model / "b.safetensors").write_bytes(content)
    assert gathered(model).damaged == (words,)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model.v3", "tekken.json", "vocab.txt", "qwen.tiktoken"])
def test_a_tokenizer_has_one_of_many_files(model, name):
    (model / "tokenizer_config.json").write_text("{}")
    assert gathered(model).lacks_tokenizer
    (model / name).write_text("")
    assert not gathered(model).lacks_tokenizer


def test_files_that_are_missing_are_named(model):
    (model / "b.safetensors").unlink()
    assert gathered(model).missing == "only 1 of its 2 files of weights (b.safetensors missing)"


def test_a_folder_that_is_not_there_is_an_error(model):
    assert gathered(model / "none").error == "no such folder on this node"
    (model / "config.json").unlink()
    assert gathered(model).error == "no config.json in it, as this node sees it"


def test_the_hub_is_asked_for_what_the_cache_lacks_alone(model):
    asked: list[str] = []

    def ask(settings, repository):
        asked.append(repository)
        return 401, "GatedRepo"

    def of_hub(**environ):
        environ = {"HF_HOME": str(model.parent / "hf"), **environ}
        return gather_node.gather_weights("acme/m", environ, load_format="auto", ask_hub=ask)

    facts = of_hub()
    assert (facts.folder, facts.hub_status, facts.hub_error, asked) == ("", 401, "GatedRepo", ["acme/m"])
    assert of_hub(HF_HUB_OFFLINE="1").hub_status is None
    shutil.copytree(model, cached(model.parent / "hf" / "hub", "acme/m", {}), dirs_exist_ok=True)
    assert (of_hub(HF_TOKEN="x").num_files, asked) == (2, ["acme/m"])


def test_what_is_neither_folder_nor_repository_is_not_looked_for(model):
    assert gather_node.gather_weights("m", {}, load_format="auto") is None
    assert gather_node.gather_weights("s3://bucket/model", {}, load_format="runai_streamer") is None
    assert gather_node.gather_weights(str(model / "a.safetensors"), {}, load_format="gguf") is None


@pytest.fixture
def hub(monkeypatch):
    """A hub on this machine that redirects to another host, and keeps the headers that it got."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(gather_node, "_HUB_S", 60)
    seen: list[str | None] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            seen.append(self.headers.get("Authorization"))
            self.send_response(307 if self.path.startswith("/acme/m/") else 403)
            self.send_header("X-Error-Code", "GatedRepo")
            self.send_header("Location", "http://127.0.0.1:1/elsewhere")
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
        server.shutdown()


def test_a_redirect_of_the_hub_is_an_answer_and_the_token_goes_nowhere_else(hub, tmp_path):
    endpoint, seen = hub
    settings = HubSettings(cache=tmp_path, endpoint=endpoint, is_offline=False, token="secret")
    assert gather_node.ask_hub(settings, "acme/m") == (307, "GatedRepo")
    assert gather_node.ask_hub(replace(settings, token=None), "acme/gated") == (403, "GatedRepo")
    assert gather_node.ask_hub(replace(settings, endpoint="not an address"), "acme/m") == (0, "")
    assert seen == ["Bearer secret", None]


def test_the_network_is_read_from_its_files(tmp_path):
    files = {"net/lo/speed": "-1", "net/lo/mtu": "65536", "infiniband/mlx5_0/ports/1/state": "4: ACTIVE"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    facts = gather_node.gather_network("127.0.0.1", {"NCCL_SOCKET_IFNAME": "ib"}, sys_class=tmp_path)
    assert (facts.interface, facts.speed_mbits, facts.mtu, facts.active_ib_ports) == ("lo", None, 65536, 1)
    assert "lo" in facts.interfaces
    assert facts.chosen == {"NCCL_SOCKET_IFNAME": "ib"}
