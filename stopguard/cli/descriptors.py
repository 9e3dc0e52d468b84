"""Room for connections: a stream needs two file descriptors, and the usual soft limit is 1,024."""

from __future__ import annotations

__all__ = ["raise_limit"]


def raise_limit() -> int | None:
    """Raise this process's soft limit on open files to its hard limit; returns what there is now.

    `None` where the system has no such limit (Windows). The hard limit is the operator's word, and stays.
    """
    try:
        import resource
    except ImportError:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):  # some systems call "unlimited" more than they allow
            return soft
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
