"""Tries CUDA in a separate process, without torch: `python -m hpc_serve.job.preflight.cuda_probe`.

It asks the driver's library for its GPUs, writes to the memory of each, reads it back, and prints what it saw as JSON.
A context of CUDA takes memory of the GPU until its process ends. So the launcher does not do this itself.
"""

from __future__ import annotations

import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hpc_serve.job.preflight.facts import CudaDevice, CudaFacts
from hpc_serve.rendezvous.fields import to_json_text

_LIBRARY = "libcuda.so.1"
_WORDS, _VALUE = 1024, 0x5A17C0DE
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
_NAME_BYTES = 128


class _CudaError(Exception):
    pass


def probe(cuda: Any) -> CudaFacts:
    """Ask the library `cuda` for its GPUs, and try each."""
    try:
        _call(cuda, "cuInit", 0)
        version, count = ctypes.c_int(), ctypes.c_int()
        _call(cuda, "cuDriverGetVersion", ctypes.byref(version))
        _call(cuda, "cuDeviceGetCount", ctypes.byref(count))
    except _CudaError as error:
        return CudaFacts(error=str(error))
    if not count.value:
        return CudaFacts(cuda_version=version.value)
    with ThreadPoolExecutor(count.value) as threads:  # a context takes a good part of a second
        devices = tuple(threads.map(lambda place: _try_device(cuda, place), range(count.value)))
    return CudaFacts(cuda_version=version.value, devices=devices)


def _try_device(cuda: Any, place: int) -> CudaDevice:
    name, major, minor = ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_int(), ctypes.c_int()
    device, free, total = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_size_t()
    error = ""
    try:
        _call(cuda, "cuDeviceGet", ctypes.byref(device), place)
        _call(cuda, "cuDeviceGetName", name, _NAME_BYTES, device)
        _call(cuda, "cuDeviceGetAttribute", ctypes.byref(major), _MAJOR, device)
        _call(cuda, "cuDeviceGetAttribute", ctypes.byref(minor), _MINOR, device)
        context = ctypes.c_void_p()
        _call(cuda, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        _call(cuda, "cuCtxSetCurrent", context)
        _call(cuda, "cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        _write_and_read(cuda)
    except _CudaError as found:
        error = str(found)
    return CudaDevice(
        name=name.value.decode(errors="replace"),
        capability=f"{major.value}.{minor.value}" if major.value else "",
        free_bytes=free.value,
        total_bytes=total.value,
        error=error,
    )


def _write_and_read(cuda: Any) -> None:
    memory, words = ctypes.c_uint64(), (ctypes.c_uint32 * _WORDS)()
    _call(cuda, "cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(ctypes.sizeof(words)))
    _call(cuda, "cuMemsetD32_v2", memory, ctypes.c_uint(_VALUE), ctypes.c_size_t(_WORDS))
    _call(cuda, "cuMemcpyDtoH_v2", words, memory, ctypes.c_size_t(ctypes.sizeof(words)))
    if any(word != _VALUE for word in words):
        raise _CudaError("no error, but what was written is not what was read")


def _call(cuda: Any, function: str, *arguments: Any) -> None:
    if code := getattr(cuda, function)(*arguments):
        name = ctypes.c_char_p()
        cuda.cuGetErrorName(code, ctypes.byref(name))
        raise _CudaError((name.value or b"").decode(errors="replace") or f"error {code}")


def main() -> int:
    try:
        cuda = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        facts = CudaFacts(error=f"no library {_LIBRARY}: {error}")
    else:
        facts = probe(cuda)
    print(to_json_text(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
