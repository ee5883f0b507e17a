"""Errors of collectives: is another rank lost, or is the cause on this node?"""

import re

import torch.distributed as dist

_ERROR_OF_THIS_RANK = re.compile(
    r"nccl(UnhandledCudaError|InternalError|InvalidArgument|InvalidUsage)"
)
"""NCCL error codes that are not caused by the death of a peer."""
_CONNECTION_LOST = re.compile(
    r"[Cc]onnection (closed|reset|refused|timed out)|Broken pipe|[Tt]imed? ?out"
)
_LIBRARIES = ("gloo", "NCCL", "TCPStore")
"""Names by which errors of collectives can be told from other runtime errors."""


def is_lost_rank_error(error: Exception, *, rehearsed: bool = True) -> bool:
    """Return whether an error means that another rank is unreachable.

    Before a step was ``rehearsed``, which creates every communicator, an NCCL system
    error comes from this node, such as too little shared memory or a wrong network
    interface, and a restart does not help.
    """
    text = str(error)
    is_error_of_this_node = not rehearsed and "ncclSystemError" in text
    if is_error_of_this_node or _ERROR_OF_THIS_RANK.search(text):
        return _CONNECTION_LOST.search(text) is not None
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(
        library in text for library in _LIBRARIES
    )
