"""A profiler's events as NCCL lays them out, declared a second time: a slip in the plugin's own would show.

v4 is NCCL 2.27's; v5 and v6, of 2.28 on, have one layout. Offsets are those of 64-bit Linux.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int, c_size_t, c_uint8, c_uint64, c_void_p

from ...traces.records import FUNCS

#: As the profiler hears them: AllGather, ReduceScatter ...
FUNC_NAMES = {func: func.title().replace("_", "").encode() for func in FUNCS}
DTYPE_BYTES = {"int8": 1, "uint8": 1, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8, "float16": 2, "bfloat16": 2}
DTYPE_BYTES |= {"float32": 4, "float64": 8, "float8e4m3": 1, "float8e5m2": 1}

EVENT_GROUP, EVENT_COLL, EVENT_P2P, EVENT_KERNEL_CH, KERNEL_CH_STOP = 1, 2, 4, 64, 22
EVENT_GROUP_API, EVENT_COLL_API, EVENT_P2P_API, EVENT_KERNEL_LAUNCH = 256, 512, 1024, 2048
# NCCL tells of an event whose bit is in the mask, and of these as well where one of the bits below is.
BELOW = {EVENT_GROUP: 0xDF, EVENT_COLL: 0xDA, EVENT_P2P: 0xDC, EVENT_COLL_API: 0xDA, EVENT_P2P_API: 0xDC}
BELOW |= {EVENT_GROUP_API: 0xEDF, EVENT_KERNEL_LAUNCH: 0}


class _Coll(ctypes.Structure):
    _fields_ = (
        ("seq", c_uint64),
        ("func", c_char_p),
        ("send_buffer", c_void_p),
        ("recv_buffer", c_void_p),
        ("count", c_size_t),
        ("root", c_int),
        ("datatype", c_char_p),
        ("n_channels", c_uint8),
        ("n_warps", c_uint8),
        ("algo", c_char_p),
        ("proto", c_char_p),
    )


class _CollV5(_Coll):
    _fields_ = (("parent_group", c_void_p),)  # type: ignore[assignment]  # beside those of its base


class P2p(ctypes.Structure):
    """One send or receive."""

    _fields_ = (
        ("func", c_char_p),
        ("buffer", c_void_p),
        ("datatype", c_char_p),
        ("count", c_size_t),
        ("peer", c_int),
        ("n_channels", c_uint8),
        ("parent_group", c_void_p),  # from v5 on
    )


class CollApi(ctypes.Structure):
    """A call as the program makes it."""

    _fields_ = (
        ("func", c_char_p),
        ("count", c_size_t),
        ("datatype", c_char_p),
        ("root", c_int),
        ("stream", c_void_p),
        ("graph_captured", ctypes.c_bool),
    )


class _KernelCh(ctypes.Structure):
    _fields_ = (("channel", c_uint8), ("timer", c_uint64))


class _Body(ctypes.Union):
    _fields_ = (("coll", _Coll), ("p2p", P2p), ("kernel", _KernelCh), ("size_v4", c_uint8 * 80))


class _BodyV5(ctypes.Union):
    _fields_ = (("coll", _CollV5), ("p2p", P2p), ("kernel", _KernelCh), ("call", CollApi), ("size_v5", c_uint8 * 88))


class EventV4(ctypes.Structure):
    """An event of profiler v4."""

    _fields_ = (("type", c_uint8), ("parent", c_void_p), ("rank", c_int), ("body", _Body))


class EventV5(ctypes.Structure):
    """An event of profiler v5 and v6."""

    _fields_ = (("type", c_uint64), ("parent", c_void_p), ("rank", c_int), ("body", _BodyV5))


assert ctypes.sizeof(EventV4) == 104 and ctypes.sizeof(EventV5) == 112
