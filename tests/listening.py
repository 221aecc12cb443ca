"""Where the processes of a run listen, out of /proc, in whatever network namespace they are."""

import ipaddress
import os
import re
from contextlib import suppress
from pathlib import Path

# /proc/net's hexadecimal state of a socket that waits to be spoken to: TCP LISTEN; a bound,
# unconnected UDP socket has TCP_CLOSE.
_WAITING = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}
_UNIX_LISTENS = 0x10000  # __SO_ACCEPTCON


def tree(pid):
    """The process and all its descendants that live, the process first."""
    children = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:  # it ended meanwhile
                continue
            children.setdefault(int(parent), []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def listeners(pids):
    """Sockets open to strangers: `address:port` of TCP and UDP sockets, `unix` of unix ones."""
    found = set()
    for pid in pids:
        held = _sockets(pid)
        with suppress(OSError):  # it is gone
            found |= {where for inode, where in _waiting(pid) if inode in held}
    return sorted(found)


def _sockets(pid):
    """Inodes of the sockets that a process has open; none of one that is gone."""
    found = set()
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed since it was listed
                if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link)):
                    found.add(match[1])
    return found


def is_loopback(listener):
    """Whether no other machine reaches it."""
    return listener == "unix" or ipaddress.ip_address(listener.rpartition(":")[0]).is_loopback


def _waiting(pid):
    """Inode and place of every socket that waits, in the network namespace of the process."""
    found = []
    for protocol, state in _WAITING.items():
        table = Path(f"/proc/{pid}/net/{protocol}")
        lines = table.read_text().splitlines()[1:] if table.exists() else []
        for columns in map(str.split, lines):
            if columns[3] == state:
                found.append((columns[9], _place(columns[1])))
    for columns in map(str.split, Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]):
        if int(columns[3], 16) & _UNIX_LISTENS:
            found.append((columns[6], "unix"))
    return found


def _place(text):
    """`address:port` of /proc's form: words of four bytes in the machine's order, port in hex."""
    address, port = text.split(":")
    words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
    parsed = ipaddress.ip_address(b"".join(words))
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped:
        parsed = parsed.ipv4_mapped
    return f"{parsed}:{int(port, 16)}"
