"""A process of ours, joined to its parent by one socket pair: no port, no name, no file."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence

from octavo.child_environment import child_environment


def start_child(
    module: Sequence[str], keep: Sequence[int] = ()
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run a module as a process; the number of its end of the socket pair is its last argument.

    Either side's end closes the socket, which the other notices at once.

    Args:
        module: its name, and its arguments before that number.
        keep: further file descriptors that it shall have under the same numbers.

    Returns:
        The process, and this side's end.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", *module, str(theirs.fileno())],
            pass_fds=[theirs.fileno(), *keep],
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # signals for the front end's group are the front end's to handle
        )
    return process, ours
