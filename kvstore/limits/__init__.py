"""Every bound in one place, each with its reason.

Floors, from the top:

    backup control service
    store
"""

from kvstore.limits.backup import *  # noqa: F403  # each bound is defined once, and named here
from kvstore.limits.control import *  # noqa: F403
from kvstore.limits.service import *  # noqa: F403
from kvstore.limits.store import *  # noqa: F403
