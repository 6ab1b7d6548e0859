"""A fake `cuda:0` that computes shapes, types and devices, and no values: FakeTensorMode, which torch's compiler uses.

Import it before torch: autograd asks the CUDA runtime for its devices, and `LIBRARY` answers instead.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

# torch installs a guard for 8 fake devices if there is no real one; the runtime must agree, and none is in use.
LIBRARY = """
extern "C" {
int fake_devices = 0;
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) { *flags = 0; *active = 0; return 0; }
}
namespace c10 { namespace cuda { signed char device_count() noexcept { return fake_devices; } } }
"""
FAKE_DEVICES = 8  # kFakeGuardImplMaxDevices in c10/core/impl/FakeGuardImpl.h


def build(folder: Path) -> Path:
    """Compile the library with g++ into a folder, and return it."""
    file = folder / "libcuda.so.1"
    command = ["g++", "-shared", "-fPIC", f"-Wl,-soname,{file.name}", "-x", "c++", "-", "-o", str(file)]
    subprocess.run(command, input=LIBRARY, text=True, check=True)
    return file


def load(file: Path) -> Any:
    """Load the library, before torch; return it for `start`."""
    return ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)


class Waited(Exception):
    """The host waited for the fake device."""


def apply_to_module(self: Any, convert: Any, recurse: bool = True) -> Any:
    """Convert parameters and buffers of a module, as `torch.nn.Module._apply`; keep those that do not change."""
    import torch

    for child in self.children() if recurse else ():
        child._apply(convert)
    for name, value in self._parameters.items():
        if value is not None:
            with torch.no_grad():
                new = convert(value)
            if (new.device, new.dtype) != (value.device, value.dtype):
                self._parameters[name] = torch.nn.Parameter(new, value.requires_grad)
    self._buffers |= {name: value if value is None else convert(value) for name, value in self._buffers.items()}
    return self


def one_device(func: Any, args: Any, kwargs: Any) -> None:
    """Check that all tensors of a fused optimizer, which changes its arguments and has no fake form, share a device."""
    import torch
    from torch.utils._pytree import tree_leaves

    devices = {value.device for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)}
    if len(devices) > 1:
        raise RuntimeError(f"{func} got tensors on {sorted(map(str, devices))}")


def start(library: Any) -> Any:
    """Return a context in which tensors on `cuda:0` are fake, for the process with this library.

    Its attribute `strict` makes a copy between host and device an error if the host waits for it.
    """
    import torch
    from torch._subclasses import FakeTensorMode, fake_tensor

    class FakeCuda(FakeTensorMode):
        strict = False
        avoid_device_init = True  # not only if torch.cuda.is_available() says so

        def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.__name__.startswith("_fused_"):
                return one_device(func, args, kwargs)
            result = super().dispatch(func, types, args, kwargs or {})
            if self.strict and func in COPIES:
                source = args[1] if func is torch.ops.aten.copy_.default else args[0]
                blocking = not (kwargs or {}).get("non_blocking", len(args) > 2 and args[2])
                if blocking and isinstance(source, torch.Tensor) and source.device.type != result.device.type:
                    raise Waited(f"a copy from {source.device} to {result.device} that waits")
            return result

    COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
    torch._C._ensureCUDADeviceGuardSet()  # while the runtime has no device
    ctypes.c_int.in_dll(library, "fake_devices").value = FAKE_DEVICES
    fake_tensor.init_gpu_context = lambda device: None  # would make a real tensor on the device
    torch.autograd.set_multithreading_enabled(False)  # no thread for each of the devices
    torch.backends.cudnn.enabled = False  # it would ask the driver
    torch.Tensor.pin_memory = lambda self, device=None: self  # not implemented for fake tensors
    torch.nn.Module._apply = apply_to_module  # torch's would swap fake tensors, which the fake mode refers to
    return FakeCuda(allow_non_fake_inputs=True)
