"""Errors of collectives: is another rank lost, or is the cause on this node?"""

import re

import torch.distributed as dist

_ERROR_OF_THIS_RANK = re.compile(
    r"nccl(UnhandledCudaError|InternalError|InvalidArgument|InvalidUsage)"
)
"""NCCL's codes of errors on this rank, unless the message also names a lost
connection."""
_CONNECTION_LOST = re.compile(
    r"[Cc]onnection (closed|reset|refused|timed out)|Broken pipe|[Tt]imed? ?out"
)
"""Messages of sockets whose other end is gone."""
_LIBRARIES = ("gloo", "NCCL", "TCPStore")
"""Names by which errors of collectives can be told from other runtime errors."""


def is_lost_rank_error(error: Exception, *, rehearsed: bool = True) -> bool:
    """Return whether an error means that another rank is unreachable.

    Args:
        error: Error of a collective, or any other.
        rehearsed: True after a rehearsed step, which creates every communicator. Before
            it, an NCCL system error comes from this node, such as too little shared
            memory or a wrong network interface, and a restart does not help.
    """
    message = str(error)
    is_error_of_this_node = not rehearsed and "ncclSystemError" in message
    if is_error_of_this_node or _ERROR_OF_THIS_RANK.search(message):
        return _CONNECTION_LOST.search(message) is not None
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(
        library in message for library in _LIBRARIES
    )
