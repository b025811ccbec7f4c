"""Where a database file may stand: never on a network file system, whose locks cannot be trusted.

A write-ahead log needs shared memory and POSIX locks between all processes that open the file;
NFS, SMB and FUSE mounts of other hosts give neither (decision 40).
"""

from pathlib import Path

from perdure.protocol.errors import Unavailable

_NETWORK = frozenset(
    {
        "9p",
        "afs",
        "ceph",
        "cifs",
        "davfs",
        "fuse.ceph",
        "fuse.davfs2",
        "fuse.gcsfuse",
        "fuse.glusterfs",
        "fuse.goofys",
        "fuse.mfs",
        "fuse.rclone",
        "fuse.s3fs",
        "fuse.sshfs",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "smb3",
        "smbfs",
    }
)


class NetworkFile(Unavailable):
    """The database would stand on a network file system; an operator must choose a local disk."""


def filesystem_of(path: Path, mounts: str) -> str | None:
    """Return the type of the file system of an absolute path by the text of `/proc/mounts`."""
    best, kind = -1, None
    for line in mounts.split("\n"):
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        # a later mount on the same point covers the earlier one
        if path.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), fields[2]
    return kind


def refuse_network_file(path: Path, mounts: Path = Path("/proc/mounts")) -> None:
    """Raise NetworkFile when `path` lies on a network file system (known on Linux only)."""
    try:
        kind = filesystem_of(path.resolve(), mounts.read_text("utf-8", "surrogateescape"))
    except OSError:
        return
    if kind in _NETWORK:
        raise NetworkFile(
            f"{path} is on a network file system ({kind}), where SQLite's locks do not hold: "
            "put the database on a local disk, or use PostgreSQL"
        )
