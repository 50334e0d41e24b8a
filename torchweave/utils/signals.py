"""Signals of a process whose interpreter may be busy."""

from __future__ import annotations

import ctypes
import signal
import sys

_RESET_HANDLER = 0x80000000  # SA_RESETHAND


class _Action(ctypes.Structure):
    """`struct sigaction` of the C libraries of Linux on 64-bit processors."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_uint),
        ("restorer", ctypes.c_void_p),
    )


def reset_after_next(number: signal.Signals) -> bool:
    """Let the next delivery of a signal restore the default action besides calling the handler; False on other systems.

    Python's handlers run between two bytecodes of the main thread, hence never during a long call into C. The system ends the
    process at the signal after the next one, unless the handler has been installed again.
    """
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    library, action = ctypes.CDLL(None), _Action()
    if library.sigaction(int(number), None, ctypes.byref(action)) != 0:
        return False
    action.flags |= _RESET_HANDLER
    return library.sigaction(int(number), ctypes.byref(action), None) == 0
