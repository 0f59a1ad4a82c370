"""Scripts beside the process that owns a store: the owner listens, and scripts ask it for little.

Floors, from the top:

    opening scripts    `kvstore.open`; how a script reaches a store
    listener beside    the thread that answers; a store that another process owns
"""

from kvstore.control.opening import open  # noqa: A004  # kvstore.open is the public name

__all__ = ["open"]
